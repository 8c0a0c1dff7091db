"""Measure speculation: acceptance and end-to-end speed, with drafts over without, cell by cell.

small: models that write text, by proposer, temperature and batch, on published questions; a draft
model samples with the noise of the target and, to compare, with noise of its own. shapes: random
checkpoints in the shapes of real models, with a proposer of fixed acceptance, labelled synthetic.
repeats: prompt lookup where the answer repeats the prompt, with the text forced on such a
checkpoint. history: likewise, where it repeats earlier answers. llama.cpp: beside its speculation.
All but the last compare the adaptive control with fixed numbers of drafts. Refuses to report where
tokens differ.

The results are written after each cell; a further run measures what is missing. Run:
python -m bench.speculation [--minutes N] [--only TEXT ...] [--quick] [--list] [--again]
[--cell-seconds S] [--out FILE]
--minutes bounds a run; --only small/box selects the cells with such names; --quick takes the cells
with goals, against one fixed number, within 4 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.speculation.cells import Cell, all_cells, quick_cells
from bench.speculation.intervals import MIN_COVERAGE
from bench.speculation.summary import summary_lines
from quire.base.errors import QuireError
from quire.bench.machine import machine_card

OUT = Path("bench/results/speculation.json")
FIXED, QUICK_FIXED = (1, 2, 4, 8), (4,)
# Of a fixed number, at most so many drafts in a step: more cost far more than they can gain.
MAX_STEP_DRAFTS = 256
QUICK_MINUTES = 4.0
# After so many seconds no further round of a cell begins. Peers are loaded within theirs.
CELL_S, LLAMA_CELL_S = 7.5, 45.0
# A cell is begun while so many seconds of the run are left.
MIN_LEFT_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cells")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    parser.add_argument("--quick", action="store_true", help="cells with goals, within 4 minutes")
    parser.add_argument("--again", action="store_true", help="measure cells that are there, too")
    parser.add_argument("--minutes", type=float, help="of the whole run; unbounded by default")
    parser.add_argument("--cell-seconds", type=float, default=CELL_S, help="of rounds of a cell")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if (args.minutes is not None and args.minutes <= 0) or args.cell_seconds <= 0:
        sys.exit("--minutes and --cell-seconds must be above 0")
    cells = [
        cell
        for cell in (quick_cells() if args.quick else all_cells())
        if any(text in cell.name for text in args.only)
    ]
    if args.list:
        print("\n".join(cell.name for cell in cells))
        return
    if not cells:
        sys.exit(f"no cell has a name with {args.only}; --list prints the names")
    known, card = _earlier(args.out), machine_card()
    wanted = [cell for cell in cells if args.again or not _is_done(known, cell, quick=args.quick)]
    minutes = args.minutes or (QUICK_MINUTES if args.quick else None)
    end_s = time.monotonic() + 60.0 * minutes if minutes else float("inf")
    run = Run(quick=args.quick, cell_s=args.cell_seconds, left_s=lambda: end_s - time.monotonic())
    load = card["load_at_start"]
    for cell, found in run.measured(wanted):
        if "refused" in found and "speedups" in known.get(cell.name, {}):
            continue  # it was measured before
        known[cell.name] = found | {"quick": args.quick, "load_at_start": load}
        loads = [one.get("load_at_start", load) for one in known.values()]
        _write(args.out, {"machine": card | {"load_at_start": max(loads)}, "cells": known})
    print("\n".join(summary_lines(cells, known)))
    missing = [cell.name for cell in cells if not _is_done(known, cell, quick=args.quick)]
    if missing:
        print(f"not measured: {', '.join(missing)}", file=sys.stderr)


def _earlier(path: Path) -> dict[str, Any]:
    """Return the cells of a file of results; none without the file. Each has the load that the
    machine had at the start of its run."""
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    machine, cells = result["machine"], result["cells"]
    if machine["cpu"] != machine_card()["cpu"]:
        sys.exit(f"{path} is of {machine['cpu']}; give another --out")
    of_run = {"load_at_start": machine["load_at_start"]}
    return {name: of_run | found for name, found in cells.items()}


def _write(path: Path, result: dict[str, Any]) -> None:
    """Write results in place of earlier ones, at once: a run may be ended at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"bench": "speculation"} | result, indent=1) + "\n")
    os.replace(part, path)


def _is_done(known: dict[str, Any], cell: Cell, *, quick: bool) -> bool:
    """Return whether a cell is measured, with its interval. A quick measurement is not enough for a
    whole run, and neither are the rounds of a cell that the end of a run cut; a refusal is none."""
    found = known.get(cell.name, {})
    if quick or "speedup_interval" not in found:
        return "speedup_interval" in found
    return not found.get("quick") and found["speedup_interval"]["coverage"] >= MIN_COVERAGE


class Run:
    """Measures cells, those of an engine together. cell_s: of rounds of a cell. left_s: seconds
    that are left of all."""

    def __init__(self, *, quick: bool, cell_s: float, left_s: Callable[[], float]) -> None:
        self._left_s, self._quick, self._cell_s = left_s, quick, cell_s
        self._num_left, self._cell_end_s = 1, float("inf")  # cells to come; the present one's end

    def measured(self, cells: Sequence[Cell]) -> Any:
        """Yield each cell with what was found, while there is time."""
        from bench.speculation.engines import Loads
        from bench.speculation.measure import Extent

        self._num_left = len(cells)
        extent = Extent(
            fixed=QUICK_FIXED if self._quick else FIXED,
            min_rounds=1 if self._quick else 3,
            has_time=lambda: time.monotonic() < self._cell_end_s,
            is_over=lambda: self._left_s() <= 0.0,
        )
        loads, number, last_s = Loads(), 0, time.monotonic()
        for (part, *_), group in groupby(cells, key=lambda cell: cell.engine):
            of_engine = list(group)
            if self._left_s() < MIN_LEFT_S:
                return
            of_part = self._of_llama if part == "llama.cpp" else self._of_engine
            for cell, found in of_part(of_engine, loads, extent):
                number += 1
                before_s, last_s = last_s, time.monotonic()
                found["seconds"] = round(last_s - before_s, 1)  # with what starts its engine
                self._say(number, len(cells), cell, found)
                yield cell, found

    def _of_llama(self, cells: Sequence[Cell], loads: Any, extent: Any) -> Any:
        """Yield cells that compare with llama.cpp, which are processes of their own."""
        from bench.speculation.llama import measure_llama

        for cell in cells:
            self._begin_cell(LLAMA_CELL_S)
            yield cell, measure_llama(cell, extent)

    def _of_engine(self, cells: Sequence[Cell], loads: Any, extent: Any) -> Any:
        """Yield the cells of one engine; {"refused": why} where it does not start."""
        from bench.speculation.engines import engine_of
        from bench.speculation.measure import measure

        missing = list(cells)
        try:
            with engine_of(cells[0]) as llm:
                for cell in cells:
                    if self._left_s() < MIN_LEFT_S:
                        return
                    load = loads.of(cell, llm)
                    self._begin_cell(self._cell_s)
                    fixed = [num for num in extent.fixed if num * cell.batch <= MAX_STEP_DRAFTS]
                    found = measure(llm, load, replace(extent, fixed=tuple(fixed)))
                    missing.remove(cell)
                    yield cell, found
        except QuireError as error:
            for cell in missing:
                yield cell, {"refused": str(error)}

    def _begin_cell(self, cell_s: float) -> None:
        """Give the next cell its time, at most its share of what is left."""
        self._cell_end_s = time.monotonic() + min(cell_s, self._left_s() / self._num_left)
        self._num_left = max(self._num_left - 1, 1)

    def _say(self, number: int, num: int, cell: Cell, found: Any) -> None:
        text = f"[{number}/{num}] {cell.name}: "
        text += found.get("refused") or (
            f"{json.dumps(found['speedups'])}, {len(found['rounds'])} rounds, {found['seconds']} s"
        )
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
