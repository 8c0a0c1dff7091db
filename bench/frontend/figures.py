"""Convert a run of the client into rates and processor time per token or request, and medians.

Plain arithmetic over the counts of `client.py`; independent of the server that was loaded.
"""

from __future__ import annotations

import statistics
from typing import Any


def per(counts: dict[str, Any], count: int, what: str) -> dict[str, Any]:
    """Return rates and processor time of `count` tokens or requests."""
    return {
        f"{what}s": count,
        f"{what}s_per_s": round(count / counts["seconds"]),
        f"us_per_{what}": round(sum(counts["cpu_s"]) / count * 1e6, 2),
        f"us_per_{what}_by_process": [round(s / count * 1e6, 2) for s in counts["cpu_s"]],
        f"bytes_per_{what}": round(counts["bytes"] / count),
    }


def medians(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number, with minimum and maximum of the processor time."""
    merged: dict[str, Any] = {"samples": len(samples)}
    for name, value in samples[0].items():
        values = [sample[name] for sample in samples]
        if isinstance(value, list):
            merged[name] = [statistics.median(column) for column in zip(*values, strict=True)]
        else:
            merged[name] = statistics.median(values)
        if name in ("us_per_token", "us_per_request"):
            merged[f"{name}_range"] = [min(values), max(values)]
    return merged
