"""Bar charts of Quire beside other engines: all comparisons, and one for the README.

Reads the records of `bench.measured.peers`; draws with matplotlib (quire.obs.pictures).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.measured.peers import COLUMNS, PEER_NAMES, PeerRatio
from quire.bench.machine import LOAD_MARK, is_loaded, machine_text
from quire.obs.pictures import pyplot

QUIRE_COLOUR = "#c43c4a"
COLOURS = {"openvino": "#2a78d6", "llama.cpp": "#1baa79", "vllm": "#eda100", "transformers": "#888"}
SHORT_NAMES = {"w1": "W1 decode", "w2": "W2 prefill", "w3": "W3 many requests", "w4": "W4 shared"}
LONG_NAMES = {
    "w1": "one request: decode",
    "w2": "2,048-token prompt: prefill",
    "w3": "32 requests, 16 at once",
    "w4": "16 requests, shared prefix",
}
_BAR = 0.8  # as a share of a line's height
_FOOTNOTE = f"{LOAD_MARK} taken while other work ran on the machine; ratios are of adjacent pairs"


def draw(ratios: list[PeerRatio], path: Path) -> None:
    """Draw a panel for each precision and a group of bars for each shape and workload.

    Rates are relative to Quire's of the same pairs of runs, which is the bar of length 100.
    """
    plt = pyplot()
    panels = [name for name in COLUMNS if any(one.precision == name for one in ratios)]
    groups = [_groups([one for one in ratios if one.precision == name]) for name in panels]
    lines = [sum(len(group) + 2 for group in found.values()) for found in groups]
    height = 0.21 * sum(lines) + 0.7 * len(panels) + 1.2
    figure, axes = plt.subplots(
        len(panels), 1, squeeze=False, figsize=(9, height), height_ratios=lines
    )
    for axis, name, found in zip(axes[:, 0], panels, groups, strict=True):
        _panel(axis, name, found)
    axes[-1, 0].set_xlabel("tokens/s relative to Quire = 100 (medians of pairs of runs)")
    machines = dict.fromkeys(machine_text(one.machine, with_load=False) for one in ratios)
    title = "\n".join(["Quire beside other engines, on CPU", *machines])
    figure.suptitle(title, fontsize=12, y=1 - 0.1 / height, va="top")
    names = ["quire", *(peer for peer in COLOURS if any(one.peer == peer for one in ratios))]
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=_colour(name)) for name in names],
        [_name(name) for name in names],
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.55 / height),
        ncols=len(names),
        frameon=False,
    )
    if any(is_loaded(one.machine) for one in ratios):
        figure.text(0.01, 0.002, _FOOTNOTE, fontsize=8)
    figure.tight_layout(rect=(0, 0.15 / height, 1, 1 - 0.4 / height))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_speed(ratios: list[PeerRatio], path: Path, *, shape: str, precision: str) -> None:
    """Draw tokens/s of one shape and precision: a panel for each workload, a bar for each engine.

    Quire's bar is the median of its runs beside the fastest peer. path: PNG or SVG.
    """
    plt = pyplot()
    chosen = [
        one for one in ratios if (one.shape, one.precision, one.kv) == (shape, precision, "bf16")
    ]
    workloads = [name for name in SHORT_NAMES if any(one.workload == name for one in chosen)]
    if not workloads:
        return
    figure, axes = plt.subplots(
        1, len(workloads), squeeze=False, figsize=(2.9 * len(workloads), 3.9)
    )
    for axis, workload in zip(axes[0], workloads, strict=True):
        _speed_panel(axis, workload, [one for one in chosen if one.workload == workload])
    axes[0, 0].set_ylabel("tokens/s (higher is better)")
    machine = machine_text(chosen[0].machine, with_load=False)
    figure.suptitle(f"{shape}, {precision} weights\n{machine}", fontsize=11)
    if any(is_loaded(one.machine) for one in chosen):
        figure.text(0.01, 0.01, _FOOTNOTE, fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _speed_panel(axis: Any, workload: str, ratios: list[PeerRatio]) -> None:
    fastest = min(ratios, key=lambda one: one.ratio)
    mark = LOAD_MARK * is_loaded(fastest.machine)
    rates: dict[str, float] = {"quire": fastest.entry["quire"]["median"]}
    rates |= {one.peer: one.entry["other"]["median"] for one in ratios}
    for place, (name, rate) in enumerate(rates.items()):
        axis.bar(place, rate, _BAR, color=_colour(name))
        axis.text(place, rate, f"{rate:,.0f}", ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(rates)), [_name(name) for name in rates], fontsize=9)
    axis.tick_params(axis="x", rotation=20)
    axis.set_title(f"{LONG_NAMES[workload]} {mark}".strip(), fontsize=10)
    axis.set_ylim(0, 1.12 * max(rates.values()))
    axis.spines[["top", "right"]].set_visible(False)


def _groups(ratios: list[PeerRatio]) -> dict[str, list[PeerRatio]]:
    found: dict[str, list[PeerRatio]] = {}
    for one in ratios:
        kv = "" if one.kv == "bf16" else f", KV {one.kv}"
        mark = f" {LOAD_MARK}" * is_loaded(one.machine)
        found.setdefault(f"{one.shape}\n{SHORT_NAMES[one.workload]}{kv}{mark}", []).append(one)
    return found


def _panel(axis: Any, precision: str, found: Mapping[str, list[PeerRatio]]) -> None:
    place, ticks = 0.0, []
    for label, group in found.items():
        ticks.append((place + len(group) / 2, label))
        rate = min(group, key=lambda one: one.ratio).entry["quire"]["median"]
        bars = [("quire", 100.0, f"{rate:,.0f} tokens/s")]
        bars += [
            (one.peer, 100 / one.ratio, f"{100 / one.ratio:.0f} (Quire {one.ratio:.2f}x)")
            for one in group
        ]
        for name, length, text in bars:
            axis.barh(place, length, _BAR, color=_colour(name))
            axis.text(length + 1, place, text, va="center", fontsize=8)
            place += 1
        place += 1
    longest = max((100 / one.ratio for group in found.values() for one in group), default=0.0)
    axis.set_xlim(0, max(longest, 100) + 20)
    axis.set_ylim(place - 1.4, -0.6)
    axis.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"weights in {precision}", loc="left", fontsize=10)


def _colour(name: str) -> str:
    return QUIRE_COLOUR if name == "quire" else COLOURS[name]


def _name(name: str) -> str:
    return "Quire" if name == "quire" else PEER_NAMES.get(name, name)
