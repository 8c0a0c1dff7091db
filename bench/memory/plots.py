"""Draw the memory benchmarks' results as PNG beside their JSON: preemption, disk tier, groups.

Run: python -m bench.memory plots [--results bench/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.machine import machine_text
from quire.obs.pictures import pyplot

OWN, OTHER, GREY = "tab:blue", "tab:orange", "tab:gray"


def plot_preemption(content: dict[str, Any], path: Path) -> None:
    """Draw tokens/s by load and memory, each run as a dot."""
    plt = pyplot()
    summary = content["summary"]
    figure, axes = plt.subplots(1, len(summary), figsize=(4 * len(summary), 4), squeeze=False)
    titles = {"w3": "16 requests at once, KV for 4", "long": "6 conversations in turn, KV for 2.5"}
    names = {
        "uncut": "KV\nfor all",
        "alone": "KV\nfor all",
        "cut": "preemption,\nno disk tier",
        "tier": "preemption,\ndisk tier",
    }
    for at, (load, results) in enumerate(summary.items()):
        rates, axis = results["tokens_per_s"], axes[0][at]
        axis.bar([names[mode] for mode in rates], list(rates.values()), color=[GREY, OTHER, OWN])
        for place, mode in enumerate(rates):
            dots = [
                run["tokens_per_s"]
                for run in content["runs"]
                if (run["load"], run["mode"]) == (load, mode)
            ]
            axis.plot([place] * len(dots), dots, "k.", markersize=5)
        axis.set_title(titles[load], fontsize=10)
        axis.set_ylabel("prompt + output tokens/s")
        axis.grid(alpha=0.3, axis="y")
    _save(figure, path, f"Throughput under preemption\n{machine_text(content['machine'])}")


def plot_tier(content: dict[str, Any], path: Path) -> None:
    """Draw the time to first token: computed, and loaded from the disk tier."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 4))
    names = {
        "cold": "computed",
        "warm": "disk tier,\npage cache warm",
        "dropped": "disk tier,\npage cache dropped",
    }
    summary = content["summary"]
    kinds = [kind for kind in names if kind in summary]
    medians = [summary[kind]["first_token_s"] for kind in kinds]
    colors = [GREY if kind == "cold" else OWN for kind in kinds]
    axis.bar([names[kind] for kind in kinds], medians, color=colors)
    goal_s = summary["cold"]["first_token_s"] / 5 if "cold" in kinds else 0.0
    for place, kind in enumerate(kinds):
        dots = [run["first_token_s"] for run in content["runs"] if run["kind"] == kind]
        axis.plot([place] * len(dots), dots, "k.", markersize=5)
        sooner = summary[kind].get("times_sooner")
        if sooner:
            above = max(*dots, goal_s) + 0.02 * max(medians)
            axis.text(place, above, f"{sooner:.1f}x faster", ha="center", va="bottom")
    if goal_s:
        axis.axhline(goal_s, color="black", linestyle=":", label="goal: 5x faster")
        axis.legend(loc="upper right")
    axis.set_ylabel("time to first token, s")
    axis.grid(alpha=0.3, axis="y")
    title = f"First token of a {content['prompt']:,}-token prefix after a restart"
    _save(figure, path, f"{title}\n{machine_text(content['machine'])}")


def plot_groups(content: dict[str, Any], path: Path) -> None:
    """Draw the KV tokens that beams and n answers hold, with and without sharing."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4))
    shapes = content["shapes"]
    names = [f"{one['shape']['name']}\n{one['shape']['prompt']} + 50 tokens" for one in shapes]
    places = range(len(shapes))
    alone = [one["tokens_unshared"] for one in shapes]
    shared = [one["tokens"] for one in shapes]
    axis.barh([at + 0.2 for at in places], alone, 0.4, color=GREY, label="without sharing")
    axis.barh([at - 0.2 for at in places], shared, 0.4, color=OWN, label="allocated")
    for at, (most, held) in enumerate(zip(alone, shared, strict=True)):
        axis.text(held, at - 0.2, f" {held} ({held / most:.0%})", va="center", fontsize=8)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.set_xlabel("peak KV blocks, in tokens")
    axis.grid(alpha=0.3, axis="x")
    axis.legend()
    _save(figure, path, "KV blocks of one request's sequences: sharing the prompt")


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


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
