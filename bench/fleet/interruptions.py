"""What a router's metrics say of interrupted streams: how long, and where the time went.

An interruption is the time from the last event of a stream before its replica failed to the next
event, so detection and resume together, and up to a usual gap between two events more. Knows the
metrics by name only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIMIT_S = 3.0
_INTERRUPTION = "quire_router_interruption_seconds"
_PHASE = "quire_router_resume_phase_seconds"
_RETRIES = "quire_router_resume_retries_total"
_PHASES = ("detection", "placement", "acceptance")


def is_counter(name: str) -> bool:
    """Return whether a metric is needed here."""
    return name.startswith((_INTERRUPTION, _PHASE, _RETRIES)) and "_created" not in name


def interruptions(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return number, mean, distribution, causes and phases of the interruptions."""
    count = _sum(metrics, f"{_INTERRUPTION}_count")
    buckets: dict[str, int] = {}
    for name, value in metrics.items():
        if name.startswith(f"{_INTERRUPTION}_bucket"):
            limit = _label(name, "le")
            buckets[limit] = buckets.get(limit, 0) + int(value)
    buckets = dict(sorted(buckets.items(), key=lambda pair: float(pair[0])))
    within = next((n for limit, n in buckets.items() if float(limit) == LIMIT_S), 0)
    return {
        "streams": int(count),
        "share_within_3_s": round(within / count, 4) if count else None,
        "mean_s": round(_sum(metrics, f"{_INTERRUPTION}_sum") / count, 3) if count else None,
        "causes": {
            _label(name, "cause"): int(value)
            for name, value in metrics.items()
            if name.startswith(f"{_INTERRUPTION}_count") and value
        },
        "retries": {
            _label(name, "reason"): int(value)
            for name, value in metrics.items()
            if name.startswith(_RETRIES) and value
        },
        "seconds_at_most": buckets,
        "phases": {phase: _phase(metrics, phase) for phase in _PHASES} if count else {},
    }


def _phase(metrics: Mapping[str, float], phase: str) -> dict[str, float | None]:
    """Return mean, median and 95th percentile of a phase; these two as the bounds of buckets."""
    label = f'phase="{phase}"'
    count = metrics.get(f"{_PHASE}_count{{{label}}}", 0.0)
    total = metrics.get(f"{_PHASE}_sum{{{label}}}", 0.0)
    buckets = sorted(
        (float(_label(name, "le")), value)
        for name, value in metrics.items()
        if name.startswith(f"{_PHASE}_bucket") and label in name
    )
    found: dict[str, float | None] = {"mean_s": round(total / count, 3) if count else None}
    for name, share in (("p50_at_most_s", 0.5), ("p95_at_most_s", 0.95)):
        limit = next((limit for limit, n in buckets if n >= share * count), None)
        found[name] = limit if limit is not None and limit < float("inf") else None
    return found


def _label(name: str, label: str) -> str:
    return name.partition(f'{label}="')[2].partition('"')[0]


def _sum(metrics: Mapping[str, float], family: str) -> float:
    return sum(value for name, value in metrics.items() if name.partition("{")[0] == family)
