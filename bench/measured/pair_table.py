"""The measured part of docs/disaggregation.md: a pair of engines beside one, and simulations of it.

Reads the results of bench.disaggregation and bench.disaggregation_map. Always holds: what was not
measured has no number here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.machine import LOAD_MARK, is_loaded

_CONFIRMED = [
    "| prompts of | gap at p99, one engine | gap at p99, pair | one over pair | first token, one "
    "engine | first token, pair |",
    "|---|---|---|---|---|---|",
]
_EIGHT = [
    "| load | link | engines | gap at p99, 8 of both roles | gap at p99, divided "
    "| time per output token at p99, both; divided | first token at p99, both; divided |",
    "|---|---|---|---|---|---|---|",
]


def pair_part(of_map: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> str:
    """Return the paragraphs and tables."""
    parts: list[str] = []
    if of_map is not None and "confirmed" in of_map:
        parts += _confirmed(of_map)
    if measured is not None and "serving" in measured:
        parts += _serving(measured)
    if measured is not None and "links" in measured:
        parts += _links(measured)
    if of_map is not None and (points := of_map.get("8 engines")):
        parts += _eight(points)
    return "\n\n".join(parts) or "Not yet measured."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _mark(result: Mapping[str, Any], part: Mapping[str, Any] | None = None) -> str:
    """Return a mark where the machine was not quiet when a part began."""
    card = dict(result["machine"])
    if part is not None and "load_at_start" in part:
        card["load_at_start"] = part["load_at_start"]
    return f" {LOAD_MARK} (other work ran on the machine at the start)" if is_loaded(card) else ""


def _confirmed(of_map: Mapping[str, Any]) -> list[str]:
    points = of_map["confirmed"]
    card = of_map["machine"]
    is_simulated = all("simulated_one_over_two" in point for point in points)
    title = (
        f"Three points on {card['cores']} cores of an {card['cpu']}{_mark(of_map)}: "
        f"{of_map['confirmed_shape']} in bf16, 16 streams that decode beside prompts one after "
        "another; one engine on both cores, and a pair on one core each"
    )
    if is_simulated:
        title += ". In brackets the same, simulated with the steps that were measured before"
    lines = []
    for point in points:
        one, two = point["one engine"], point["two engines"]
        cells = [
            f"{point['prompt_tokens']:,} tokens",
            *(_both(side, "tpot_p99_ms", lambda ms: f"{ms:.0f} ms") for side in (one, two)),
            _ratio(point),
            *(_both(side, "ttft_s", lambda seconds: f"{seconds:.2f} s") for side in (one, two)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    found = [_wrapped(f"{title}:"), "\n".join([*_CONFIRMED, *lines])]
    if is_simulated:
        found.append(_wrapped(_difference(points)))
    else:
        found.append("The simulation of these points was not run with them.")
    return found


def _both(side: Mapping[str, Any], name: str, text: Any) -> str:
    simulated = side.get("simulated")
    return text(side["real"][name]) + (f" ({text(simulated[name])})" if simulated else "")


def _ratio(point: Mapping[str, Any]) -> str:
    simulated = point.get("simulated_one_over_two")
    return f"{point['real_one_over_two']:.2f}" + (f" ({simulated:.2f})" if simulated else "")


def _difference(points: Sequence[Mapping[str, Any]]) -> str:
    """Say how far simulation and engine are apart."""
    sides = [point[name] for point in points for name in ("one engine", "two engines")]

    def ratios(name: str) -> tuple[float, float]:
        found = [side["simulated"][name] / side["real"][name] for side in sides]
        return min(found), max(found)

    gaps, firsts = ratios("tpot_p99_ms"), ratios("ttft_s")
    num_equal = sum(
        (point["real_one_over_two"] > 1) == (point["simulated_one_over_two"] > 1)
        for point in points
    )
    return (
        f"Simulated gaps are {gaps[0]:.2f} to {gaps[1]:.2f} of the measured ones, simulated first "
        f"tokens {firsts[0]:.2f} to {firsts[1]:.2f}; whether the pair has the shorter gaps is "
        f"predicted at {num_equal} of {len(points)} points. In service the streams' HTTP, their "
        "client and the threads that move blocks run on the same cores as the steps, and a "
        "simulation has none of them."
    )


def _serving(measured: Mapping[str, Any]) -> list[str]:
    serving = measured["serving"]
    one, two = serving["one engine"], serving["two engines"]
    hidden = ""
    if "overlapped_bytes" in two:
        share = f"{100 * measured['hidden_share']:.0f} %"
        hidden = f" {share} of the bytes were there before their prompt was computed."
    if "hidden_time_share" in measured and hidden:
        share = f"{100 * measured['hidden_time_share']:.0f} %"
        hidden += f" {share} of the time spent on them did not delay the first token."
    text = (
        f"A larger model there ({measured['model']}), {two['num_prompts']} prompts of "
        f"{serving['prompt']:,} tokens beside {measured['decoding']} streams"
        f"{_mark(measured, serving)}: gaps of {one['tpot_ms']['p50']:.0f} ms at p50 and "
        f"{one['tpot_ms']['p99']:.0f} ms at p99 with one engine, {two['tpot_ms']['p50']:.0f} ms "
        f"and {two['tpot_ms']['p99']:.0f} ms with the pair; first tokens after "
        f"{one['ttft_s']:.1f} s and {two['ttft_s']:.1f} s. {two['received_bytes'] / 1e9:.2f} GB "
        f"came over the link at {two['gb_per_s']:.2f} GB/s.{hidden}"
    )
    return [_wrapped(text)]


def _links(measured: Mapping[str, Any]) -> list[str]:
    links = measured["links"]
    names = [one for one in ("tcp", "shm", "nixl") if f"{one}_gb_per_s" in links]
    lines = [
        f"| {name} | {links[f'{name}_gb_per_s']:.1f} | {links[f'{name}_first_gb_per_s']:.1f} "
        f"| {links[f'{name}_of_memcpy']:.2f} |"
        for name in names
    ]
    lines.append(f"| memcpy | {links['memcpy_gb_per_s']:.1f} | | 1 |")
    title = (
        f"Links between two idle engines, blocks of {links['block_bytes'] >> 20} MiB"
        f"{_mark(measured, links)}:"
    )
    head = ["| backend | GB/s | GB/s, the first time | of memcpy |", "|---|---|---|---|"]
    return [_wrapped(title), "\n".join([*head, *lines])]


def _eight(points: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for point in points:
        both, best = point["both"], point.get("divided")
        cells = [f"{100 * point['load']:.0f} %", f"{point['gb_per_s']:g} GB/s"]
        if best is None:
            cells += ["none keeps up", f"{both['gap_ms']:.1f} ms", "", "", ""]
        else:
            cells += [
                f"{best['num_prefill']} + {8 - best['num_prefill']}",
                f"{both['gap_ms']:.1f} ms",
                f"{best['gap_ms']:.1f} ms",
                f"{both['tpot_ms']:.1f} ms; {best['tpot_ms']:.1f} ms",
                f"{both['ttft_s']:.2f} s; {best['ttft_s']:.2f} s",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    title = (
        f"Eight devices, prompts of {points[0]['prompt_tokens']:,} tokens, simulated (prefill + "
        "decode engines of the best division):"
    )
    return [_wrapped(title), "\n".join([*_EIGHT, *lines])]
