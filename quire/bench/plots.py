"""Pictures of what `quire bench serve` measured, as PNG files.

Input is JSON objects of measure_serving; several are drawn together to compare engines.
matplotlib is an extra (quire/obs/pictures.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.bench.machine import machine_text
from quire.obs.pictures import draw_lines, pyplot, use_log_scale

_TITLES = (
    "time to first token, p50, s",
    "time to first token, p99, s",
    "time per output token, p50, ms",
    "time per output token, p99, ms",
    "goodput, requests/s",
)
_GOAL: dict[str, Any] = {"color": "gray", "linewidth": 1.2, "linestyle": (0, (2, 2)), "zorder": 0}


def plot_serving(
    outcomes: Mapping[str, Mapping[str, Any]],
    path: Path,
    *,
    title: str = "Serving under Poisson arrivals",
    machine: Mapping[str, Any] | None = None,
) -> None:
    """Draw latencies and goodput over the offered rate, a line for each engine, as a PNG.

    outcomes: results of measure_serving by the name for the legend. machine: the machine card
    (quire/bench/machine.py); taken from the first outcome when left out.
    """
    plt = pyplot()
    figure, grid = plt.subplots(2, 3, figsize=(13, 7.6))
    panels = grid.reshape(-1)
    offered = {
        name: [one["offered_per_s"] for one in outcome["rates"]]
        for name, outcome in outcomes.items()
    }
    for panel, heading, values in zip(panels, _TITLES, _series(outcomes), strict=False):
        draw_lines(panel, offered, values)
        panel.set_title(heading)
        panel.set_xlabel("offered requests/s")
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    first = next(iter(outcomes.values()))
    goals = first["settings"]["goals"]
    for panel, goal in zip(
        panels, (goals["ttft_s"],) * 2 + (1e3 * goals["tpot_s"],) * 2, strict=False
    ):
        panel.axhline(goal, label="goal", **_GOAL)
    for panel in panels[:2]:
        use_log_scale(panel)
    limit = max(max(rates) for rates in offered.values())
    panels[4].plot([0, limit], [0, limit], label="all requests", **_GOAL)
    panels[4].set_ylim(bottom=-0.03 * limit)
    for panel in panels[:5]:
        panel.legend(fontsize=8, framealpha=0.7)
    panels[5].set_axis_off()
    panels[5].text(0, 0.9, _knees_text(outcomes), va="top", fontsize=10)
    card = first.get("machine") if machine is None else machine
    figure.suptitle(title if card is None else f"{title}\n{machine_text(card)}", fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _series(outcomes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, list[float]]]:
    """Return values of each panel by engine."""
    shares = [("ttft_s", "p50", 1.0), ("ttft_s", "p99", 1.0)]
    shares += [("tpot_s", "p50", 1e3), ("tpot_s", "p99", 1e3)]
    found = [
        {
            name: [factor * one[key].get(share, float("nan")) for one in outcome["rates"]]
            for name, outcome in outcomes.items()
        }
        for key, share, factor in shares
    ]
    goodput = {
        name: [one["goodput_per_s"] for one in outcome["rates"]]
        for name, outcome in outcomes.items()
    }
    return [*found, goodput]


def _knees_text(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the highest rate at which nine in ten requests met the goals, for each engine."""
    lines = ["highest rate at which 9 in 10 requests met the goals:"]
    for name, outcome in outcomes.items():
        knee = outcome["knee"]
        lines.append(
            f"{name}: none of those measured"
            if knee is None
            else f"{name}: {knee['offered_per_s']:.2f}/s, goodput {knee['goodput_per_s']:.2f}/s"
        )
    return "\n".join(lines)
