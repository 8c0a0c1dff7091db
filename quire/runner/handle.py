"""Handle: a submitted plan, until its result is collected.

A file of its own so that the engine's loop can name it without loading an executor.
"""

from __future__ import annotations

from typing import Protocol

from quire.base.records import StepResult


class Handle(Protocol):
    """A plan handed in; `outcome` waits for its result or raises what went wrong."""

    def outcome(self) -> StepResult: ...
