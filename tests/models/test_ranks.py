"""Tensor parallelism: every family gives the bits of one process, at every degree that works.

Each rank runs its share of the program on an executor of its own, in a thread of its own. Widths
are odd, so that shares are unequal and end inside panels.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.comm.in_process import InProcessGroup, InProcessRank
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute import reference_ops
from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.comm_ops import AllGather, AllReduce
from quire.program.degrees import check_degree
from quire.program.expert_parallel import (
    ExpertPlacement,
    even_placement,
    mixtures,
    placement_by_load,
)
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.program.tensors import DType
from quire.ranks.rank_executor import RankExecutor
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.pack_cache import PackCache
from tests.cases import each_case
from tests.gguf_convert import write_gguf_of
from tests.models.case import Case
from tests.models.cases import CASES
from tests.models.cases_experts import CASES as EXPERT_CASES
from tests.models.generate import logits_of
from tests.rank_threads import on_all_ranks, shared_memory_ranks

Float32s = NDArray[np.float32]
TOKENS, CHUNK, MAX_POSITIONS = 40, 17, 64
OPTIONS = ExecutorOptions(limits=StepLimits(max_tokens=CHUNK, max_samples=CHUNK, max_sequences=1))
BY_NAME = {case.name: case for case in CASES}
# Precisions that have kernels of their own.
PRECISIONS = (
    ("qwen2_tied", "int8", "int8"),
    ("qwen3_biases_untied", "int4-g32", "auto"),
    ("gemma3_mqa", "int4-g64-zp", "bf16"),
    ("mixtral", "int8", "auto"),
    ("qwen3_moe", "int4-g32", "auto"),
)
# Of the cases of distributed experts, by turns.
PRECISIONS_OF_EXPERTS = ("int8", "int4-g32", "none")
REFERENCE = ("qwen2_tied", "qwen3_mqa", "gemma3_mqa", "mixtral")


def degrees_of(program: Program) -> list[int]:
    """Return the degrees above 1, up to 8, that work; larger ones where none does."""
    works = []
    for degree in range(2, 13):
        try:
            check_degree(program, degree)
        except SettingError:
            continue
        works.append(degree)
    return [degree for degree in works if degree <= 8] or works


def make(case: Case, folder: Path) -> tuple[Program, Checkpoint]:
    """Return the whole program and its weights."""
    path = case.write(folder)
    dtype = DType.BF16 if case.stored == "bf16" else DType.F32
    program = build_program(open_model(path), dtype=dtype, max_positions=MAX_POSITIONS)
    return program, open_checkpoint(path)


def answer(executor: Executor, case: Case, chunk: int = CHUNK) -> Float32s:
    """Return the logits of a prompt fed in chunks."""
    executor.allocate_cache(MAX_POSITIONS // 16 + 1, 16)
    ids = (case.token_ids * TOKENS)[:TOKENS]
    logits = logits_of(executor, ids, max_positions=MAX_POSITIONS, chunk=chunk)
    executor.close()
    return logits


def answers_of_ranks(
    case: Case,
    program: Program,
    checkpoint: Checkpoint,
    degree: int,
    change: Callable[[Program], Program] = lambda program: program,
) -> list[Float32s]:
    """Return the logits that each rank has, with native executors."""

    def run(group: SharedMemoryRank) -> Float32s:
        own = change(shard(program, degree=degree, rank=group.rank))
        return answer(RankExecutor(own, checkpoint, OPTIONS, group, poison=True), case)

    return on_all_ranks(shared_memory_ranks(degree), run)


@each_case("case", CASES, ids=lambda case: case.name)
def test_ranks_give_the_bits_of_one_process(case: Case, tmp_path: Path) -> None:
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    assert np.isfinite(whole).all()
    degrees = degrees_of(program)
    degree = degrees[case.seed % len(degrees)]  # over all cases, every degree
    for logits in answers_of_ranks(case, program, checkpoint, degree):
        np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize(("name", "precision", "kv_cache_dtype"), PRECISIONS)
def test_quantized_ranks_give_the_bits_of_one_process(
    name: str, precision: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    program = with_kv_cache_dtype(quantize(program, precision), kv_cache_dtype)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    for degree in degrees_of(program)[:2]:
        for logits in answers_of_ranks(case, program, checkpoint, degree):
            np.testing.assert_array_equal(logits, whole, strict=True)


def placements_of(case: Case, program: Program, degree: int) -> list[ExpertPlacement]:
    """Return an even placement, and one by drawn loads with copies."""
    rng = np.random.default_rng(case.seed)
    loads = [
        (rng.pareto(0.8, op.routing.width) * 9).astype(int).tolist() for op in mixtures(program)
    ]
    return [
        even_placement(program, degree),
        placement_by_load(program, degree, loads, redundant=case.seed % 4),
    ]


@each_case("case", EXPERT_CASES, ids=lambda case: case.name)
def test_distributed_experts_give_the_bits_of_one_process(case: Case, tmp_path: Path) -> None:
    program, checkpoint = make(case, tmp_path)
    program = quantize(program, PRECISIONS_OF_EXPERTS[case.seed % 3])
    executor = NativeExecutor(program, checkpoint, OPTIONS, poison=True)
    whole, digest = answer(executor, case), executor.weights_digest
    degree = degrees_of(program)[0]
    for placement in placements_of(case, program, degree):

        def run(group: SharedMemoryRank, placement: ExpertPlacement = placement) -> Float32s:
            own = shard(program, degree=degree, rank=group.rank, placement=placement)
            executor = RankExecutor(own, checkpoint, OPTIONS, group, poison=True)
            assert executor.weights_digest == digest
            return answer(executor, case)

        for logits in on_all_ranks(shared_memory_ranks(degree), run):
            np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize("is_stacked", [False, True], ids=["a tensor each", "stacked"])
def test_distributed_experts_are_kept_packed_by_rank(is_stacked: bool, tmp_path: Path) -> None:
    case = BY_NAME["qwen3_moe"]
    program, checkpoint = make(case, tmp_path / "m")
    if is_stacked:
        path = write_gguf_of(tmp_path / "m", tmp_path / "m.gguf")
        program = build_program(open_model(path), dtype=DType.F32, max_positions=MAX_POSITIONS)
        checkpoint = open_checkpoint(path)
    executor = NativeExecutor(program, checkpoint, OPTIONS)
    whole, digest = answer(executor, case), executor.weights_digest
    degree = degrees_of(program)[0]
    placement = placements_of(case, program, degree)[1]
    log = io.StringIO()
    cache = PackCache(tmp_path / "packed", Log("ranks", log))

    def run(group: SharedMemoryRank) -> Float32s:
        own = shard(program, degree=degree, rank=group.rank, placement=placement)
        options = replace(OPTIONS, pack_cache=cache)
        executor = RankExecutor(own, checkpoint, options, group, poison=True)
        assert executor.weights_digest == digest
        return answer(executor, case)

    for _ in range(2):
        for logits in on_all_ranks(shared_memory_ranks(degree), run):
            np.testing.assert_array_equal(logits, whole, strict=True)
    assert log.getvalue().count("packed weights are kept") == degree
    assert log.getvalue().count("packed weights are mapped") == degree


def linear_by_row(x: Float32s, weight: Float32s, bias: Float32s | None) -> Float32s:
    """Compute each output by itself: a BLAS product's last bits depend on the rows beside it."""
    y = np.stack([(weight * row).sum(axis=1) for row in x])
    return y if bias is None else y + bias


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_ranks_give_the_bits_of_one_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_ops, "linear", linear_by_row)
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    whole = answer(ReferenceExecutor(program, checkpoint, OPTIONS), case)

    def run(group: InProcessRank) -> Float32s:
        own = shard(program, degree=group.degree, rank=group.rank)
        return answer(ReferenceExecutor(own, checkpoint, OPTIONS, group=group), case)

    degree = degrees_of(program)[0]
    for logits in on_all_ranks(InProcessGroup(degree).ranks(), run):
        np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_reference_ranks_distribute_experts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_ops, "linear", linear_by_row)
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    whole = answer(ReferenceExecutor(program, checkpoint, OPTIONS), case)
    degree = degrees_of(program)[0]
    placement = placements_of(case, program, degree)[1]

    def run(group: InProcessRank) -> Float32s:
        own = shard(program, degree=group.degree, rank=group.rank, placement=placement)
        return answer(ReferenceExecutor(own, checkpoint, OPTIONS, group=group), case)

    for logits in on_all_ranks(InProcessGroup(degree).ranks(), run):
        np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2_bf16", "mixtral", "qwen2_moe", "gpt2_bf16"])
def test_sums_in_the_order_of_ranks_are_the_same_on_all_and_near_one_process(
    name: str, tmp_path: Path
) -> None:
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    degree = degrees_of(program)[0]
    shares = [shard(program, degree=degree, rank=r, mode=TpMode.FAST) for r in range(degree)]
    assert any(isinstance(op, AllReduce) for op in shares[0].segments["trunk"])

    def run(group: SharedMemoryRank, chunk: int = CHUNK) -> tuple[Float32s, str]:
        own = shares[group.rank]
        executor = RankExecutor(own, checkpoint, OPTIONS, group, poison=True)
        digest = executor.weights_digest
        return answer(executor, case, chunk), digest

    found = on_all_ranks(shared_memory_ranks(degree), run)
    first = found[0][0]
    assert len({digest for _, digest in found}) == 1
    for logits, _ in found:
        np.testing.assert_array_equal(logits, first, strict=True)
    # Rows stay independent of each other: other chunks give the same bits.
    for logits, _ in on_all_ranks(shared_memory_ranks(degree), lambda group: run(group, 5)):
        np.testing.assert_array_equal(logits, first, strict=True)
    allowed = 0.05 if case.stored == "bf16" else 1e-4
    assert np.abs(first - whole).max() <= allowed * np.abs(whole).max()


def test_reference_ranks_sum_as_the_compiled_ones(tmp_path: Path) -> None:
    case = BY_NAME["qwen2_tied"]
    program, checkpoint = make(case, tmp_path)
    degree = degrees_of(program)[0]
    shares = [shard(program, degree=degree, rank=r, mode=TpMode.FAST) for r in range(degree)]

    def run(group: InProcessRank) -> Float32s:
        return answer(ReferenceExecutor(shares[group.rank], checkpoint, OPTIONS, group=group), case)

    one, *others = on_all_ranks(InProcessGroup(degree).ranks(), run)
    for other in others:
        np.testing.assert_array_equal(other, one, strict=True)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS), case)
    assert np.abs(one - whole).max() <= 1e-3 * np.abs(whole).max()


def without_one_gather(program: Program) -> Program:
    """Leave out the last exchange of the trunk: other ranks' columns are those of earlier steps."""
    trunk = list(program.segments["trunk"])
    last = max(at for at, op in enumerate(trunk) if isinstance(op, AllGather))
    del trunk[last]
    return replace(program, segments={**program.segments, "trunk": tuple(trunk)})


def in_another_order(program: Program) -> Program:
    """Exchange columns in units of one, so that they arrive at the places of others."""
    return replace(
        program,
        segments={
            name: tuple(replace(op, unit=1) if isinstance(op, AllGather) else op for op in ops)
            for name, ops in program.segments.items()
        },
    )


@pytest.mark.parametrize("fault", [without_one_gather, in_another_order])
def test_a_fault_in_an_exchange_is_detected(
    fault: Callable[[Program], Program], tmp_path: Path
) -> None:
    case = BY_NAME["qwen2_tied"]
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS), case)
    wrong = answers_of_ranks(case, program, checkpoint, 2, fault)
    assert not any(np.array_equal(logits, whole) for logits in wrong)
