"""Measure speculation: acceptance and end-to-end speed, with drafts over without, cell by cell.

small: models that write text, by proposer, temperature and batch, on published questions; a draft
model samples with the noise of the target and, to compare, with noise of its own; and requests with
a prediction that matches nothing. shapes: random
checkpoints in the shapes of real models, with a proposer of fixed acceptance, labelled synthetic.
repeats: prompt lookup where the answer repeats the prompt, with the text forced on such a
checkpoint. history: likewise, where it repeats earlier answers. llama.cpp: beside its speculation.
All but the last compare the adaptive control with fixed numbers of drafts. Refuses to report where
tokens differ.

The results are written after each cell; a further run measures what is missing. Run:
python -m bench.speculation [--minutes N] [--only TEXT ...] [--quick] [--list] [--again]
[--out FILE]
--minutes bounds a run; all cells share it, and what some leave is spent on those with the widest
intervals. --only small/box selects the cells with such names; --quick takes the cells with goals,
against one fixed number, within 4 minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.speculation.cells import NUM_ENGINES, SHAPE_TIMES, Cell, all_cells, quick_cells
from bench.speculation.summary import is_measured, summary_lines
from quire.base.errors import QuireError
from quire.base.heap import freeze_heap
from quire.bench.machine import machine_card

if TYPE_CHECKING:
    from bench.speculation.engines import Loads

OUT = Path("bench/results/speculation.json")
FIXED, QUICK_FIXED = (1, 2, 4, 8), (4,)
# Fixed numbers up to this one by batch: more cost far more than they can gain.
MAX_FIXED = {1: 8, 4: 8, 16: 4, 64: 4}
QUICK_MINUTES, QUICK_ENGINES = 4.0, 4
# A cell is begun while so many seconds of the run are left.
MIN_LEFT_S = 15.0
# Engines of a group start, and answer what they must, within about so many seconds, which its cells
# do not have; with --minutes these are set apart. In part small it is for each engine; those of the
# second shape take as much longer as its steps.
START_S = {"small": 2.0, "shapes": 25.0, "repeats": 25.0, "history": 20.0, "llama.cpp": 0.0}
# What is left of a group is spent on undecided cells, in turns of so many times their first time.
FURTHER_TIMES = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cells")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    parser.add_argument("--quick", action="store_true", help="cells with goals, within 4 minutes")
    parser.add_argument("--again", action="store_true", help="measure cells that are there, too")
    parser.add_argument("--minutes", type=float, help="of the whole run; unbounded by default")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.minutes is not None and args.minutes <= 0:
        sys.exit("--minutes must be above 0")
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
    if not args.out.parent.is_dir():
        sys.exit(f"{args.out.parent} is no folder; give another --out, or make it")
    known, card = _earlier(args.out), machine_card()
    missing = [cell for cell in cells if not _is_done(known, cell, quick=args.quick)]
    first = {cell.engine for cell in missing}
    wanted = sorted(cells if args.again else missing, key=lambda cell: cell.engine not in first)
    minutes = args.minutes or (QUICK_MINUTES if args.quick else None)
    end_s = time.monotonic() + 60.0 * minutes if minutes else float("inf")
    run = Run(quick=args.quick, left_s=lambda: end_s - time.monotonic())
    load = card["load_at_start"]
    for cell, found in run.measured(wanted):
        new, before = found | {"quick": args.quick, "load_at_start": load}, known.get(cell.name, {})
        if ("refused" in new and "speedups" in before) or (
            is_measured(before) and not is_measured(new)
        ):
            continue  # it was measured before, and now not at all, or the end of the run cut it
        known[cell.name] = new
        loads = [one.get("load_at_start", load) for one in known.values()]
        _write(args.out, {"machine": card | {"load_at_start": max(loads)}, "cells": known})
    print("\n".join(summary_lines(cells, known)))
    missing = [cell.name for cell in cells if not _is_done(known, cell, quick=args.quick)]
    if missing:
        print(f"not measured: {', '.join(missing)}", file=sys.stderr)


def _earlier(path: Path) -> dict[str, Any]:
    """Return the cells of a file of results that are still in the table; none without the file.
    Each has the load that the machine had at the start of its run."""
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    machine, cells = result["machine"], result["cells"]
    if machine["cpu"] != machine_card()["cpu"]:
        sys.exit(f"{path} is of {machine['cpu']}; give another --out")
    of_run = {"load_at_start": machine["load_at_start"]}
    names = [cell.name for cell in all_cells()]
    return {name: of_run | cells[name] for name in names if name in cells}


def _write(path: Path, result: dict[str, Any]) -> None:
    """Write results in place of earlier ones, at once: a run may be ended at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"bench": "speculation"} | result, indent=1) + "\n")
    os.replace(part, path)


def _is_done(known: dict[str, Any], cell: Cell, *, quick: bool) -> bool:
    """Return whether a cell is measured, with its intervals. A quick measurement is not enough for
    a whole run, and neither are the rounds of a cell that the end of a run cut, or those of other
    lengths or on engines that sides did not share, as they were measured once; a refusal is
    none."""
    found = known.get(cell.name, {})
    if "speedup_interval" not in found or "tokens" not in found:
        return False
    engines = "shared_engines" if cell.shares_engines else "engines"
    if cell.part != "llama.cpp" and (
        engines not in found or found["tokens"] != found["rounds"] * cell.round_tokens
    ):
        return False
    return quick or (not found.get("quick") and is_measured(found))


class Run:
    """Measures cells, those of an engine together. left_s: seconds that are left of all."""

    def __init__(self, *, quick: bool, left_s: Callable[[], float]) -> None:
        self._left_s, self._fixed = left_s, QUICK_FIXED if quick else FIXED
        self._num_engines = QUICK_ENGINES if quick else NUM_ENGINES
        self._coming: list[Cell] = []
        self._starts_s = 0.0  # of the groups that are to come

    def measured(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Yield each cell with what was found, while there is time; again where more was."""
        from bench.speculation.engines import Loads

        groups = [list(group) for _, group in groupby(cells, key=lambda cell: cell.engine)]
        self._coming = list(cells)
        self._starts_s = sum(self._start_s(group[0]) for group in groups)
        loads, last_s = Loads(), time.monotonic()
        taken_s: defaultdict[str, float] = defaultdict(float)
        for group in groups:
            if self._left_s() < MIN_LEFT_S:
                return
            self._starts_s -= self._start_s(group[0])
            is_llama = group[0].part == "llama.cpp"
            for cell, found in self._of_llama(group) if is_llama else self._of_group(group, loads):
                before_s, last_s = last_s, time.monotonic()
                taken_s[cell.name] += last_s - before_s  # with what starts its engines
                found["seconds"] = round(taken_s[cell.name], 1)
                _say(f"[{len(taken_s)}/{len(cells)}] {cell.name}", found)
                yield cell, found

    def _of_llama(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Yield cells that compare with llama.cpp, which are processes of their own."""
        from bench.speculation.llama import measure_llama

        for cell in cells:
            end_s = time.monotonic() + self._take(cell)
            yield cell, measure_llama(cell, partial(_is_before, end_s))

    def _of_group(
        self, cells: Sequence[Cell], loads: Loads
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Yield the cells of a group of engines; {"refused": why} where they do not start."""
        from bench.speculation.engines import Engines
        from bench.speculation.measure import MAX_TIME_TIMES, Measurement

        missing, taken = list(cells), []
        try:
            with ExitStack() as ending:
                engines = Engines(cells[0], ending, self._num_engines)
                left_s = 0.0  # of the time of these cells
                for cell in cells:
                    if self._left_s() < MIN_LEFT_S:
                        return
                    tasks = loads.of(cell, engines.off)
                    ready = partial(engines.ready, tasks)
                    one = Measurement(cell, ["off", "auto", *self._fixed_of(cell)], ready, tasks)
                    one.prepare()
                    freeze_heap()  # collections must not visit what other engines hold
                    cell_s, began_s = self._take(cell), time.monotonic()
                    limit_s = min(MAX_TIME_TIMES * cell_s, self._left_s())
                    one.extend(
                        partial(_is_before, began_s + cell_s),
                        partial(_is_before, began_s + limit_s),
                    )
                    left_s += cell_s - (time.monotonic() - began_s)
                    missing.remove(cell)
                    taken.append((one, cell, cell_s))
                    yield cell, one.summary()
                while taken and left_s > 0.0 and self._left_s() > MIN_LEFT_S:
                    open_ = [entry for entry in taken if not entry[0].has_ended]
                    if not open_:
                        break
                    one, cell, cell_s = max(open_, key=lambda entry: entry[0].width)
                    loads.of(cell, engines.off)
                    began_s = time.monotonic()
                    has_time = partial(_is_before, began_s + FURTHER_TIMES * cell_s)
                    one.extend(has_time, has_time)
                    left_s -= time.monotonic() - began_s
                    yield cell, one.summary()
        except QuireError as error:
            for cell in missing:
                yield cell, {"refused": str(error)}
        finally:
            gc.unfreeze()
        self._coming = [cell for cell in self._coming if cell not in missing]

    def _fixed_of(self, cell: Cell) -> list[str]:
        """Return the sides with a fixed number of drafts."""
        most = MAX_FIXED[cell.batch] if cell.has_fixed else 0
        return [f"k{num}" for num in self._fixed if num <= most]

    def _start_s(self, cell: Cell) -> float:
        """Return how long the engines of a group take to start."""
        times = self._num_engines if cell.part == "small" else SHAPE_TIMES.get(cell.model, 1.0)
        return START_S[cell.part] * times

    def _take(self, cell: Cell) -> float:
        """Return the seconds of the next cell: at most its share of what is left."""
        share = (self._left_s() - self._starts_s) / sum(one.seconds for one in self._coming)
        self._coming.remove(cell)
        return cell.seconds * max(share if share < math.inf else 1.0, 0.2)


def _is_before(end_s: float) -> bool:
    return time.monotonic() < end_s


def _say(what: str, found: dict[str, Any]) -> None:
    text = found.get("refused") or (
        f"{json.dumps(found['speedups'])}, {found['rounds']} rounds, {found['seconds']} s, "
        f"half of the wider interval {100 * found['half_width']:.1f} %"
    )
    print(f"{what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
