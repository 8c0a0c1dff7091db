"""Pictures of what `quire bench serve` measured, by matplotlib, which is an extra.

Knows results as JSON objects; several of them are drawn side by side, so engines can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.obs.pictures import pyplot


def plot_serving(outcomes: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Time to the first token, time per token, and goodput over the offered rate, as a PNG.

    outcomes: a name for the legend and a result of measure_serving each.
    """
    plt = pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(13, 4))
    for name, outcome in outcomes.items():
        rates = outcome["rates"]
        offered = [one["offered_per_s"] for one in rates]
        for panel, key, factor in ((panels[0], "ttft_s", 1), (panels[1], "tpot_s", 1e3)):
            for share, style in (("p50", "o-"), ("p99", "o:")):
                values = [factor * one[key].get(share, float("nan")) for one in rates]
                panel.plot(offered, values, style, label=f"{name} {share}")
        panels[2].plot(offered, [one["goodput_per_s"] for one in rates], "o-", label=name)
        found = outcome["knee"]
        if found is not None:
            panels[2].axvline(found["offered_per_s"], linestyle=":", color="gray")
    goals = next(iter(outcomes.values()))["settings"]["goals"]
    panels[0].axhline(goals["ttft_s"], color="gray", linewidth=0.8)
    panels[1].axhline(1e3 * goals["tpot_s"], color="gray", linewidth=0.8)
    for panel, title in zip(
        panels,
        ("time to the first token, s", "time per token after it, ms", "goodput, requests/s"),
        strict=True,
    ):
        panel.set_title(title)
        panel.set_xlabel("offered requests/s")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    panels[0].set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
