"""Report: how a part reports a failure without ending anything, and what a report holds.

A Log's `error` is one. Parts that hold no clock and no stream ask for a Report, not for a Log.
"""

from __future__ import annotations

from typing import Protocol

Field = str | int | float | bool | None


class Report(Protocol):
    """Called with what went wrong and its circumstances, units in the fields' names."""

    def __call__(self, what: str, **fields: Field) -> None: ...
