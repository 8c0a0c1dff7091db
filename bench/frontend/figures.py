"""What came of one run of the client, as rates and processor time a token or request; and medians.

Knows no server.
"""

from __future__ import annotations

import statistics
from typing import Any


def per(told: dict[str, Any], count: int, what: str) -> dict[str, Any]:
    """Rates and processor time of so many tokens or requests."""
    return {
        f"{what}s": count,
        f"{what}s_per_s": round(count / told["seconds"]),
        f"us_per_{what}": round(sum(told["cpu_s"]) / count * 1e6, 2),
        f"us_per_{what}_by_process": [round(s / count * 1e6, 2) for s in told["cpu_s"]],
        f"bytes_per_{what}": round(told["bytes"] / count),
    }


def medians(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each number its median, with the least and most of the processor time."""
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
