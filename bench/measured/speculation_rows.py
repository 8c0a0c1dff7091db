"""Table lines on speculative decoding, from speculation.json and draft_heads.json of the results.

Reads the results and knows no page. Always holds: a missed goal is shown like any other, and a cell
that could not be measured is named with the reason.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bench.speculation.cells import GOAL_CONTROL, GOAL_LEAST, Cell, all_cells
from bench.speculation.intervals import VERDICTS, Verdict
from bench.speculation.summary import control_verdict, half_width, noise_floors, speed_verdict

_PROPOSERS = {
    "ngram": "prompt lookup",
    "history": "prompt lookup with earlier answers",
    "draft": "draft model",
    "independent": "draft model with noise of its own",
    "self": "the model's first two layers",
    "eagle": "EAGLE-3 head",
    "medusa": "Medusa heads",
    "prediction": "a prediction that matches nothing",
    "synthetic": "a proposer of fixed acceptance (synthetic)",
}
_PARTS = {
    "small": "questions",
    "shapes": "random weights",
    "repeats": "answers that repeat their prompt, forced on random weights",
    "history": "answers that repeat earlier ones, forced on random weights",
}
_MODELS = {"box": "built-in model"}


def speculation_rows(result: dict[str, Any]) -> list[str]:
    """Return speeds with drafts over those without, and the control beside fixed k."""
    found: dict[str, dict[str, Any]] = result["cells"]
    there = [cell for cell in all_cells() if cell.name in found]
    rows = []
    lines: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in there:
        if cell.part != "llama.cpp":
            lines.setdefault(_line(cell), []).append(cell)
    for group in lines.values():
        rows += _speed_row(group, found)
    rows += _control_rows([cell for cell in there if cell.part != "llama.cpp"], found)
    for cell in there:
        if cell.part == "llama.cpp":
            rows.append(_llama_row(cell, found[cell.name]))
    return rows


def draft_head_rows(result: dict[str, Any]) -> list[str]:
    """Return what is accepted of a fixed number of drafts in each step, by proposer."""
    shown: dict[str, list[str]] = {}
    for cell in result["cells"]:
        if not cell["drafted"]:
            continue
        model, proposer = _MODELS.get(cell["model"], cell["model"]), _PROPOSERS[cell["proposer"]]
        if layers := cell.get("layers"):
            proposer = "the model's first " + ("layer" if layers == 1 else f"{layers} layers")
        by_position = ", ".join(f"{100 * rate:.0f}" for rate in cell["by_position"])
        shown.setdefault(f"{proposer}, {model}", []).append(
            f"{cell['temperature']:g}: {100 * cell['acceptance']:.0f} % ({by_position} %), "
            f"{cell['tokens_per_row']:.2f}"
        )
    return [
        f"| {what}, {result['drafts']} drafts in each step, by temperature: accepted (by "
        f"position), tokens per step of a request | {'; '.join(parts)} | |"
        for what, parts in shown.items()
    ]


def _line(cell: Cell) -> tuple[Any, ...]:
    return cell.part, cell.model, cell.proposer, cell.temperature, cell.acceptance


def _speed_row(cells: list[Cell], found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the line of cells that differ in their batch."""
    first = cells[0]
    model = _MODELS.get(first.model, first.model)
    how = f"temperature {first.temperature:g}"
    if first.acceptance is not None:
        how = f"acceptance {first.acceptance:g}"
    shown, goals = [], []
    for cell in cells:
        one = found[cell.name]
        if "refused" in one:
            shown.append(f"batch {cell.batch}: {one['refused']}")
            continue
        accepted = one["acceptance"]
        rate = "no drafts" if accepted is None else f"{100 * accepted:.0f} %"
        shown.append(f"batch {cell.batch}: {one['speedups']['auto']:.2f}x ({rate})")
        goals.append(f"{cell.goal:g}x")
    yield (
        f"| {_PROPOSERS[first.proposer]}, {model}, {_PARTS[first.part]}, {how}: speed over that "
        f"without drafts (accepted) | {', '.join(shown)} | {', '.join(dict.fromkeys(goals))} |"
    )


def _control_rows(cells: list[Cell], found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines on the control, over all cells."""
    known = {cell.name: found[cell.name] for cell in cells if "speedups" in found[cell.name]}
    if not known:
        return
    measured = {name: one for name, one in known.items() if "speedup_interval" in one}
    speeds = {name: float(one["speedups"]["auto"]) for name, one in known.items()}
    yield _over_all(
        "speed with the control over that without drafts",
        (f"{GOAL_LEAST:g}x", f"{min(speeds.values()):.2f}x"),
        speeds,
        GOAL_LEAST,
        [speed_verdict(GOAL_LEAST, one) for one in measured.values()],
    )
    fixed = [cell.name for cell in cells if cell.has_fixed and cell.name in known]
    if fixed:
        shares = {name: float(known[name]["control_of_best"]) for name in fixed}
        yield _over_all(
            "speed with the control over that of the best fixed number",
            (f"{100 * GOAL_CONTROL:.0f} %", f"{100 * min(shares.values()):.0f} %"),
            shares,
            GOAL_CONTROL,
            [control_verdict(measured[name]) for name in fixed if name in measured],
        )
    if measured:
        half = [100 * half_width(one) for one in measured.values()]
        least, most = (
            f"{100 * end(one['speedup_interval']['coverage'] for one in measured.values()):.0f}"
            for end in (min, max)
        )
        covered = f"{most} %" if least == most else f"{least} to {most} %"
        yield (
            f"| interval of the speed (probability {covered}) | half of its width: median "
            f"{statistics.median(half):.1f} %, widest {max(half):.1f} % | |"
        )
    floors = noise_floors(measured.values())
    if floors:
        sizes = {one["engines"]["auto"] for one in measured.values() if one.get("off_of_off")}
        num_engines = " or ".join(map(str, sorted(sizes)))
        yield (
            f"| speeds of equal engines without drafts, small models | standard deviation: median "
            f"{100 * statistics.median(floors):.1f} %, largest {100 * max(floors):.1f} %; the "
            f"intervals of {len(floors)} cells include it, with {num_engines} engines a side | |"
        )
    earlier = sum("tokens" not in one for one in known.values())
    if earlier:
        yield (
            f"| measured in an earlier way: in rounds of whole generations, by medians, all sides "
            f"in turn in one engine | {earlier} of {len(known)} cells | |"
        )


def _over_all(
    what: str, shown: tuple[str, str], values: dict[str, float], goal: float, all_: list[Verdict]
) -> str:
    """Return a line on a goal of all cells. shown: the goal, and the least of `values`."""
    worst = min(values, key=lambda name: values[name])
    kept = sum(value >= goal for value in values.values())
    text = f"at least {shown[0]} in {kept} of {len(values)} cells; least {shown[1]} ({worst})"
    if all_:
        counts = Counter(all_)
        text += "; " + ", ".join(f"{counts[one]} {one}" for one in VERDICTS)
    return f"| number of drafts: {what} | {text} | {shown[0]} in each |"


def _llama_row(cell: Cell, one: dict[str, Any]) -> str:
    weights = "" if cell.is_small else " with random weights"
    what = (
        f"| {_PROPOSERS[cell.proposer]}, {cell.model}{weights}, one request, beside llama.cpp's: "
        "speed over llama.cpp"
    )
    if "refused" in one:
        return f"{what} | not measured: {one['refused']} | 1x |"
    gains = ", ".join(f"{engine} {_gain(one, engine.lower())}" for engine in ("Quire", "llama.cpp"))
    return (
        f"{what}'s fastest setting, with drafts or without; gain of each by drafts (accepted) | "
        f"{one['over_llama']:.2f}x; {gains} | 1x |"
    )


def _gain(one: dict[str, Any], engine: str) -> str:
    """Return what drafts gain in the fastest setting of an engine that has them."""
    speeds: dict[str, float] = one["speedups"]
    name = max((name for name in speeds if name.startswith(engine)), key=lambda name: speeds[name])
    rate = one["acceptance"].get(name)
    accepted = "no drafts" if rate is None else f"{100 * rate:.0f} %"
    return f"{speeds[name]:.2f}x ({accepted})"
