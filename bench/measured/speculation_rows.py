"""Table lines on speculative decoding, from bench/results/speculation.json.

Reads the results and knows no page. Always holds: a missed goal is shown like any other, and a cell
that could not be measured is named with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.speculation.cells import GOAL_CONTROL, Cell, all_cells

_PROPOSERS = {
    "ngram": "prompt lookup",
    "history": "prompt lookup with earlier answers",
    "draft": "draft model",
    "independent": "draft model with noise of its own",
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
    """Yield the line on the control, over all cells."""
    shares = {
        cell.name: float(found[cell.name]["control_of_best"])
        for cell in cells
        if "control_of_best" in found[cell.name]
    }
    if not shares:
        return
    worst = min(shares, key=lambda name: shares[name])
    kept = sum(share >= GOAL_CONTROL for share in shares.values())
    yield (
        f"| number of drafts: speed with the control over that of the best fixed number | at least "
        f"{100 * GOAL_CONTROL:.0f} % in {kept} of {len(shares)} cells; least "
        f"{100 * shares[worst]:.0f} % ({worst}) | {100 * GOAL_CONTROL:.0f} % in each |"
    )


def _llama_row(cell: Cell, one: dict[str, Any]) -> str:
    what = f"| {_PROPOSERS[cell.proposer]}, {cell.model}, one request, beside llama.cpp's: speed "
    if "refused" in one:
        return f"{what}over llama.cpp | not measured: {one['refused']} | 1x |"
    return (
        f"{what}over llama.cpp; gain of each | {one['over_llama']:.2f}x; Quire "
        f"{one['speedups']['quire']:.2f}x, llama.cpp {one['speedups']['llama.cpp']:.2f}x | 1x |"
    )
