"""Pipeline parallelism: every family gives the bits of one process, at every number of stages.

Each stage runs its part of the program on an executor of its own, in a thread of its own.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.comm.communicator import RowLink
from quire.comm.in_process import InProcessLink
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank, create_segment
from quire.execute import reference_ops
from quire.execute.executor import Executor
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.program.first_layers import num_layers
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.shard import shard
from quire.program.split import split
from quire.ranks.rank_executor import RankExecutor
from quire.ranks.stages import StageLayout, StageLinks, row_sizes
from quire.weights.checkpoint import Checkpoint
from tests.models.case import Case
from tests.models.cases import CASES
from tests.models.generate import logits_of
from tests.models.test_ranks import (
    BY_NAME,
    CHUNK,
    MAX_POSITIONS,
    OPTIONS,
    PRECISIONS,
    REFERENCE,
    TOKENS,
    answer,
    degrees_of,
    linear_by_row,
    make,
)

Float32s = NDArray[np.float32]
SIZES = SegmentSizes(slot_bytes=1 << 16, message_bytes=1 << 10)


class EarlyStage:
    """An executor of a stage without a head, as logits_of runs one: it has no logits."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def run_head(self, *_: object) -> Float32s:
        return np.zeros((1, 1), np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class NumberedStage(EarlyStage):
    """Begins a step with each run of the trunk."""

    def __init__(self, executor: RankExecutor, links: StageLinks, *, is_last: bool) -> None:
        super().__init__(executor)
        self._links, self._is_last, self._step = links, is_last, 0

    def run_trunk(self, *arguments: Any, **more: Any) -> None:
        self._step += 1
        self._links.begin(self._step)
        self._executor.run_trunk(*arguments, **more)

    def run_head(self, *arguments: Any) -> Float32s:
        run = self._executor.run_head if self._is_last else super().run_head
        return run(*arguments)


def fed(executor: Any, case: Case) -> Float32s:
    """Return the logits of a prompt fed in chunks; of an early stage nothing."""
    executor.allocate_cache(MAX_POSITIONS // 16 + 1, 16)
    ids = (case.token_ids * TOKENS)[:TOKENS]
    logits = logits_of(executor, ids, max_positions=MAX_POSITIONS, chunk=CHUNK)
    executor.close()
    return logits


def in_threads(stages: list[Any], case: Case) -> list[Float32s]:
    """Return what each executor answers, all of them run at once."""
    found: dict[int, Float32s] = {}

    def run(index: int) -> None:
        found[index] = fed(stages[index], case)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(found) == len(stages), "a stage has failed"
    return [found[index] for index in range(len(stages))]


def answers_of_stages(
    case: Case, program: Program, checkpoint: Checkpoint, stages: int, tp: int = 1
) -> list[Float32s]:
    """Return the logits that each rank of the last stage has, with native executors."""
    layout = StageLayout(stages=stages, tp=tp)
    parts = split(program, stages)
    rows = row_sizes(parts, OPTIONS.limits)
    segment = create_segment(layout.num_ranks, SIZES, link_bytes=layout.link_bytes(rows, SIZES))
    made: list[Any] = []
    try:
        for rank in range(layout.num_ranks):
            group = SharedMemoryRank(
                segment, rank=rank, degree=layout.num_ranks, sizes=SIZES, members=tp
            )
            links, stage = StageLinks(group, layout, rows, SIZES), layout.stage_of(rank)
            own = shard(parts[stage], degree=tp, rank=rank % tp)
            executor = RankExecutor(own, checkpoint, OPTIONS, group, poison=True)
            executor._native.set_links(*links.ends)
            made.append(NumberedStage(executor, links, is_last=stage == stages - 1))
    finally:
        os.close(segment)
    return in_threads(made, case)[:tp]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stages_give_the_bits_of_one_process(case: Case, tmp_path: Path) -> None:
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    assert np.isfinite(whole).all()
    numbers = range(2, num_layers(program) + 1)
    if not numbers:
        pytest.skip("it has one layer")
    stages = numbers[case.seed % len(numbers)]
    (logits,) = answers_of_stages(case, program, checkpoint, stages)
    np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize(("name", "precision", "kv_cache_dtype"), PRECISIONS)
def test_quantized_stages_of_several_ranks_give_the_bits_of_one_process(
    name: str, precision: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    program = with_kv_cache_dtype(quantize(program, precision), kv_cache_dtype)
    tp = degrees_of(program)[0]
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    for logits in answers_of_stages(case, program, checkpoint, 2, tp=tp):
        np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_stages_give_the_bits_of_one_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_ops, "linear", linear_by_row)
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    whole = answer(ReferenceExecutor(program, checkpoint, OPTIONS), case)
    parts = split(program, 2)
    link: RowLink = InProcessLink()
    first = ReferenceExecutor(parts[0], checkpoint, OPTIONS, links=(None, link))
    last = ReferenceExecutor(parts[1], checkpoint, OPTIONS, links=(link, None))
    *_, logits = in_threads([EarlyStage(first), last], case)
    np.testing.assert_array_equal(logits, whole, strict=True)
