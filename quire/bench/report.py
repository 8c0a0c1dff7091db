"""The JSON object of a measurement: the results, the machine card and the settings.

Tables and progress are in quire/obs/report.py, which simulations use too. Always holds: every
result has the machine card.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.bench.machine import machine_card


def result(bench: str, settings: Mapping[str, object], **parts: object) -> dict[str, object]:
    """Return the object of a run."""
    return {"bench": bench, "machine": machine_card(), "settings": dict(settings), **parts}
