"""Pictures of compared policies: times, goodput and waits over the offered load, as one PNG.

Knows results as JSON objects. matplotlib is an extra (quire/obs/pictures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.obs.pictures import pyplot

_MARKS = "osD^vP*"
_PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float], bool], ...] = (
    ("mean latency, s", lambda found: found["latency_mean_s"], True),
    ("time to the first token, p99, s", lambda found: _p99(found["ttft_s"]), True),
    ("time per token after it, p99, ms", lambda found: 1e3 * _p99(found["tpot_s"]), False),
    ("goodput, requests/s", lambda found: found["goodput_per_s"], False),
    ("longest wait, s", lambda found: found["longest_wait_s"], True),
)


def plot_policies(outcome: Mapping[str, Any], path: Path) -> None:
    """A panel a number, a line a policy; where a tenant is light, its times beside the flood."""
    plt = pyplot()
    runs = outcome["runs"]
    goals = outcome["settings"]["goals"]
    figure, grid = plt.subplots(2, 3, figsize=(14, 8))
    panels = grid.reshape(-1)
    policies = list(dict.fromkeys(one["policy"] for one in runs))
    for number, policy in enumerate(policies):
        own = [one for one in runs if one["policy"] == policy]
        offered = [one["summary"]["offered_per_s"] for one in own]
        style = f"{_MARKS[number % len(_MARKS)]}-"
        for panel, (_, value, _) in zip(panels, _PANELS, strict=False):
            panel.plot(
                offered, [value(one["summary"]) for one in own], style, label=policy, alpha=0.8
            )
        if own[0]["light"] is not None:
            panels[-1].plot(offered, [_times(one["light"]) for one in own], style, label=policy)
    for panel, (title, _, logarithmic) in zip(panels, _PANELS, strict=False):
        panel.set_title(title)
        if logarithmic:
            panel.set_yscale("log")
    panels[1].axhline(goals["ttft_s"], color="gray", linewidth=0.8)
    panels[2].axhline(1e3 * goals["tpot_s"], color="gray", linewidth=0.8)
    limit = max(one["summary"]["offered_per_s"] for one in runs)
    panels[3].plot([0, limit], [0, limit], color="gray", linewidth=0.8)
    panels[3].set_ylim(0, 1.15 * max(one["summary"]["goodput_per_s"] for one in runs) or 1)
    if runs[0]["light"] is not None:
        panels[-1].set_title("light tenant beside a flood: TTFT p99, times alone")
        panels[-1].set_yscale("log")
        panels[-1].axhline(1.5, color="gray", linewidth=0.8)
    else:
        panels[-1].set_axis_off()
    for panel in panels:
        if panel.axison:
            panel.set_xlabel("offered requests/s")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _p99(shares: Mapping[str, float]) -> float:
    return shares.get("p99", float("nan"))


def _times(light: Mapping[str, Any]) -> float:
    alone = _p99(light["alone"]["ttft_s"])
    return _p99(light["beside"]["ttft_s"]) / alone if alone else float("nan")
