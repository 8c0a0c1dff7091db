"""How many replicas a load needs: by running requests, waiting tokens and the predicted TTFT.

Numbers in, a number out; Ray Serve applies the bounds, the delays and the way from zero. Ray copies
this file's code to its controller, so it imports the standard library only. Knows no request.
Always holds: an idle application needs zero replicas, and a waiting token more than that; replicas
that have not reported yet change nothing.
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


def replicas_needed(reports: Reports, num_replicas: int, target: ScalingTarget) -> float:
    """Return how many replicas the load needs, as a fraction that is rounded up later.

    reports: by name and replica, as Ray Serve aggregates them. num_replicas: that run now.
    """
    slots = reports.get(SLOTS, {})
    if not slots:
        return float(num_replicas)
    slots_each = max(sum(slots.values()) / len(slots), 1.0)
    running = sum(reports.get(RUNNING, {}).values())
    waiting = sum(reports.get(WAITING_TOKENS, {}).values())
    needed = running / (slots_each * target.busy_share) + waiting / target.waiting_tokens
    waits_ms = reports.get(TTFT_MS, {})
    if target.ttft_ms and waits_ms and waiting:
        # Waiting requests are divided among the replicas, so their wait falls in proportion.
        mean_ms = sum(waits_ms.values()) / len(waits_ms)
        if mean_ms > target.ttft_ms:
            needed = max(needed, num_replicas * mean_ms / target.ttft_ms)
    return needed


class ScalingPolicy:
    """The policy of Ray Serve's autoscaling_config; the arguments are those of ScalingTarget."""

    def __init__(self, **target: Any) -> None:
        self._target = ScalingTarget(**target)

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas for an AutoscalingContext, and no state."""
        reports = context.aggregated_metrics or {}
        return replicas_needed(reports, context.current_num_replicas, self._target), {}
