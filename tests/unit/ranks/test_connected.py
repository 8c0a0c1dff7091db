"""Ranks that share no memory: their answers are those of one process, what differs is refused by
name, and a lost rank ends the group soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.base.errors import DeviceLost, ModelError, WorkerError
from quire.engine.assembly.ranks import watched
from quire.engine.process.messages import ToEngine
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.ranks import connected
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.rank_executor import MirroredExecutor
from quire.weights.checkpoint import open_checkpoint
from tests.connected_ranks import LoopbackRanks, connected_site
from tests.models.generate import logits_of
from tests.serve.preloaded import forked_children
from tests.tiny_models import write_tiny_llama

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
LIMITS = StepLimits(max_tokens=16, max_samples=16, max_sequences=1)
OPTIONS = ExecutorOptions(limits=LIMITS)
IDS = list(range(3, 35))


@pytest.fixture(scope="module", autouse=True)
def preloaded_children() -> Iterator[None]:
    """Fork the processes that tests start from one that has their modules."""
    with forked_children():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers with heads for two ranks."""
    return write_tiny_llama(tmp_path_factory.mktemp("ranks"), seed=3, **HEADS)


@pytest.fixture(scope="module")
def program(folder: Path) -> Program:
    """Its whole program."""
    return build_program(open_model(folder), dtype=DType.F32, max_positions=64)


@pytest.fixture(scope="module")
def wanted(folder: Path, program: Program) -> np.ndarray:
    """Return the logits of one process."""
    whole = NativeExecutor(program, open_checkpoint(folder), OPTIONS)
    whole.allocate_cache(5, 16)
    logits = logits_of(whole, IDS, max_positions=64, chunk=16)
    whole.close()
    return logits


class NoMessages:
    """An Inbox of an idle engine."""

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """See Inbox."""
        return []

    def wake(self) -> None:
        """See Inbox."""


def made(stages: int, degree: int, checkpoint: str = "") -> RankedExecutorClass:
    """Return a class of ranks that are connected."""
    site = connected_site(stages * degree, checkpoint=checkpoint)
    if stages == 1:
        return RankedExecutorClass(degree=degree, binds=False, poison=True, site=site)
    return PipelineExecutorClass(stages=stages, degree=degree, binds=False, poison=True, site=site)


@pytest.mark.parametrize(("stages", "degree"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_connected_ranks_answer_as_one(
    folder: Path, program: Program, wanted: np.ndarray, stages: int, degree: int
) -> None:
    executor = made(stages, degree)(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    for _ in range(3):
        logits = logits_of(executor, IDS, max_positions=64, chunk=16)
        np.testing.assert_array_equal(logits, wanted)
    outside = 10_000
    with pytest.raises(ValueError, match=r"token_ids|rejected the step"):
        logits_of(executor, [1, outside, 3], max_positions=64)
    np.testing.assert_array_equal(logits_of(executor, IDS, max_positions=64, chunk=16), wanted)
    assert executor.ops_done > 0
    ranks = executor.processes
    assert isinstance(ranks, LoopbackRanks)
    executor.close()
    assert [process.returncode for process in ranks.processes] == [0] * (stages * degree - 1)


def test_memory_is_that_of_the_ranks_of_one_machine(program: Program) -> None:
    together = RankedExecutorClass(degree=2, binds=False).memory_for(program, LIMITS)
    alone = RankedExecutorClass(
        degree=2, binds=False, site=replace(connected_site(2), here=1)
    ).memory_for(program, LIMITS)
    assert 2 * alone.token_bytes == together.token_bytes
    assert together.weights_bytes / 2 <= alone.weights_bytes < together.weights_bytes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
@pytest.mark.parametrize(("stages", "degree"), [(1, 2), (2, 1)], ids=["ranks", "stages"])
def test_a_lost_rank_ends_the_group(
    folder: Path, program: Program, number: signal.Signals, stages: int, degree: int
) -> None:
    executor = made(stages, degree)(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    logits_of(executor, [1, 2, 3], max_positions=64)
    ranks = executor.processes
    assert isinstance(ranks, LoopbackRanks)
    (process,) = ranks.processes
    os.kill(process.pid, number)
    found = "has closed its connection" if number is signal.SIGKILL else "does not respond"
    with pytest.raises(DeviceLost, match=f"rank 1 {found}"):
        logits_of(executor, [1, 2, 3], max_positions=64)
    if number is signal.SIGKILL:
        assert ranks._watcher is not None
        ranks._watcher.join(30)
        assert found in ranks.lost
    process.kill()
    executor.close()


def _is_stopped(pid: int) -> bool:
    """Whether no thread of the process runs any more."""
    states = (Path(task, "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


def test_a_rank_that_hangs_while_blocks_leave_ends_the_group(
    folder: Path, program: Program
) -> None:
    linked = replace(made(1, 2), shares_blocks=True)
    executor = linked(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    block = np.zeros(executor.block_bytes, np.uint8)
    executor.export_block(1, block)
    ranks = executor.processes
    assert isinstance(ranks, LoopbackRanks)
    (process,) = ranks.processes
    os.kill(process.pid, signal.SIGSTOP)
    while not _is_stopped(process.pid):
        time.sleep(0.01)
    with pytest.raises(DeviceLost, match="rank 1 does not respond"):
        executor.export_block(1, block)
    assert executor.group.native.is_aborted
    with pytest.raises(DeviceLost, match="rank 1 does not respond"):  # also while it is idle
        watched(executor, NoMessages()).take(None)
    with pytest.raises(DeviceLost, match="rank 1 does not respond"):
        logits_of(executor, [1, 2, 3], max_positions=64)
    process.kill()
    executor.close()


def test_a_rank_that_fails_says_why_to_rank_zero(folder: Path, program: Program) -> None:
    executor = made(1, 2)(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    assert isinstance(executor, MirroredExecutor)
    executor.lead.send(executor.allocation(1 << 40, 16))  # to the other rank only
    with pytest.raises(DeviceLost, match=r"rank 1 cannot go on: .* do not fit into memory; lower"):
        logits_of(executor, [1, 2, 3], max_positions=64)
    ranks = executor.processes
    assert isinstance(ranks, LoopbackRanks)
    assert ranks.processes[0].wait(30) == 1
    executor.close()


@pytest.mark.parametrize(
    ("error", "is_aborted", "said"),
    [
        (DeviceLost("rank 2 does not respond"), False, "rank 2 does not respond"),
        (DeviceLost("a rank cannot go on"), True, ""),  # another one has said why
        (MemoryError("too large"), True, "MemoryError: too large"),
    ],
)
def test_a_connected_rank_says_what_it_found_unless_the_group_is_lost_already(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_aborted: bool, said: str
) -> None:
    reasons: list[str] = []
    native = SimpleNamespace(
        is_aborted=is_aborted,
        connect=lambda sockets: None,
        leave=lambda: None,
        wait_until_over=lambda: "",
    )
    zero = SimpleNamespace(receive=lambda: b"", send_fields=lambda fields: None)
    meeting = SimpleNamespace(sockets={0: zero}, descriptors=list, close=lambda: None)

    def fails(*_: object) -> None:
        raise error

    given: dict[str, Any] = {
        "meet_rank_zero": lambda point, rank: meeting,
        "read_start": lambda line: None,
        "run_on": lambda cpus: None,
        "_own_group": lambda start: SimpleNamespace(native=native, abort=reasons.append),
        "load": lambda start, group: (SimpleNamespace(recipe="", weights_digest=""), None),
        "pool_server": lambda *_: None,
        "load_server": lambda *_: None,
        "ready_of": lambda *_: SimpleNamespace(),
        "asdict": vars,
        "do_commands": fails,
    }
    for name, value in given.items():
        monkeypatch.setattr(connected, name, value)
    own: Any = SimpleNamespace(start_of=lambda start: SimpleNamespace(cpus=()))
    point: Any = SimpleNamespace(world_size=3)
    with pytest.raises(type(error)):
        connected.run_connected(point, 1, own)
    assert reasons == [said]


def test_a_rank_ends_with_rank_zero(folder: Path, program: Program) -> None:
    executor = made(1, 2)(program, open_checkpoint(folder), OPTIONS)
    ranks = executor.processes
    assert isinstance(ranks, LoopbackRanks)
    (process,) = ranks.processes
    executor.group.abort()
    assert process.wait(30) == 1
    executor.close()


def test_a_rank_of_other_weights_is_refused(folder: Path, program: Program, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path, seed=4, **HEADS)
    with pytest.raises(ModelError, match="rank 1 has loaded something else than rank 0: weights_d"):
        made(1, 2, str(other))(program, open_checkpoint(folder), OPTIONS)


def test_a_rank_that_cannot_load_says_why(folder: Path, program: Program, tmp_path: Path) -> None:
    nowhere = tmp_path / "nothing"
    with pytest.raises(WorkerError, match=r"rank 1 \(127\.0\.0\.1\) cannot start: .*nothing"):
        made(1, 2, str(nowhere))(program, open_checkpoint(folder), OPTIONS)
