"""How many replicas a load needs: by running requests, waiting tokens and the predicted TTFT.

Numbers in, a number out; Ray Serve applies the bounds, the delays and the way from zero. Ray copies
this file's code to its controller, so it imports the standard library only. Knows no request.
Always holds: an idle application needs zero replicas, and a waiting token more than that; a replica
that reports nothing serves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What a replica reports, by name (load_report.py).
RUNNING, SLOTS = "quire_running_requests", "quire_slots"
WAITING_TOKENS, TTFT_MS = "quire_waiting_tokens", "quire_predicted_ttft_ms"

Reports = Mapping[str, Mapping[Any, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTarget:
    """The load of one replica. busy_share: of its slots, that running requests may fill.
    waiting_tokens: that may wait beside them. ttft_ms: for the next request; 0: not looked at."""

    busy_share: float
    waiting_tokens: int
    ttft_ms: float = 0.0


def replicas_needed(
    reports: Reports, num_replicas: int, target: ScalingTarget, *, num_calls: float = 0.0
) -> float:
    """Return how many replicas the load needs, as a fraction that is rounded up later.

    reports: by name and replica, as Ray Serve aggregates them. num_replicas: that run now; one
    without a report is stopped or new, and counts beside those that the load needs. num_calls: that
    wait for a replica.
    """
    slots = reports.get(SLOTS, {})
    num_silent = max(num_replicas - len(slots), 0)
    first = 1.0 if num_calls else 0.0
    if not slots:
        return first + num_silent
    slots_each = max(sum(slots.values()) / len(slots), 1.0)
    running = sum(reports.get(RUNNING, {}).values())
    waiting = sum(reports.get(WAITING_TOKENS, {}).values())
    needed = running / (slots_each * target.busy_share) + waiting / target.waiting_tokens
    waits_ms = reports.get(TTFT_MS, {})
    if target.ttft_ms and waits_ms and waiting:
        # Waiting requests are divided among the replicas, so their wait falls in proportion.
        mean_ms = sum(waits_ms.values()) / len(waits_ms)
        if mean_ms > target.ttft_ms:
            needed = max(needed, len(slots) * mean_ms / target.ttft_ms)
    return max(needed, first) + num_silent


class ScalingPolicy:
    """The policy of Ray Serve's autoscaling_config; the arguments are those of ScalingTarget."""

    def __init__(self, **target: Any) -> None:
        self._target = ScalingTarget(**target)

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas for an AutoscalingContext, and no state."""
        reports = context.aggregated_metrics or {}
        num_running, num_wanted = context.current_num_replicas, context.target_num_replicas
        calls = context.total_num_requests
        needed = replicas_needed(reports, num_running, self._target, num_calls=calls)
        if not reports.get(SLOTS):  # engines are starting, or the only one is stopped
            needed = max(needed, float(num_wanted))
        return needed, {}
