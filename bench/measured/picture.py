"""One picture of all ratios: how many tokens each peer makes while Quire makes a hundred.

Knows `bench.measured.peers` and matplotlib by way of quire.obs.pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.measured.peers import COLUMNS, PEER_NAMES, Told
from quire.obs.pictures import pyplot

COLOURS = {"openvino": "#2a78d6", "llama.cpp": "#1baa79", "vllm": "#eda100", "transformers": "#888"}
SHORT_NAMES = {"w1": "W1 decode", "w2": "W2 prefill", "w3": "W3 many requests", "w4": "W4 shared"}
_BAR = 0.8  # of a line's height


def draw(told: list[Told], path: Path) -> None:
    """A panel a precision, a group of bars a shape and workload; Quire is the line at 100."""
    plt = pyplot()
    panels = [name for name in COLUMNS if any(one.precision == name for one in told)]
    groups = [_groups([one for one in told if one.precision == name]) for name in panels]
    lines = [sum(len(group) + 1 for group in found.values()) for found in groups]
    figure, axes = plt.subplots(
        len(panels), 1, squeeze=False, figsize=(9, 0.24 * sum(lines) + 0.8 * len(panels) + 0.6),
        height_ratios=lines,
    )  # fmt: skip
    for axis, name, found in zip(axes[:, 0], panels, groups, strict=True):
        _panel(axis, name, found)
    axes[-1, 0].set_xlabel("tokens while Quire makes 100 (medians of pairs of one run)")
    seen = [peer for peer in COLOURS if any(one.peer == peer for one in told)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[peer]) for peer in seen]
    figure.legend(
        handles,
        [PEER_NAMES.get(peer, peer) for peer in seen],
        loc="upper right",
        ncols=len(seen),
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _groups(told: list[Told]) -> dict[str, list[Told]]:
    found: dict[str, list[Told]] = {}
    for one in told:
        kv = "" if one.kv == "bf16" else f", KV {one.kv}"
        found.setdefault(f"{one.shape}\n{SHORT_NAMES[one.workload]}{kv}", []).append(one)
    return found


def _panel(axis: Any, name: str, found: dict[str, list[Told]]) -> None:
    place, ticks = 0.0, []
    for label, group in found.items():
        ticks.append((place + (len(group) - 1) / 2, label))
        for one in group:
            axis.barh(place, 100 / one.ratio, _BAR, color=COLOURS[one.peer])
            axis.text(100 / one.ratio + 1, place, f"{one.ratio:.2f}x", va="center", fontsize=8)
            place += 1
        place += 1
    axis.axvline(100, color="#333", linewidth=1)
    axis.text(101, -0.7, "Quire", va="center", fontsize=8)
    axis.set_xlim(0, 112)
    axis.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"weights in {name}", loc="left", fontsize=10)
