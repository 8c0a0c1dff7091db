"""Ranks of one thread against threads of one process: steps in pairs, and the share of exchanges.

    python -m bench.parallel [--shape qwen3-0.6b] [--degree 2] [--precision none] [--write]
                             [--experts whole|placed] [--mode exact|fast] [--compare threads|modes]
    python -m bench.parallel --stages 2 --degree 1 [--write]
    python -m bench.parallel --context 2 --degree 1 [--depth 4096] [--write]
    python -m bench.parallel --cells all [--seconds 4] [--write]

Both executors have the same number of threads in all, are loaded at once, and run the same step in
turn, the order changing from pair to pair; their logits must be equal bit for bit (other than with
--mode fast). --experts: whole experts on ranks, or placed by the loads of the steps before, with a
copy for each rank; each rank's share of the pairs is printed. For each step:
the median times, the median ratio within pairs (above 1: ranks are faster), the share of rank 0's
time in exchanges, waiting included, and the bytes it receives, counted and by the cost model.

Ranks alone, without --stages or --context, are then measured in both modes, in pairs again: "modes"
has the times of --tp-mode exact and fast, the median ratio (above 1: fast is faster), the share of
exchanges and the bytes received in each. --compare threads leaves this out, --compare modes does
nothing else.

With --stages the ranks are stages of a pipeline, of `degree` ranks each. A step alone passes them
one after the other, so that it cannot be faster; in "micro_batches" the rows of a step are divided
over as many steps in flight as stages, against one process that computes all of them at once.
bubble is the share of the time in which the last stage waits for rows.

With --context ranks divide the positions of the KV cache, beside the `degree` that divides heads;
steps have few rows at a large depth. The exchange of parts is a part of attention, so that its time
is in share_of_attention.

With --cells, a few small layouts one after the other (CELLS: products, both modes, experts that are
split, whole and placed, stages with micro-batches of a dense model and of a mixture), for two
cores: the measurement of a step ends after --seconds, which keeps all of them within five minutes,
and one layout with its defaults within four. Progress is shown on standard error.

Beside it, labelled as computed and measured nowhere: the same program on other machines, from their
rates, with exchanges of columns (--tp-mode exact), with sums in the order of ranks (fast), with
sums in any order (two ring all-reduces a layer, which would not keep the bits of a degree), and as
stages of a pipeline. Writes
bench/results/parallel.json, pipeline.json, context.json or parallel_cells.json with --write.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.checkpoints import SHAPES
from bench.parallel.layout import (
    CELL_SECONDS,
    DECODED_ROWS,
    Layout,
    expert_plan,
    has_both_modes,
    layout_of,
)
from bench.parallel.other_machines import DESCRIBED, computed
from bench.parallel.pairs import in_pairs, micro_batches, modes_in_pairs
from bench.parallel.steps import BLOCK_SIZE
from quire.bench.machine import machine_card
from quire.execute.native import NativeExecutor
from quire.program.expert_parallel import balance
from quire.program.row_parallel import TpMode
from quire.ranks.stage_executor import PipelineExecutor

RESULTS = Path(__file__).parents[1] / "results"


CELLS: dict[str, dict[str, Any]] = {
    "products": {"shape": "qwen3-0.1b"},
    "modes": {"shape": "qwen3-0.1b", "compare": "modes"},
    "experts split": {"shape": "qwen3-moe-0.2b"},
    "experts whole": {"shape": "qwen3-moe-0.2b", "experts": "whole"},
    "experts placed": {"shape": "qwen3-moe-0.2b", "experts": "placed"},
    "stages": {"shape": "qwen3-0.1b", "degree": 1, "stages": 2},
    "stages of a mixture": {"shape": "qwen3-moe-0.2b", "degree": 1, "stages": 2},
}


def against_threads(layout: Layout) -> dict[str, Any]:
    """Measure ranks against threads of one process. Prints each step."""
    asked, program = layout.asked, layout.program
    whole = NativeExecutor(program, layout.checkpoint, layout.options)
    num_blocks = layout.num_blocks(BLOCK_SIZE)
    whole.allocate_cache(num_blocks, BLOCK_SIZE)
    degree = asked.degree * asked.context
    mode, plan = TpMode(asked.mode), expert_plan(asked.experts, whole, degree)
    whole.allocate_cache(num_blocks, BLOCK_SIZE)  # as empty as that of the ranks
    ranks = layout.ranks(mode, plan)
    if asked.context > 1:  # pages that were never written are one page of zeros, always in a cache
        for layer in range(program.caches[0].layers):
            whole.touch_blocks(layer, 0, num_blocks)
            ranks.touch_blocks(layer, 0, layout.num_blocks(layout.block_size))
    found: dict[str, Any] = {"balance": None, "steps": []}
    for rows, tokens in layout.steps:
        turns = layout.pairs(f"a step of {rows} x {tokens}")
        entry = in_pairs(whole, ranks, rows, tokens, turns, mode, layout.depth, layout.block_size)
        found["steps"].append(entry)
        print(json.dumps(entry), flush=True)
    if isinstance(ranks, PipelineExecutor) and asked.context == 1:
        found["micro_batches"] = []
        for rows in DECODED_ROWS:
            if rows >= asked.stages:
                turns = layout.pairs(f"micro-batches of {rows} rows")
                entry = micro_batches(whole, ranks, rows, turns)
                found["micro_batches"].append(entry)
                print(json.dumps(entry), flush=True)
    if plan is not None and asked.stages == 1:
        placement = plan.placement(program, degree)
        found["balance"] = balance(ranks.expert_loads, placement, degree)
        print(f"mean load of a rank over the largest: {found['balance']:.3f}", flush=True)
    ranks.close()
    whole.close()
    return found


def both_modes(layout: Layout) -> list[dict[str, Any]]:
    """Measure --tp-mode exact against fast. Prints each step."""
    modes = {mode: layout.ranks(mode, None) for mode in TpMode}
    entries = []
    for rows, tokens in layout.steps:
        turns = layout.pairs(f"both modes, a step of {rows} x {tokens}")
        entries.append(modes_in_pairs(modes, rows, tokens, turns))
        print(json.dumps(entries[-1]), flush=True)
    for ranks in modes.values():
        ranks.close()
    return entries


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure the steps of one layout. Prints each of them."""
    layout = layout_of(asked)
    found: dict[str, Any] = {
        "bench": "parallel",
        "machine": machine_card(),
        "shape": asked.shape,
        "precision": asked.precision,
        "degree": asked.degree,
        "mode": asked.mode,
        "experts": asked.experts,
        "stages": asked.stages,
        "context": asked.context,
    }
    if asked.compare != "modes":
        found |= against_threads(layout)
    if asked.compare != "threads" and has_both_modes(layout):
        found["modes"] = both_modes(layout)
    found["computed"] = [
        computed(layout.program, one, rows) for one in DESCRIBED for rows in (1, 64)
    ]
    return found


def cells(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure small layouts one after the other."""
    names = list(CELLS) if asked.cells == "all" else [asked.cells]
    seconds = CELL_SECONDS if asked.seconds is None else asked.seconds
    found = {}
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", file=sys.stderr, flush=True)
        print(name, flush=True)
        compared = asked.compare or "threads"
        layout = {**vars(asked), "compare": compared, **CELLS[name], "seconds": seconds}
        found[name] = measured(argparse.Namespace(**layout))
    return {"bench": "parallel_cells", "machine": machine_card(), "cells": found}


def arguments() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--precision", default="none")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--mode", choices=list(map(str, TpMode)), default="exact")
    parser.add_argument("--experts", choices=("split", "whole", "placed"), default="split")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=float, help="of each step; 12, with --cells 4")
    parser.add_argument("--compare", choices=("threads", "modes"))
    parser.add_argument("--cells", choices=("all", *CELLS), help="small layouts for two cores")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, write, print."""
    asked = arguments()
    if asked.cells is not None:
        found, name = cells(asked), "parallel_cells.json"
    else:
        found = measured(asked)
        print(json.dumps(found["computed"], indent=1))
        name = "parallel.json" if asked.stages == 1 else "pipeline.json"
        name = "context.json" if asked.context > 1 else name
    if asked.write:
        (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
