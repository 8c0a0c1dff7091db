"""Pictures of what the memory bench found, beside its JSON: preemption, the tier, groups.

Run: python -m bench.memory plots [--results bench/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OWN, OTHER, GREY = "tab:blue", "tab:orange", "tab:gray"


def plot_preemption(content: dict[str, Any], path: Path) -> None:
    """Tokens a second by load and memory, each run a dot."""
    plt = _pyplot()
    summary = content["summary"]
    figure, axes = plt.subplots(1, len(summary), figsize=(4 * len(summary), 4), squeeze=False)
    titles = {"w3": "W3: memory for 4 of 16", "long": "long conversations in turns"}
    names = {
        "uncut": "room\nfor all",
        "alone": "room\nfor all",
        "cut": "too little,\nno tier",
        "tier": "too little,\ntier",
    }
    for at, (load, told) in enumerate(summary.items()):
        rates, axis = told["tokens_per_s"], axes[0][at]
        axis.bar([names[mode] for mode in rates], list(rates.values()), color=[GREY, OTHER, OWN])
        for place, mode in enumerate(rates):
            dots = [
                run["tokens_per_s"]
                for run in content["runs"]
                if (run["load"], run["mode"]) == (load, mode)
            ]
            axis.plot([place] * len(dots), dots, "k.", markersize=5)
        axis.set_title(titles[load])
        axis.set_ylabel("tokens/s, in and out")
        axis.grid(alpha=0.3, axis="y")
    _save(figure, path)


def plot_tier(content: dict[str, Any], path: Path) -> None:
    """Seconds to the first token: computed, and from the tier."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6, 4))
    names = {"cold": "computed", "warm": "tier,\npage cache warm", "dropped": "tier,\nfrom disk"}
    summary = content["summary"]
    kinds = [kind for kind in names if kind in summary]
    medians = [summary[kind]["first_token_s"] for kind in kinds]
    colors = [GREY if kind == "cold" else OWN for kind in kinds]
    axis.bar([names[kind] for kind in kinds], medians, color=colors)
    for place, kind in enumerate(kinds):
        dots = [run["first_token_s"] for run in content["runs"] if run["kind"] == kind]
        axis.plot([place] * len(dots), dots, "k.", markersize=5)
        sooner = summary[kind].get("times_sooner")
        if sooner:
            text = f"{sooner:.1f} times sooner"
            axis.text(place, max(dots) * 1.03, text, ha="center", va="bottom")
    if "cold" in kinds:
        goal_s = summary["cold"]["first_token_s"] / 5
        axis.axhline(goal_s, color="black", linestyle=":", label="goal: 5 times sooner")
        axis.legend(loc="upper right")
    axis.set_ylabel(f"s to the first token ({content['prompt']} tokens)")
    axis.grid(alpha=0.3, axis="y")
    _save(figure, path)


def plot_groups(content: dict[str, Any], path: Path) -> None:
    """KV tokens held by beams and by n, shared and not."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4))
    shapes = content["shapes"]
    names = [f"{one['shape']['name']}\n{one['shape']['prompt']} + 50 tokens" for one in shapes]
    places = range(len(shapes))
    alone = [one["tokens_unshared"] for one in shapes]
    shared = [one["tokens"] for one in shapes]
    axis.barh([at + 0.2 for at in places], alone, 0.4, color=GREY, label="without sharing")
    axis.barh([at - 0.2 for at in places], shared, 0.4, color=OWN, label="as held")
    for at, (most, held) in enumerate(zip(alone, shared, strict=True)):
        axis.text(held, at - 0.2, f" {held} ({held / most:.0%})", va="center", fontsize=8)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.set_xlabel("tokens' worth of KV blocks, at most")
    axis.grid(alpha=0.3, axis="x")
    axis.legend()
    _save(figure, path)


PLOTS = {"preemption": plot_preemption, "tier-warm": plot_tier, "groups": plot_groups}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="bench.memory plots")
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    args = parser.parse_args(arguments)
    for name, plot in PLOTS.items():
        file = args.results / f"{name}.json"
        if file.exists():
            plot(json.loads(file.read_text()), file.with_suffix(".png"))
            print(file.with_suffix(".png"))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
