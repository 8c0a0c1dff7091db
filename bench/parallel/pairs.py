"""The same step of two executors in turn: ranks against threads, both modes, micro-batches.

Knows executors that are loaded; no layout. Always holds: where bits are promised, logits are
compared, and a difference ends the measurement.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise
from typing import Any

from bench.parallel.steps import (
    DEPTH,
    PAUSE_S,
    Pairs,
    part_of,
    received_by,
    run_step,
    shares_of_time,
    step_batch,
)
from quire.execute.native import NativeExecutor
from quire.program.batch import ForwardBatch
from quire.program.cost import StepShape
from quire.program.row_parallel import TpMode
from quire.ranks.rank_executor import MirroredExecutor
from quire.ranks.stage_executor import PipelineExecutor

ROUNDS = 8  # of micro-batches, one after the other without a gap


def in_pairs(
    whole: NativeExecutor,
    ranks: MirroredExecutor,
    rows: int,
    tokens: int,
    pairs: Pairs,
    mode: TpMode,
    depth: int,
    block_size: int,
) -> dict[str, Any]:
    """Return times of both executors. Exits where their logits differ, in the mode `exact`.

    block_size: of the ranks' cache.
    """
    whole_ms, ranks_ms = [], []
    received_bytes = 0
    for number in pairs:
        size = rows, tokens, whole.program.vocab_size, number + 2
        batches = {
            id(whole): step_batch(*size, depth=depth),
            id(ranks): step_batch(*size, depth=depth, block_size=block_size),
        }
        if number == 0:
            ranks.set_timed(True)
            received_bytes = received_by(ranks)
        order = (whole, ranks) if number % 2 else (ranks, whole)
        found = {id(one): run_step(one, batches[id(one)]) for one in order}
        if mode is TpMode.EXACT and found[id(whole)][1] != found[id(ranks)][1]:
            sys.exit(f"ranks and one process differ in a step of {rows} x {tokens} tokens")
        if number >= 0:
            whole_ms.append(found[id(whole)][0])
            ranks_ms.append(found[id(ranks)][0])
    received_bytes = received_by(ranks) - received_bytes
    exchanged, attended = shares_of_time(ranks)
    step = StepShape([tokens] * rows, [depth] * rows)
    ratios = [one / other for one, other in zip(whole_ms, ranks_ms, strict=True)]
    return {
        "rows": rows,
        "tokens": tokens,
        "depth": depth,
        "one_process_ms": statistics.median(whole_ms),
        "ranks_ms": statistics.median(ranks_ms),
        "ratio": statistics.median(ratios),
        "share_of_exchanges": exchanged,
        "share_of_attention": attended,
        "pairs": len(ratios),
        "received_bytes": received_bytes // len(ratios),
        "received_bytes_by_cost": ranks.program.step_cost(step).comm_bytes,
    }


def modes_in_pairs(
    modes: dict[TpMode, MirroredExecutor], rows: int, tokens: int, pairs: Pairs
) -> dict[str, Any]:
    """Return times and bytes of the same step in both modes, one after the other."""
    taken_ms: dict[TpMode, list[float]] = {mode: [] for mode in modes}
    before = dict.fromkeys(modes, 0)
    for number in pairs:
        vocab_size = modes[TpMode.EXACT].program.vocab_size
        batch = step_batch(rows, tokens, vocab_size, number + 2)
        if number == 0:
            for mode, ranks in modes.items():
                ranks.set_timed(True)
                before[mode] = received_by(ranks)
        for mode in (TpMode.EXACT, TpMode.FAST) if number % 2 else (TpMode.FAST, TpMode.EXACT):
            ms, _ = run_step(modes[mode], batch)
            if number >= 0:
                taken_ms[mode].append(ms)
    step = StepShape([tokens] * rows, [DEPTH] * rows)
    exact_ms, fast_ms = taken_ms[TpMode.EXACT], taken_ms[TpMode.FAST]
    entry: dict[str, Any] = {
        "rows": rows,
        "tokens": tokens,
        "pairs": len(exact_ms),
        "ratio": statistics.median(a / b for a, b in zip(exact_ms, fast_ms, strict=True)),
    }
    for mode, ranks in modes.items():
        received_bytes = (received_by(ranks) - before[mode]) // len(exact_ms)
        entry[mode] = {
            "ms": statistics.median(taken_ms[mode]),
            "share_of_exchanges": shares_of_time(ranks)[0],
            "received_bytes": received_bytes,
            "received_bytes_per_token": received_bytes / (rows * tokens),
            "received_bytes_by_cost": ranks.program.step_cost(step).comm_bytes,
        }
    return entry


def run_rounds(stages: PipelineExecutor, batch: ForwardBatch) -> tuple[float, bytes]:
    """Return the milliseconds of ROUNDS rounds of micro-batches, and the logits of the last."""
    time.sleep(PAUSE_S)
    rows, number = len(batch.sample_rows), stages.num_stages
    edges = [rows * part // number for part in range(number + 1)]
    parts = [part_of(batch, first, end) for first, end in pairwise(edges)] * ROUNDS
    found: list[bytes] = []
    began_s = time.perf_counter()
    for at, part in enumerate([*parts, *[None] * (number - 1)]):
        if part is not None:
            stages.begin_trunk(part)
        if at >= number - 1:
            ready = parts[at - number + 1]
            stages.run_trunk(ready, head_rows=len(ready.sample_rows))
            found.append(stages.run_head(ready, 0, len(ready.sample_rows)).tobytes())
    return 1e3 * (time.perf_counter() - began_s), b"".join(found[-number:])


def micro_batches(
    whole: NativeExecutor, stages: PipelineExecutor, rows: int, pairs: Pairs
) -> dict[str, Any]:
    """Return times of decode steps of `rows` rows, all stages busy. Exits where logits differ."""
    whole_ms, stages_ms, bubbles = [], [], []
    for number in pairs:
        batch = step_batch(rows, 1, whole.program.vocab_size, number + 2)
        waited_ms = stages.waited_ms
        all_ms, logits = run_rounds(stages, batch)
        waited_ms = stages.waited_ms - waited_ms
        one = [run_step(whole, batch) for _ in range(ROUNDS)]
        if one[-1][1] != logits:
            sys.exit(f"stages and one process differ in a step of {rows} rows")
        if number >= 0:
            whole_ms.append(statistics.fmean(ms for ms, _ in one))
            stages_ms.append(all_ms / ROUNDS)
            bubbles.append(waited_ms / all_ms)
    ratios = [one / other for one, other in zip(whole_ms, stages_ms, strict=True)]
    return {
        "rows": rows,
        "pairs": len(ratios),
        "one_process_ms": statistics.median(whole_ms),
        "stages_ms": statistics.median(stages_ms),
        "ratio": statistics.median(ratios),
        "bubble": statistics.median(bubbles),
    }
