"""Decode time of layers with experts against the floor of the weights that were read.

    python -m bench.experts [--shape qwen3-moe-2-layers] [--precision none int8 int4-g32]

Steps of 1 to 64 rows, each row a token of its own at depth 0, drawn anew for every step, so that
routers choose other experts and weights come from memory. For each number of rows: the shortest and
the median time of a step, how many experts were read (counted by the kernels, beside what the cost
model expects), and the time that reading these and all other weights takes at the machine's
bandwidth. Writes bench/results/experts.json with --write.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import random_checkpoint
from quire.bench.machine import machine_card
from quire.bench.reading import ReadProbe
from quire.config.machine import num_usable_cores
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.cost import StepShape
from quire.program.expert_ops import Experts, expert_reads
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint

RESULTS = Path(__file__).parent / "results" / "experts.json"
ROWS = (1, 2, 4, 8, 16, 32, 64)
BLOCK_SIZE = 16


def decode_batch(rng: np.random.Generator, rows: int, vocab_size: int) -> ForwardBatch:
    """Return a step of `rows` sequences of one token each."""
    zeros = np.zeros(rows, np.int32)
    blocks = np.arange(rows, dtype=np.int32)
    return ForwardBatch(
        token_ids=rng.integers(0, vocab_size, rows).astype(np.int32),
        positions=zeros,
        rope_positions=zeros,
        caches=(CacheRows(kv_slots=blocks * BLOCK_SIZE, block_tables=blocks[:, None].copy()),),
        seq_starts=np.arange(rows + 1, dtype=np.int32),
        sample_rows=blocks,
    )


def measured(executor: NativeExecutor, program: Program, rows: int, steps: int) -> dict[str, Any]:
    """Return times of the trunk with `rows` rows, and what it read a step."""
    rng, times_ms = np.random.default_rng(rows), []
    before = 0
    for step in range(-2, steps):
        if step == 0:
            before = executor.experts_read
        batch = decode_batch(rng, rows, program.vocab_size)
        began_s = time.perf_counter()
        executor.run_trunk(batch)
        if step >= 0:
            times_ms.append(1e3 * (time.perf_counter() - began_s))
    trunk = program.segments["trunk"]
    layers = [op for op in trunk if isinstance(op, Experts)]
    total = sum(num_bytes for num_bytes, _ in expert_reads(program, trunk))
    one_expert = total / sum(op.routing.width for op in layers)
    step_cost = program.segment_cost("trunk", StepShape([1] * rows, [0] * rows))
    expected = sum(
        num_bytes * (1 - left_out**rows) for num_bytes, left_out in expert_reads(program, trunk)
    )
    read = (executor.experts_read - before) / steps
    others = step_cost.weight_bytes - expected
    return {
        "rows": rows,
        "shortest_ms": min(times_ms),
        "median_ms": statistics.median(times_ms),
        "experts_read": read / len(layers),
        "experts_expected": expected / one_expert / len(layers),
        "bytes_read": round(read * one_expert + others),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", default="qwen3-moe-2-layers")
    parser.add_argument("--precision", nargs="+", default=["none", "int8", "int4-g32"])
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    folder = random_checkpoint(asked.shape)
    plain = build_program(open_model(folder), dtype=DType.BF16, max_positions=256)
    limits = StepLimits(max_tokens=max(ROWS), max_samples=max(ROWS), max_sequences=max(ROWS))
    options = ExecutorOptions(limits=limits, num_threads=asked.threads)
    found: dict[str, Any] = {"machine": machine_card(), "shape": asked.shape, "precisions": {}}
    for precision in asked.precision:
        program = quantize(plain, precision)
        executor = NativeExecutor(program, open_checkpoint(folder), options)
        executor.allocate_cache(max(ROWS), BLOCK_SIZE)
        entries = []
        with ReadProbe(asked.threads) as probe:
            for rows in ROWS:
                gb_per_s = probe.gb_per_s(rounds=3)
                entry = measured(executor, program, rows, asked.steps)
                entry["read_gb_per_s"] = gb_per_s
                entry["floor_ms"] = entry["bytes_read"] / (1e6 * gb_per_s)
                entry["share_of_floor"] = entry["floor_ms"] / entry["shortest_ms"]
                entries.append(entry)
                print(precision, json.dumps(entry))
        found["precisions"][precision] = entries
        executor.close()
    if asked.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
