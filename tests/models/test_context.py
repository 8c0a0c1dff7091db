"""Context parallelism: models of all kinds give the bits of one process at each degree that works.

Each rank runs its share of the program on an executor of its own, in a thread of its own, with the
pieces of 256 positions that are its own. Prompts have three pieces, so that some ranks have more
than others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.comm.in_process import InProcessGroup, InProcessRank
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute import reference_ops
from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.cost import StepShape
from quire.program.declarations import PIECE_POSITIONS
from quire.program.degrees import check_degree
from quire.program.expert_parallel import SPLIT_EXPERTS, even_placement
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.ops import Attention
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.shard import shard
from quire.program.tensors import DType
from quire.ranks.own_pieces import OwnPieces
from quire.ranks.rank_executor import RankExecutor
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from tests.cases import each_case
from tests.kernels.isas import ISAS
from tests.models.case import Case
from tests.models.cases import CASES
from tests.models.cases_experts import CASES as EXPERT_CASES
from tests.models.generate import BLOCK_SIZE, logits_of, sequence_batch
from tests.models.test_ranks import linear_by_row
from tests.rank_threads import on_all_ranks, shared_memory_ranks

Float32s = NDArray[np.float32]
TOKENS, CHUNK, MAX_POSITIONS = 2 * PIECE_POSITIONS + 30, 177, 3 * PIECE_POSITIONS
OPTIONS = ExecutorOptions(limits=StepLimits(max_tokens=CHUNK, max_samples=CHUNK, max_sequences=1))
BY_NAME = {case.name: case for case in CASES}
# (ranks that divide heads, ranks that divide positions)
DEGREES = ((1, 2), (1, 3), (2, 2), (1, 4))
PRECISIONS = (
    ("qwen2_tied", "int8", "int8"),
    ("qwen3_biases_untied", "int4-g32", "auto"),
    ("gemma3_mqa", "int4-g64-zp", "bf16"),
    ("mixtral", "int8", "auto"),
)
REFERENCE = ("qwen2_tied", "gemma3_mqa", "gemma2_bf16")


def make(case: Case, folder: Path) -> tuple[Program, Checkpoint]:
    """Return the whole program and its weights, for prompts longer than the case's."""
    longer = {
        name: MAX_POSITIONS
        for name in ("max_position_embeddings", "n_positions")
        if case.config.get(name)
    }
    path = replace(case, changes=case.changes | longer).write(folder)
    dtype = DType.BF16 if case.stored == "bf16" else DType.F32
    program = build_program(open_model(path), dtype=dtype, max_positions=MAX_POSITIONS)
    return program, open_checkpoint(path)


def degrees_of(program: Program) -> list[tuple[int, int]]:
    """Return which of DEGREES work."""
    works = []
    for tensor, context in DEGREES:
        try:
            check_degree(program, tensor * context, context=context)
        except SettingError:
            continue
        works.append((tensor, context))
    return works


def prompt_of(case: Case) -> list[int]:
    """Return TOKENS token ids."""
    rng = np.random.default_rng(case.seed)
    ids: list[int] = rng.integers(0, case.config["vocab_size"], TOKENS).tolist()
    return ids


def answer(executor: Executor, case: Case, ranks: int = 1, chunk: int = CHUNK) -> Float32s:
    """Return the logits of a prompt fed in chunks, and of one more token."""
    block_size = BLOCK_SIZE if ranks == 1 else ranks * PIECE_POSITIONS
    executor.allocate_cache(MAX_POSITIONS // block_size + 2, block_size)
    ids = prompt_of(case)
    logits = logits_of(
        executor, ids, max_positions=MAX_POSITIONS, chunk=chunk, block_size=block_size
    )
    batch = sequence_batch([ids[0]], TOKENS, MAX_POSITIONS, block_size)
    executor.run_trunk(batch)
    decoded = executor.run_head(batch, 0, 1).copy()
    executor.close()
    return np.concatenate([logits, decoded])


def answers_of_ranks(
    case: Case,
    program: Program,
    checkpoint: Checkpoint,
    degrees: tuple[int, int],
    *,
    change: Callable[[Program], Program] = lambda program: program,
    places_experts: bool = False,
    block_size: int = BLOCK_SIZE,
) -> list[Float32s]:
    """Return the logits that each rank has, with native executors."""
    tensor, context = degrees
    degree = tensor * context
    placement = even_placement(program, degree) if places_experts else SPLIT_EXPERTS

    def run(group: SharedMemoryRank) -> Float32s:
        own = shard(program, degree=degree, rank=group.rank, placement=placement, context=context)
        executor = RankExecutor(change(own), checkpoint, OPTIONS, group, poison=True)
        executor.own_block_size = block_size
        return answer(executor, case, context)

    return on_all_ranks(shared_memory_ranks(degree), run)


@each_case("case", CASES[::3], ids=lambda case: case.name)
def test_ranks_give_the_bits_of_one_process(case: Case, tmp_path: Path) -> None:
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    assert np.isfinite(whole).all()
    works = degrees_of(program)
    degrees = works[case.seed % len(works)]  # over all cases, each of them
    for logits in answers_of_ranks(case, program, checkpoint, degrees):
        np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize(("name", "precision", "kv_cache_dtype"), PRECISIONS)
@pytest.mark.parametrize("block_size", [4, 128])
def test_quantized_ranks_give_the_bits_of_one_process(
    name: str, precision: str, kv_cache_dtype: str, block_size: int, tmp_path: Path
) -> None:
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    program = with_kv_cache_dtype(quantize(program, precision), kv_cache_dtype)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    found = answers_of_ranks(case, program, checkpoint, (1, 2), block_size=block_size)
    for logits in found:
        np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["gemma2_bf16", "qwen2_tied"])
def test_each_instruction_set_gives_its_bits(name: str, isa: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, isa=isa, poison=True), case)

    def run(group: SharedMemoryRank) -> Float32s:
        own = shard(program, degree=2, rank=group.rank, context=2)
        options = replace(OPTIONS, num_threads=2)
        executor = RankExecutor(own, checkpoint, options, group, isa=isa, poison=True)
        return answer(executor, case, 2)

    for logits in on_all_ranks(shared_memory_ranks(2), run):
        np.testing.assert_array_equal(logits, whole, strict=True)


@pytest.mark.parametrize("case", EXPERT_CASES[:3], ids=lambda case: case.name)
def test_whole_experts_on_ranks_with_pieces(case: Case, tmp_path: Path) -> None:
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS, poison=True), case)
    for logits in answers_of_ranks(case, program, checkpoint, (1, 2), places_experts=True):
        np.testing.assert_array_equal(logits, whole, strict=True)


class LocalReference:
    """A ReferenceExecutor with the pieces of a rank, as RankExecutor has them."""

    def __init__(self, executor: ReferenceExecutor, pieces: OwnPieces) -> None:
        self._executor, self._pieces = executor, pieces

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        assert block_size == self._pieces.engine_block_size
        pieces = self._pieces
        self._executor.allocate_cache(num_blocks * pieces.blocks_of_each, pieces.block_size)

    def run_trunk(self, batch: object) -> None:
        self._executor.run_trunk(self._pieces.batch(batch))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_ranks_give_the_bits_of_one_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_ops, "linear", linear_by_row)
    case = BY_NAME[name]
    program, checkpoint = make(case, tmp_path)
    whole = answer(ReferenceExecutor(program, checkpoint, OPTIONS), case)
    tensor, context = degrees_of(program)[-1]
    degree = tensor * context

    def run(group: InProcessRank) -> Float32s:
        own = shard(program, degree=degree, rank=group.rank, context=context)
        pieces = OwnPieces(ranks=context, rank=group.rank % context, block_size=16)
        plain = ReferenceExecutor(own, checkpoint, OPTIONS, group=group)
        return answer(LocalReference(plain, pieces), case, context)  # type: ignore[arg-type]

    for logits in on_all_ranks(InProcessGroup(degree).ranks(), run):
        np.testing.assert_array_equal(logits, whole, strict=True)


def with_other_window(program: Program) -> Program:
    """Let attention see a position less."""
    return replace(
        program,
        segments={
            name: tuple(
                replace(op, window=TOKENS - 1) if isinstance(op, Attention) else op for op in ops
            )
            for name, ops in program.segments.items()
        },
    )


def test_a_fault_in_attention_is_detected(tmp_path: Path) -> None:
    case = BY_NAME["qwen2_tied"]
    program, checkpoint = make(case, tmp_path)
    whole = answer(NativeExecutor(program, checkpoint, OPTIONS), case)
    wrong = answers_of_ranks(case, program, checkpoint, (1, 2), change=with_other_window)
    assert not any(np.array_equal(logits, whole) for logits in wrong)


def test_each_rank_stores_its_pieces_and_receives_the_others_parts(tmp_path: Path) -> None:
    case = BY_NAME["qwen2_tied"]
    program, checkpoint = make(case, tmp_path)

    def run(group: SharedMemoryRank) -> tuple[int, list[bool], int]:
        own = shard(program, degree=2, rank=group.rank, context=2)
        executor = RankExecutor(own, checkpoint, OPTIONS, group)
        executor.allocate_cache(3, 2 * PIECE_POSITIONS)
        logits_of(
            executor,
            prompt_of(case),
            max_positions=MAX_POSITIONS,
            chunk=CHUNK,
            block_size=2 * PIECE_POSITIONS,
        )
        # Blocks of 16: pieces of the engine's blocks 0 (unused), 1 (second) and 2 (first).
        written = [bool(executor._pool_bytes[:, block].any()) for block in range(3 * 16)]
        blocks = executor._pool_bytes.shape[1]
        executor.close()
        counted = sum(
            own.step_cost(
                StepShape([count := min(CHUNK, TOKENS - start)], [start], num_samples=count)
            ).comm_bytes
            for start in range(0, TOKENS, CHUNK)
        )
        assert group.native.received_bytes == counted  # as the cost model has it
        return blocks, written, counted

    (blocks, first, received), (_, second, other) = on_all_ranks(shared_memory_ranks(2), run)
    assert blocks == 3 * PIECE_POSITIONS // 16  # half of the positions of three blocks
    assert received < other  # rank 0 has two pieces of three
    # Piece 0 and the 30 tokens of piece 2 on rank 0, piece 1 on rank 1.
    assert first == [False] * 16 + [True, True] + [False] * 14 + [True] * 16
    assert second == [False] * 32 + [True] * 16
