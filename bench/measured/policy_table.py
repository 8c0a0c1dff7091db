"""What each policy does at each speed, from a comparison made by `python -m bench.policies table`.

Knows the JSON of quire/sim/compare.py and Markdown. Means of latency are read where nothing is
refused early (`open_ended`), goodput and first tokens where it may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = [
    "| speed | offered | goodput: first come | `sjf` | mean latency, nothing refused: first come "
    "| `sjf` | a light tenant's p99 of the first token beside a flood, times alone: first come "
    "| `fair` |",
    "|---|---|---|---|---|---|---|---|",
]

Runs = Mapping[tuple[str, float], Mapping[str, Any]]


def policy_table(result: Mapping[str, Any]) -> str:
    """A line for each speed, under what was simulated."""
    runs, open_ended = _by_policy(result["runs"]), _by_policy(result["open_ended"]["runs"])
    speeds = sorted({speed for policy, speed in runs if policy == "fcfs"})
    lines = [_line(speed, runs, open_ended) for speed in speeds]
    settings, goals = result["settings"], result["settings"]["goals"]
    title = (
        f"{result['scene']}; the first {settings['num_requests']:,} requests, first token within "
        f"{goals['ttft_s']:g} s and {1e3 * goals['tpot_s']:g} ms for each after it:"
    )
    return "\n".join([title, "", *HEAD, *lines])


def _by_policy(runs: list[Mapping[str, Any]]) -> Runs:
    return {(run["policy"], run["speed"]): run for run in runs}


def _line(speed: float, runs: Runs, open_ended: Runs) -> str:
    cells = [f"{speed:g}", _rate(runs["fcfs", speed]["summary"]["offered_per_s"])]
    cells += [_rate(runs[policy, speed]["summary"]["goodput_per_s"]) for policy in ("fcfs", "sjf")]
    cells += [
        f"{open_ended[policy, speed]['summary']['latency_mean_s']:.1f} s"
        for policy in ("fcfs", "sjf")
    ]
    cells += [_light(runs[policy, speed]["light"]) for policy in ("fcfs", "fair")]
    return f"| {' | '.join(cells)} |"


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}/s"


def _light(light: Mapping[str, Any] | None) -> str:
    if light is None:
        return ""
    beside, alone = (light[which]["ttft_s"]["p99"] for which in ("beside", "alone"))
    return f"{beside / alone:.1f} ({beside:.2g} s)"
