"""The tables of docs/simulate.md, from a comparison made by `python -m bench.policies table`.

Reads the JSON of quire/sim/compare.py. Mean latencies are of runs without early rejection
(`open_ended`), goodput and first tokens of runs with it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

HEAD = [
    "| speed | offered | goodput, `fcfs` | goodput, `sjf` | mean latency without rejection, `fcfs` "
    "| the same, `sjf` | light tenant's p99 TTFT beside a flood over alone, `fcfs` "
    "| the same, `fair` |",
    "|---|---|---|---|---|---|---|---|",
]

Runs = Mapping[tuple[str, float], Mapping[str, Any]]


def policy_table(result: Mapping[str, Any]) -> str:
    """Return a title with the simulated scene, and a table with a line per speed."""
    runs, open_ended = _by_policy(result["runs"]), _by_policy(result["open_ended"]["runs"])
    speeds = sorted({speed for policy, speed in runs if policy == "fcfs"})
    lines = [_line(speed, runs, open_ended) for speed in speeds]
    settings, goals = result["settings"], result["settings"]["goals"]
    title = (
        f"{result['scene']}; the first {settings['num_requests']:,} requests; goals: first token "
        f"within {goals['ttft_s']:g} s and {1e3 * goals['tpot_s']:g} ms per token after it:"
    )
    return "\n".join([textwrap.fill(title, 100), "", *HEAD, *lines])


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
