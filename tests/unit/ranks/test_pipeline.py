"""The start of a pipeline: each stage loads its own layers, what differs is refused by name, and a
lost rank ends the group."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import DeviceLost, ModelError, SettingError, WorkerError
from quire.base.log import Log
from quire.execute.executor import ExecutorOptions, PipelinedExecutor, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.expert_parallel import ExpertPlan
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.tensors import DType
from quire.ranks import pipeline_class
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.stage_executor import PipelineExecutor
from quire.ranks.stages import StageLayout, row_sizes
from quire.ranks.start import RankStart
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.content import content_sample
from quire.weights.pack_cache import PackCache
from tests.models.cases_experts import MIXTRAL
from tests.models.generate import logits_of, sequence_batch
from tests.serve.preloaded import forked_children
from tests.tiny_models import write_tiny, write_tiny_llama

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
LIMITS = StepLimits(max_tokens=16, max_samples=16, max_sequences=1)
OPTIONS = ExecutorOptions(limits=LIMITS)
TWO = PipelineExecutorClass(stages=2, degree=1, binds=False)
IDS = list(range(3, 35))


@pytest.fixture(scope="module", autouse=True)
def preloaded_children() -> Iterator[None]:
    """Fork the processes that tests start from one that has their modules."""
    with forked_children():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers with a tied head."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("stages"), seed=3, tie_word_embeddings=True, **HEADS
    )


@pytest.fixture(scope="module")
def program(folder: Path) -> Program:
    """Its whole program."""
    return build_program(open_model(folder), dtype=DType.F32, max_positions=64)


@pytest.fixture(scope="module")
def whole(folder: Path, program: Program) -> Iterator[NativeExecutor]:
    """An executor of one process."""
    executor = NativeExecutor(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    yield executor
    executor.close()


@pytest.mark.parametrize(("stages", "degree"), [(2, 1), (3, 1), (2, 2)])
def test_ranks_of_stages_are_numbered_from_the_last_stage(stages: int, degree: int) -> None:
    layout = StageLayout(stages=stages, tp=degree)
    assert layout.stage_of(0) == stages - 1
    for rank in range(layout.num_ranks):
        assert layout.rank_at(layout.stage_of(rank), rank % degree) == rank
    early = {layout.stage_of(rank) for rank in layout.early_ranks}
    assert early == set(range(stages - 1))


def test_two_processes_answer_as_one(
    folder: Path, program: Program, whole: NativeExecutor, tmp_path: Path
) -> None:
    wanted = logits_of(whole, IDS, max_positions=64, chunk=16)
    for _ in range(2):  # packed, then mapped
        cache = PackCache(tmp_path / "packed", Log("test"))
        two = TWO(program, open_checkpoint(folder), replace(OPTIONS, pack_cache=cache))
        assert isinstance(two, PipelineExecutor)
        assert isinstance(two, PipelinedExecutor)
        two.allocate_cache(5, 16)
        assert logits_of(two, IDS, max_positions=64, chunk=16).tobytes() == wanted.tobytes()
        assert two.weights_digest == whole.weights_digest
        assert set(two.weights) < set(program.weights)
        assert sum(two.lead.layers) == 3
        assert two.links.source is not None
        assert two.links.source.native.received_bytes == len(IDS) * 4 * 60
        assert two.ops_done > 0
        two.close()
        assert not two.processes.process_ids


def test_steps_begun_early_and_copies_between_them_keep_their_order(
    folder: Path, program: Program, whole: NativeExecutor
) -> None:
    """Begin two chunks at once; a copy of a block between them is not seen by the first."""
    two = TWO(program, open_checkpoint(folder), OPTIONS)
    two.allocate_cache(6, 16)
    batches = [sequence_batch(IDS[at : at + 16], at, 64) for at in (0, 16)]
    two.begin_trunk(batches[0])
    # Block 4 holds the first positions: give the second chunk the same keys in block 5.
    block = np.array([batches[0].caches[0].block_tables[0, 0]], np.int32)
    two.copy_blocks(block, np.array([5], np.int32))
    tables = batches[1].caches[0].block_tables.copy()
    tables[0, 0] = 5
    moved = replace(batches[1], caches=(replace(batches[1].caches[0], block_tables=tables),))
    two.begin_trunk(moved)
    found = []
    for batch in (batches[0], moved):
        two.run_trunk(batch)
        found.append(two.run_head(batch, 0, 16).copy())
    wanted = logits_of(whole, IDS, max_positions=64, chunk=16)
    np.testing.assert_array_equal(np.concatenate(found), wanted)
    two.close()


def test_a_step_that_one_stage_rejects_leaves_the_others_in_step(
    folder: Path, program: Program, whole: NativeExecutor
) -> None:
    two = TWO(program, open_checkpoint(folder), OPTIONS)
    two.allocate_cache(5, 16)
    batch = sequence_batch(IDS[:16], 0, 64)
    unknown = replace(batch, token_ids=batch.token_ids + 10_000)  # the first stage looks them up
    with pytest.raises(ValueError, match="computes the layers before, rejected the step"):
        two.run_trunk(unknown)
    outside = replace(batch, sample_rows=np.array([99], np.int32))  # the last one samples
    with pytest.raises(ValueError, match="sample_rows"):
        two.run_trunk(outside, head_rows=1)
    wanted = logits_of(whole, IDS, max_positions=64, chunk=16)
    np.testing.assert_array_equal(logits_of(two, IDS, max_positions=64, chunk=16), wanted)
    two.close()


def test_memory_is_that_of_all_stages(program: Program) -> None:
    whole, two = NativeExecutor.memory_for(program, LIMITS), TWO.memory_for(program, LIMITS)
    embed = program.weights["embed"].num_bytes
    assert two.weights_bytes == whole.weights_bytes + embed  # tied, and in both stages
    assert two.token_bytes == whole.token_bytes
    parts = TWO.programs(program)
    assert two.step_bytes > row_sizes(parts, LIMITS).total
    assert TWO.plans_in_flight() == 2
    assert "layers 0-" in TWO.shares(program)


def test_more_stages_than_layers_are_refused(program: Program) -> None:
    with pytest.raises(SettingError, match="has 3 layers, of which each stage needs one"):
        PipelineExecutorClass(stages=4, degree=1).check_program(program)


@pytest.mark.parametrize(
    ("is_sampled", "found"),
    [
        (True, "rank 1 has other weights than rank 0"),
        (False, r"model\.embed_tokens\.weight was read twice"),
    ],
    ids=["by a sample", "by what both have read"],
)
def test_a_stage_of_other_weights_is_refused(
    folder: Path,
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_sampled: bool,
    found: str,
) -> None:
    other = write_tiny_llama(tmp_path, seed=4, tie_word_embeddings=True, **HEADS)
    start = PipelineExecutorClass._start

    def elsewhere(*arguments: object) -> RankStart:
        made: RankStart = start(*arguments)  # type: ignore[arg-type]
        return replace(made, checkpoint=str(other))

    monkeypatch.setattr(PipelineExecutorClass, "_start", elsewhere)
    if not is_sampled:
        monkeypatch.setattr(PipelineExecutorClass, "_sample", lambda *_: "")
    with pytest.raises((ModelError, WorkerError), match=found):
        TWO(program, open_checkpoint(folder), OPTIONS)


def test_a_checkpoint_is_sampled_once_for_all_stages(
    folder: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is a page to read, of which a large mixture has tens of thousands."""
    sampled: list[Checkpoint] = []

    def watched(checkpoint: Checkpoint) -> str:
        sampled.append(checkpoint)
        return content_sample(checkpoint)

    monkeypatch.setattr(pipeline_class, "content_sample", watched)
    three = PipelineExecutorClass(stages=3, degree=1, binds=False)
    three(program, open_checkpoint(folder), OPTIONS).close()
    assert len(sampled) == 1


def test_a_checkpoint_with_more_than_the_program_is_refused(folder: Path, program: Program) -> None:
    fewer = build_program(
        replace(open_model(folder), num_layers=2), dtype=DType.F32, max_positions=64
    )
    with pytest.raises(ModelError, match="there are weights of 3 layers"):
        TWO(fewer, open_checkpoint(folder), OPTIONS)


@pytest.mark.parametrize(
    ("rank", "number", "found"),
    [
        (1, signal.SIGSTOP, r"rank 1 does not respond"),
        (2, signal.SIGKILL, r"rank 2 .* was ended by signal 9"),
        (3, signal.SIGSTOP, r"rank 3 does not respond"),
    ],
    ids=["hung in the last stage", "dead in the first stage", "hung in the first stage"],
)
def test_a_lost_rank_of_a_stage_ends_the_group(
    folder: Path, program: Program, rank: int, number: signal.Signals, found: str
) -> None:
    four = PipelineExecutorClass(stages=2, degree=2, binds=False)
    executor = four(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    logits_of(executor, [1, 2, 3], max_positions=64)
    os.kill(executor.processes.process_ids[rank - 1], number)
    with pytest.raises(DeviceLost, match=found):
        logits_of(executor, [1, 2, 3], max_positions=64)
    with pytest.raises(DeviceLost):
        executor.copy_blocks(np.array([1], np.int32), np.array([2], np.int32))
    executor.close()
    assert not executor.processes.process_ids


def test_stages_distribute_experts_and_count_those_of_all_stages(tmp_path: Path) -> None:
    sizes = {"vocab_size": 307, "max_position_embeddings": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_tiny(tmp_path, MIXTRAL | sizes | heads, seed=4)
    program = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    one = NativeExecutor(program, open_checkpoint(folder), OPTIONS)
    one.allocate_cache(5, 16)
    wanted = logits_of(one, IDS, max_positions=64, chunk=16)
    four = PipelineExecutorClass(stages=2, degree=2, experts=ExpertPlan(), binds=False)
    executor = four(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    assert logits_of(executor, IDS, max_positions=64, chunk=16).tobytes() == wanted.tobytes()
    assert executor.weights_digest == one.weights_digest
    held = [weight.experts for weight in executor.program.weights.values() if weight.experts]
    assert set(held) == {4}  # of eight
    assert len(executor.program.layer_starts) < 3
    assert executor.expert_loads == one.expert_loads
    assert sum(map(sum, one.expert_loads)) == 3 * 2 * len(IDS)
    logits_of(one, [4, 5, 6], max_positions=64)
    logits_of(executor, [4, 5, 6], max_positions=64)
    assert executor.expert_loads == one.expert_loads
    os.kill(executor.processes.process_ids[1], signal.SIGKILL)  # rank 2, which answers
    with pytest.raises(DeviceLost, match=r"rank 2 .* was ended by signal 9"):
        executor.expert_loads  # noqa: B018
    executor.close()
    one.close()


def test_stages_sum_in_the_order_of_ranks_as_ranks_alone_do(folder: Path, program: Program) -> None:
    found = []
    for made in (
        RankedExecutorClass(degree=2, mode=TpMode.FAST, binds=False),
        PipelineExecutorClass(degree=2, stages=2, mode=TpMode.FAST, binds=False),
    ):
        executor = made(program, open_checkpoint(folder), OPTIONS)
        executor.allocate_cache(5, 16)
        found.append(logits_of(executor, IDS, max_positions=64, chunk=16).tobytes())
        executor.close()
    assert found[0] == found[1]
