"""Weights that several ranks read from disk: how many each, in how much memory, and what happens
where a rank cannot read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import DeviceLost, SettingError, WorkerError
from quire.base.log import Log
from quire.config.machine import MachineMemory
from quire.config.memory import RESERVE_BYTES
from quire.execute import streamed_weights
from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.missing_memory import missing_bytes
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import NativeSizing
from quire.execute.packing import recipe_of
from quire.execute.streamed_weights import StreamSize, streamable_bytes
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.kinds import NativeRanks
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.start import RankStart
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import HEAD, SLACK_BYTES, PackCache
from tests.connected_ranks import connected_site
from tests.models.generate import logits_of
from tests.serve.preloaded import forked_children
from tests.tiny_models import write_tiny_llama

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
LIMITS = StepLimits(max_tokens=16, max_samples=16, max_sequences=1)
TWO = RankedExecutorClass(degree=2, binds=False)
LAYOUTS = {
    "TP 2": TWO,
    "PP 2": PipelineExecutorClass(stages=2, degree=1, binds=False),
    "2 machines": replace(TWO, site=replace(connected_site(2), here=1)),
}
IDS = list(range(3, 35))


@pytest.fixture(scope="module", autouse=True)
def preloaded_children() -> Iterator[None]:
    """Fork the processes of ranks from one that has their modules."""
    with forked_children():
        yield


@pytest.fixture(autouse=True)
def _smallest_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_weights, "WINDOW_BYTES", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("ranks"), seed=3, hidden_size=96, **HEADS)


@pytest.fixture(scope="module")
def program(folder: Path) -> Program:
    return build_program(open_model(folder), dtype=DType.F32, max_positions=96)


def on_disk(
    made: RankedExecutorClass, offload_bytes: int | None, kv_bytes: int | None = None
) -> RankedExecutorClass:
    size = StreamSize(offload_bytes=offload_bytes, kv_bytes=kv_bytes)
    return replace(made, kind=NativeRanks(on_disk=size))


def streams_of(made: RankedExecutorClass, program: Program) -> list[dict[str, Any]]:
    """Return what the start of each rank says that it reads from disk."""
    programs = made.programs(program)
    kind = made.kind.for_programs(
        programs, LIMITS, lambda parts: made._together(programs, LIMITS, parts)
    )
    return [kind.start_fields(rank)["stream"] for rank in range(made.num_ranks)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_leaves_its_part_of_what_is_asked_for(layout: str, program: Program) -> None:
    made, asked = LAYOUTS[layout], 250_000
    whole, some = made.memory_for(program, LIMITS), on_disk(made, asked)
    streams, found = streams_of(some, program), some.memory_for(program, LIMITS)
    programs = made.programs(program)
    sizes = [streamable_bytes(own) for own in programs]
    shares = [one["streamed_bytes"] / size for one, size in zip(streams, sizes, strict=True)]
    assert sum(one["streamed_bytes"] for one in streams) >= asked
    assert all(share >= asked / sum(sizes) for share in shares)
    assert max(shares) - min(shares) < 0.1
    saved = [one["streamed_bytes"] - one["window_bytes"] for one in streams]
    parts = [own.weight_bytes - less for own, less in zip(programs, saved, strict=True)]
    assert found.weights_bytes == (max(parts) if made.site is not None else sum(parts))
    assert (found.step_bytes, found.token_bytes) == (whole.step_bytes, whole.token_bytes)
    with pytest.raises(SettingError, match=r"disk_offload_gb asks for .* to stay on disk"):
        on_disk(made, sum(sizes) + 1).memory_for(program, LIMITS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_leaves_what_the_memory_of_all_ranks_lacks(
    layout: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kv_bytes = LAYOUTS[layout], 1 << 16
    whole = made.memory_for(program, LIMITS)
    ample = missing_bytes(program, whole, 1 << 40, kv_bytes=kv_bytes, max_sequences=1)
    fits = (1 << 40) + ample

    def with_memory(num_bytes: int) -> RankedExecutorClass:
        memory = MachineMemory(available_bytes=num_bytes, limit="a test")
        monkeypatch.setattr(NativeSizing, "available_memory", staticmethod(lambda: memory))
        return on_disk(made, None, kv_bytes)

    assert fits > RESERVE_BYTES
    assert with_memory(fits).memory_for(program, LIMITS) == whole
    tight = with_memory(fits - 100_000)
    less = whole.weights_bytes - tight.memory_for(program, LIMITS).weights_bytes
    assert 100_000 <= less < 200_000
    assert all(one["streamed_bytes"] > 0 for one in streams_of(tight, program))
    with_memory(fits)
    assert streams_of(tight, program), "the choice is made once, whatever is free later"
    assert whole.weights_bytes - tight.memory_for(program, LIMITS).weights_bytes == less


class WithoutFiles(RankedExecutorClass):
    """Ranks above 0 that have no directory for packed weights."""

    def _start(self, *args: Any) -> RankStart:
        return replace(super()._start(*args), pack_cache=None)


def test_a_rank_without_files_to_read_is_refused(
    folder: Path, program: Program, tmp_path: Path
) -> None:
    made = on_disk(WithoutFiles(degree=2, binds=False), 250_000)
    with pytest.raises(WorkerError, match=r"rank 1 .*give it --pack-cache DIRECTORY too"):
        made(program, open_checkpoint(folder), options(tmp_path))


class LittleRoom(NativeRanks):
    """Ranks above 0 with a window that is smaller than one of their weights."""

    def start_fields(self, rank: int) -> dict[str, Any]:
        return {"stream": {**super().start_fields(rank)["stream"], "window_bytes": 4096}}


def options(folder: Path) -> ExecutorOptions:
    return ExecutorOptions(limits=LIMITS, pack_cache=PackCache(folder, Log("test")))


def test_a_rank_reads_what_its_start_says(folder: Path, program: Program, tmp_path: Path) -> None:
    made = replace(TWO, kind=LittleRoom(on_disk=StreamSize(offload_bytes=250_000)))
    with pytest.raises(WorkerError, match=r"rank 1 .*has no room for a range"):
        made(program, open_checkpoint(folder), options(tmp_path))


def test_ranks_that_share_no_memory_answer_as_one_process(
    folder: Path, program: Program, tmp_path: Path
) -> None:
    found = []
    connected = on_disk(replace(TWO, site=connected_site(2)), 250_000)
    for made in (NativeExecutor, connected):
        executor: Executor = made(program, open_checkpoint(folder), options(tmp_path))
        executor.allocate_cache(7, 16)
        found.append(logits_of(executor, IDS, max_positions=96, chunk=16).tobytes())
        executor.close()
    assert found[0] == found[1]


def test_a_rank_that_cannot_read_ends_the_group_and_says_why(
    folder: Path, program: Program, tmp_path: Path
) -> None:
    stages = LAYOUTS["PP 2"]
    first = stages.programs(program)[1]  # the first stage's, which ends with a matrix of a layer
    made = on_disk(stages, sum(map(streamable_bytes, stages.programs(program))))
    checkpoint, opened = open_checkpoint(folder), options(tmp_path)
    executor = made(program, checkpoint, opened)
    executor.allocate_cache(7, 16)
    assert opened.pack_cache is not None
    path = opened.pack_cache.path(recipe_of(first, checkpoint.path), checkpoint.path)
    _, _, end, *_ = HEAD.unpack(path.read_bytes()[: HEAD.size])
    os.truncate(path, end - SLACK_BYTES - 1)
    with pytest.raises(DeviceLost, match=r"rank 1 .*weights cannot be read from their file"):
        # The first steps may find them read ahead.
        logits_of(executor, 3 * IDS, max_positions=96, chunk=16)
    executor.close()
