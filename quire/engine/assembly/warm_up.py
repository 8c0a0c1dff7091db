"""Warm-up before the first request, and the measured cost of steps where a budget needs it.

Runs made-up plans through the runner, so that all code is loaded, threads are awake and buffers
are touched: the first request should not pay for what the second gets for free. Leaves nothing
behind that matters: slots are overwritten by their next admission, blocks by their next owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.base.clock import Clock
from quire.base.records import Admission, StepPlan
from quire.base.sampling_params import SamplingParams
from quire.runner.model_runner import ModelRunner
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.limits import SchedulerLimits

_PROMPT_TOKENS = 32
# Every stage of token choice once.
_SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=0, logprobs=2),
    SamplingParams(seed=0, repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0}),
)
_TIMES = 3


def warm_up(runner: ModelRunner, limits: SchedulerLimits, *, num_blocks: int) -> None:
    """Compute chunks of prompts and a decode step: as few steps as that takes, since each reads all
    weights, which is a good part of a start."""
    rows = min(len(_SAMPLINGS), limits.max_num_seqs, limits.max_num_batched_tokens, num_blocks)
    tokens = min(
        _PROMPT_TOKENS // rows,
        limits.max_num_batched_tokens // rows,
        _room(runner, limits, num_blocks // rows),
    )
    for first in range(0, len(_SAMPLINGS), rows):
        samplings = _SAMPLINGS[first : first + rows]
        _run(runner, [tokens] * len(samplings), 0, samplings)
    _run(runner, [1], 0, _SAMPLINGS[:1])


def measure_cost(
    runner: ModelRunner, limits: SchedulerLimits, num_blocks: int, clock: Clock
) -> LinearCost:
    """Return milliseconds a step, a token, an attended position and a score take: the best of three
    runs.

    From one token; a chunk from depth 0; the same chunk at depth; and scored.
    """

    def best_ms(count: int, start: int, *, scored: bool = False) -> float:
        times = []
        for _ in range(_TIMES):
            began_ms = clock.now_ms()
            _run(runner, [count], start, _SAMPLINGS[:1], scored=scored)
            times.append(clock.now_ms() - began_ms)
        return min(times)

    room = _room(runner, limits, num_blocks)
    count = max(min(room // 2, 256), 1)
    depth = min(limits.max_model_len, num_blocks * runner.tables.block_size) - 1 - count
    one_ms, chunk_ms = best_ms(1, 0), best_ms(count, 0)
    deep_ms = best_ms(count, depth) if depth > 0 else chunk_ms
    position_ms = max(deep_ms - chunk_ms, 0.0) / max(count * depth, 1)
    attended_ms = position_ms * count * (count + 1) / 2
    token_ms = max(chunk_ms - attended_ms - one_ms, 0.0) / max(count - 1, 1)
    score_ms = max(best_ms(count, 0, scored=True) - chunk_ms, 0.0) / max(count - 1, 1)
    return LinearCost(
        fixed_ms=max(one_ms - token_ms - position_ms, 0.0),
        token_ms=token_ms,
        position_ms=position_ms,
        score_ms=score_ms,
    )


def _room(runner: ModelRunner, limits: SchedulerLimits, num_blocks: int) -> int:
    """Return tokens one chunk may have, leaving room for the one it yields."""
    held_tokens = min(limits.max_model_len, num_blocks * runner.tables.block_size)
    return max(min(limits.max_num_batched_tokens, held_tokens - 1), 1)


def _run(
    runner: ModelRunner,
    counts: Sequence[int],
    start: int,
    samplings: Sequence[SamplingParams],
    *,
    scored: bool = False,
) -> None:
    """One step: row i computes counts[i] tokens from `start` on, in slot i, by samplings[i]."""
    starts = [start] * len(counts)
    plan = made_up_plan(counts, starts, runner.tables.block_size, samplings[0], scored=scored)
    admissions = tuple(
        replace(admission, sampling=sampling)
        for admission, sampling in zip(plan.admissions, samplings, strict=True)
    )
    plan = replace(plan, admissions=admissions)
    runner.collect(runner.submit(plan))


def made_up_plan(
    counts: Sequence[int],
    starts: Sequence[int],
    block_size: int,
    sampling: SamplingParams,
    *,
    scored: bool = False,
) -> StepPlan:
    """Return a step: row i, admitted in slot i, computes counts[i] tokens after starts[i] others.

    Row 0 takes the pool's first blocks, row 1 those after them, and so on.
    """
    slots = np.arange(len(counts), dtype=np.int32)
    ends = np.array(counts, np.int32) + np.array(starts, np.int32)
    columns = -(-ends // block_size)
    row_of = np.repeat(slots, columns)
    firsts = np.cumsum(columns) - columns
    return StepPlan(
        step=0,
        admissions=tuple(
            Admission(
                slot=slot,
                request_id="warm-up",
                stream=0,
                token_ids=np.zeros(end, np.int32),
                num_prompt_tokens=int(end),
                stop_ids=(),
                sampling=sampling,
                scores_from=starts[slot] if scored else None,
            )
            for slot, end in enumerate(ends.tolist())
        ),
        table_slots=row_of,
        table_columns=(np.arange(len(row_of)) - firsts[row_of]).astype(np.int32),
        table_blocks=np.arange(len(row_of), dtype=np.int32),
        slots=slots,
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        store_from=np.array(starts, np.int32),
        sample_counts=np.ones(len(counts), np.int32),
    )
