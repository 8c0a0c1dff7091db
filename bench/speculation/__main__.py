"""Measure speculation: acceptance and end-to-end speed, with drafts over without, cell by cell.

small: models that write text, by proposer, temperature and batch, on published questions; a draft
model samples with the noise of the target and, to compare, with noise of its own. shapes: random
checkpoints in the shapes of real models, with a proposer of fixed acceptance, labelled synthetic.
repeats: prompt lookup where the answer repeats the prompt, with the text forced on such a
checkpoint. history: likewise, where it repeats earlier answers. llama.cpp: beside its speculation.
All but the last compare the adaptive control with fixed numbers of drafts. Refuses to report where
tokens differ.

The results are written after each cell; a further run measures what is missing. Run:
python -m bench.speculation [--quick] [--only TEXT ...] [--list] [--again] [--out FILE]
--only small/box selects the cells with such names; --quick takes the cells with goals, shorter and
within 4 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.speculation.cells import QUICK_TOKENS, TOKENS, Cell, all_cells, quick_cells
from quire.base.errors import QuireError
from quire.bench.machine import machine_card

OUT = Path("bench/results/speculation.json")
FIXED, QUICK_FIXED = (1, 2, 4, 8), (4,)
ROUNDS, QUICK_ROUNDS = 5, 3
QUICK_S = 240.0
# Seconds of rounds in a cell, at least.
MIN_S, QUICK_MIN_S = 4.0, 2.0
# A cell is begun in a quick run while so much of the time is left.
MIN_LEFT_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cells")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    parser.add_argument("--quick", action="store_true", help="cells with goals, within 4 minutes")
    parser.add_argument("--again", action="store_true", help="measure cells that are there, too")
    parser.add_argument("--rounds", type=int, help=f"of each cell, {ROUNDS} by default")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
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
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    card = machine_card()
    if result and result["machine"]["cpu"] != card["cpu"]:
        sys.exit(f"{args.out} is of {result['machine']['cpu']}; give another --out")
    result = {"bench": "speculation", "machine": card, "cells": result.get("cells", {})}
    known = result["cells"]
    wanted = [cell for cell in cells if args.again or not _is_done(known, cell, quick=args.quick)]
    end_s = time.monotonic() + QUICK_S if args.quick else float("inf")
    run = Run(
        num_rounds=args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS),
        quick=args.quick,
        left_s=lambda: end_s - time.monotonic(),
    )
    for cell, found in run.measured(wanted):
        known[cell.name] = found | {"quick": args.quick}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    missing = [cell.name for cell in cells if cell.name not in known]
    if missing:
        print(f"not measured for lack of time: {', '.join(missing)}", file=sys.stderr)


def _is_done(known: dict[str, Any], cell: Cell, *, quick: bool) -> bool:
    """Return whether a cell is measured; a quick measurement is not enough for a whole run."""
    return cell.name in known and (quick or not known[cell.name].get("quick"))


class Run:
    """Measures cells, those of an engine together. left_s: seconds that are left."""

    def __init__(self, *, num_rounds: int, quick: bool, left_s: Callable[[], float]) -> None:
        self._num_rounds, self._left_s, self._quick = num_rounds, left_s, quick
        self._num_left, self._cell_end_s = 1, float("inf")  # cells to come; the present one's end

    def measured(self, cells: Sequence[Cell]) -> Any:
        """Yield each cell with what was found, while there is time."""
        from bench.speculation.engines import Loads
        from bench.speculation.measure import Extent

        tokens = QUICK_TOKENS if self._quick else TOKENS
        self._num_left = len(cells)
        extent = Extent(
            num_rounds=self._num_rounds,
            fixed=QUICK_FIXED if self._quick else FIXED,
            min_s=QUICK_MIN_S if self._quick else MIN_S,
            has_time=lambda: time.monotonic() < self._cell_end_s,
        )
        loads, number = Loads(tokens), 0
        for (part, *_), group in groupby(cells, key=lambda cell: cell.engine):
            of_engine = list(group)
            if self._left_s() < MIN_LEFT_S:
                return
            if part == "llama.cpp":
                from bench.speculation.llama import measure_llama

                for cell in of_engine:
                    number += 1
                    self._say(number, len(cells), cell, began=True)
                    self._begin_cell()
                    found = measure_llama(cell, tokens[cell.batch], extent)
                    self._say(number, len(cells), cell, found)
                    yield cell, found
                continue
            for cell, found in self._of_engine(of_engine, loads, extent):
                number += 1
                self._say(number, len(cells), cell, found)
                yield cell, found

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
                    self._begin_cell()
                    found = measure(llm, loads.of(cell, llm), extent)
                    missing.remove(cell)
                    yield cell, found
        except QuireError as error:
            for cell in missing:
                yield cell, {"refused": str(error)}

    def _begin_cell(self) -> None:
        """Give the next cell its share of the time that is left."""
        self._cell_end_s = time.monotonic() + self._left_s() / self._num_left
        self._num_left -= 1

    def _say(
        self, number: int, num: int, cell: Cell, found: Any = None, *, began: bool = False
    ) -> None:
        text = f"[{number}/{num}] {cell.name}"
        if found is not None:
            text += ": " + (found.get("refused") or json.dumps(found["speedups"]))
        print(text + " …" * began, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
