"""What the cells say about the goals, in lines: how many meet them, and how wide the intervals are.

Reads results of cells and measures nothing. Always holds: a goal within the interval of a cell
counts as not decided, and the cells that do not meet one are named.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, log, sqrt
from typing import Any

from bench.speculation.cells import GOAL_CONTROL, GOAL_LEAST, Cell
from bench.speculation.intervals import (
    COVERAGE,
    MIN_COVERAGE,
    VERDICTS,
    Interval,
    Verdict,
    spread,
    verdict,
)

Found = Mapping[str, Any]


def summary_lines(cells: Sequence[Cell], known: Mapping[str, Found]) -> Iterator[str]:
    """Yield lines on the goals of `cells`, of those that were measured."""
    there = [cell for cell in cells if "speedup_interval" in known.get(cell.name, {})]
    refused = sum("refused" in known.get(cell.name, {}) for cell in cells)
    yield f"{len(there)} of {len(cells)} cells measured, {refused} refused"
    ours = [cell for cell in there if cell.part != "llama.cpp"]
    speeds = {cell.name: speed_verdict(GOAL_LEAST, known[cell.name]) for cell in ours}
    yield from _lines(f"at least {GOAL_LEAST:g}x of no speculation", speeds)
    controls = {cell.name: control_verdict(known[cell.name]) for cell in ours if cell.has_fixed}
    yield from _lines(f"at least {100 * GOAL_CONTROL:.0f} % of the best fixed number", controls)
    goals = {
        f"{cell.name} (goal {cell.goal:g}x)": speed_verdict(cell.goal, known[cell.name])
        for cell in there
        if cell.goal > GOAL_LEAST or cell.part == "llama.cpp"
    }
    yield from _lines("goals of single cells", goals)
    half = [100 * half_width(known[cell.name]) for cell in ours if is_measured(known[cell.name])]
    if half:
        yield (
            f"half of the interval of the speed: median {statistics.median(half):.1f} %, "
            f"widest {max(half):.1f} %"
        )
    floors = noise_floors(known[cell.name] for cell in ours)
    if floors:
        yield (
            f"equal engines without drafts, where each side has several: standard deviation median "
            f"{100 * statistics.median(floors):.1f} %, largest {100 * max(floors):.1f} %"
        )
    for part in dict.fromkeys(cell.part for cell in ours):
        groups: dict[tuple[str, ...], list[Found]] = {}
        for cell in ours:
            if cell.part == part and is_measured(known[cell.name]):
                groups.setdefault(cell.engine, []).append(known[cell.name])
        if not groups:
            continue
        speed, share = (
            mean_of(groups.values(), of) for of in ("speedup_interval", "control_interval")
        )
        yield (
            f"mean of {part}: {speed.value:.3f}x ({speed.low:.3f} to {speed.high:.3f}), "
            f"{share.value:.3f} of the best fixed ({share.low:.3f} to {share.high:.3f})"
        )
    for cell in ours:
        yield f"  {cell.name}: {_line(known[cell.name])}"


def speed_verdict(goal: float, found: Found) -> Verdict:
    """Return what a cell says about a goal of the speed: with the control over that without drafts,
    or over llama.cpp's."""
    return verdict(goal, found["speedup_interval"])


def control_verdict(found: Found) -> Verdict:
    """Return what a cell says about the goal of the control."""
    return verdict(GOAL_CONTROL, found["control_interval"])


def half_width(found: Found) -> float:
    """Return half of the width of the interval of a cell's speed, relative to the speed."""
    interval = found["speedup_interval"]
    half: float = (interval["high"] - interval["low"]) / 2.0 / found["speedups"]["auto"]
    return half


def noise_floors(found: Iterable[Found]) -> list[float]:
    """Return the standard deviation of the speeds of equal engines, relative to their mean, of each
    cell that was measured with several engines a side: the noise floor of one engine a side."""
    return [spread(one["off_of_off"]) for one in found if one.get("off_of_off")]


def is_measured(found: Found) -> bool:
    """Return whether there are enough rounds of a cell for its interval to say anything."""
    return "speedup_interval" in found and found["speedup_interval"]["coverage"] >= MIN_COVERAGE


def mean_of(groups: Iterable[Sequence[Found]], interval: str) -> Interval:
    """Return the geometric mean of a ratio over all cells of all groups. Those of a group have the
    same engines, so that their errors are taken to be the same; groups have independent ones."""
    variance, logs = 0.0, []
    for group in groups:
        half = 0.0
        for one in group:
            low, high = (max(one[interval][end], 1e-3) for end in ("low", "high"))
            logs.append(log((low + high) / 2.0))
            half += (high - low) / (high + low)
        variance += half * half
    mean, half = sum(logs) / len(logs), sqrt(variance) / len(logs)
    return Interval(exp(mean - half), exp(mean), exp(mean + half), COVERAGE)


def _line(found: Found) -> str:
    """Return what was found of a cell, and how much was measured."""
    text = f"{found['speedups']['auto']:.3f}x, {found['control_of_best']:.3f} of "
    text += f"{found['best_fixed']}" if "best_fixed" in found else "the best"
    if "tokens" in found:
        text += f", {found['tokens']} tokens, {found['rounds']} rounds, half of the wider "
        text += f"interval {100 * found['half_width']:.1f} %, {found['disturbed']} disturbed"
    if found.get("off_of_off"):
        text += f", equal engines {100 * spread(found['off_of_off']):.1f} %"
    return text


def _lines(goal: str, verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    if not verdicts:
        return
    counts = Counter(verdicts.values())
    yield f"{goal}: " + ", ".join(f"{counts[one]} {one}" for one in VERDICTS)
    for wanted in VERDICTS[1:]:
        names = [name for name, found in verdicts.items() if found == wanted]
        if names:
            yield f"  {wanted}: {', '.join(names)}"
