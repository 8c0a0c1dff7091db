"""Draw compared policies over the offered load: times, goodput and waits, as one PNG.

Input is the JSON object of quire/sim/compare.py. matplotlib is an extra (quire/obs/pictures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.obs.pictures import draw_lines, pyplot, use_log_scale

_PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float], bool], ...] = (
    ("mean latency, s", lambda found: found["latency_mean_s"], True),
    ("time to first token, p99, s", lambda found: _p99(found["ttft_s"]), True),
    ("time per output token, p99, ms", lambda found: 1e3 * _p99(found["tpot_s"]), False),
    ("goodput, requests/s", lambda found: found["goodput_per_s"], False),
    ("longest wait, s", lambda found: found["longest_wait_s"], True),
)
_GOAL: dict[str, Any] = {"color": "gray", "linewidth": 1.2, "linestyle": (0, (2, 2)), "zorder": 0}


def plot_policies(outcome: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each number and a line for each policy; write a PNG."""
    plt = pyplot()
    runs = outcome["runs"]
    figure, grid = plt.subplots(2, 3, figsize=(14, 8.6))
    panels = grid.reshape(-1)
    by_policy = _by_policy(runs)
    offered = {
        policy: [one["summary"]["offered_per_s"] for one in own]
        for policy, own in by_policy.items()
    }
    for panel, (title, value, is_log) in zip(panels, _PANELS, strict=False):
        draw_lines(
            panel,
            offered,
            {policy: [value(one["summary"]) for one in own] for policy, own in by_policy.items()},
        )
        panel.set_title(title)
        if all(len(own) == 1 for own in by_policy.values()):
            panel.set_ylim(bottom=0)
        elif is_log:
            use_log_scale(panel)
    _draw_goals(panels, runs, outcome["settings"]["goals"])
    _draw_light(panels[-1], by_policy, offered)
    for panel in panels:
        if panel.axison:
            panel.set_xlabel("offered requests/s")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8, framealpha=0.7)
    figure.suptitle(_title(outcome), fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(outcome: Mapping[str, Any]) -> str:
    settings = outcome["settings"]
    machine = outcome.get("scene") or (
        f"{settings['machine']}, at most {settings['max_num_seqs']} running"
    )
    text = (
        f"Simulated scheduling policies: {machine}\n"
        f"{settings['num_requests']:,} requests of {settings['trace']}"
    )
    return text if outcome.get("complete", True) else f"{text}; stopped before the end"


def _by_policy(runs: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["policy"], []).append(run)
    return found


def _draw_goals(panels: Any, runs: list[Mapping[str, Any]], goals: Mapping[str, float]) -> None:
    panels[1].axhline(goals["ttft_s"], label="goal", **_GOAL)
    panels[2].axhline(1e3 * goals["tpot_s"], label="goal", **_GOAL)
    limit = max(one["summary"]["offered_per_s"] for one in runs)
    panels[3].plot([0, limit], [0, limit], label="all requests", **_GOAL)
    panels[3].set_ylim(0, 1.15 * max(one["summary"]["goodput_per_s"] for one in runs) or 1)


def _draw_light(
    panel: Any,
    by_policy: Mapping[str, list[Mapping[str, Any]]],
    offered: Mapping[str, list[float]],
) -> None:
    """Draw the light tenant's time to first token beside the flood over that alone, if any."""
    ratios = {
        policy: [_ratio(one["light"]) for one in own]
        for policy, own in by_policy.items()
        if any(one["light"] is not None for one in own)
    }
    if not ratios:
        panel.set_axis_off()
        return
    draw_lines(panel, offered, ratios)
    panel.set_title("light tenant's p99 first token: beside the flood / alone", fontsize=11)
    use_log_scale(panel)
    panel.axhline(1.5, label="goal", **_GOAL)


def _p99(shares: Mapping[str, float]) -> float:
    return shares.get("p99", float("nan"))


def _ratio(light: Mapping[str, Any] | None) -> float:
    alone = _p99(light["alone"]["ttft_s"]) if light is not None else 0.0
    return _p99(light["beside"]["ttft_s"]) / alone if light is not None and alone else float("nan")
