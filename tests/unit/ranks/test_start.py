"""The start of ranks: versions, weights and memory are compared, and what differs is refused by
name."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import _native
from quire.base.errors import CapacityError, DeviceLost, ModelError, WorkerError
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.ranks import executor_class, main, processes
from quire.ranks.commands import Touch, command_wire
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.other_ranks import GROUP_LOST
from quire.ranks.processes import RankProcesses, _RankProcess
from quire.ranks.rank_loop import do_commands
from quire.ranks.start import RankStart, check_ready, read_start, ready_of, start_line
from quire.weights.checkpoint import open_checkpoint
from tests.models.generate import logits_of
from tests.tiny_models import write_tiny_llama

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LIMITS = StepLimits(max_tokens=16, max_samples=16, max_sequences=1)
OPTIONS = ExecutorOptions(limits=LIMITS)
TWO = RankedExecutorClass(degree=2, binds=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads for two ranks."""
    return write_tiny_llama(tmp_path_factory.mktemp("ranks"), seed=3, **HEADS)


@pytest.fixture(scope="module")
def program(folder: Path) -> Program:
    """Its whole program."""
    return build_program(open_model(folder), dtype=DType.F32, max_positions=64)


def test_two_processes_answer_as_one(folder: Path, program: Program) -> None:
    cpus = os.sched_getaffinity(0)
    checkpoint, ids = open_checkpoint(folder), list(range(3, 35))
    one = NativeExecutor(program, checkpoint, OPTIONS)
    one.allocate_cache(5, 16)
    two = replace(TWO, binds=True)(program, checkpoint, OPTIONS)
    two.allocate_cache(5, 16)
    wanted = logits_of(one, ids, max_positions=64, chunk=16)
    assert logits_of(two, ids, max_positions=64, chunk=16).tobytes() == wanted.tobytes()
    assert two.weights_digest == one.weights_digest
    assert two.group.native.num_gathers == 2 * (2 * 4 + 2)
    two.close()
    assert not two.processes.process_ids
    assert os.sched_getaffinity(0) == cpus, "rank 0 had bound this thread"


def test_a_rank_that_cannot_start_is_the_error_of_the_start(
    folder: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_class, "installed_version", lambda: "0.0.1")
    with pytest.raises(
        WorkerError, match=r"rank 1 .*exited with code 1: rank 0 is of version 0\.0\.1"
    ):
        TWO(program, open_checkpoint(folder), OPTIONS)


def test_a_rank_of_other_weights_is_refused(
    folder: Path, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny_llama(tmp_path, seed=4, **HEADS)
    start = RankedExecutorClass._start

    def elsewhere(*arguments: object) -> RankStart:
        made: RankStart = start(*arguments)  # type: ignore[arg-type]
        return replace(made, checkpoint=str(other))

    monkeypatch.setattr(RankedExecutorClass, "_start", elsewhere)
    with pytest.raises(ModelError, match="rank 1 has loaded something else than rank 0: weights_d"):
        TWO(program, open_checkpoint(folder), OPTIONS)


def test_a_rank_that_is_killed_while_it_loads_is_named(
    folder: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RankProcesses.start

    def killed(self: RankProcesses, *arguments: Any) -> None:
        start(self, *arguments)
        self._processes[-1].popen.kill()

    monkeypatch.setattr(RankProcesses, "start", killed)
    with pytest.raises(WorkerError, match=r"rank 1 .* signal 9 while it loaded: .* its memory"):
        TWO(program, open_checkpoint(folder), OPTIONS)


def test_a_rank_that_is_late_is_named_and_waited_for(
    folder: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, noted = RankProcesses.start, []

    def stopped(self: RankProcesses, *arguments: Any) -> None:
        start(self, *arguments)
        process = self._processes[-1].popen

        class GoesOn:
            def __init__(self, _: str) -> None: ...

            def warning(self, event: str, **fields: object) -> None:
                noted.append((event, fields["rank"]))
                process.send_signal(signal.SIGCONT)

        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(processes, "Log", GoesOn)

    monkeypatch.setattr(RankProcesses, "start", stopped)
    monkeypatch.setattr(processes, "_LATE_S", 0.2)
    TWO(program, open_checkpoint(folder), OPTIONS).close()
    assert noted[0] == ("a rank has not loaded its weights yet", 1)


def test_a_rank_that_ends_between_steps_is_named(folder: Path, program: Program) -> None:
    executor = TWO(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    (process,) = executor.processes._processes
    process.popen.kill()
    process.popen.wait()
    with pytest.raises(DeviceLost, match=r"rank 1 .* was ended by signal 9"):
        logits_of(executor, [1, 2, 3], max_positions=64)
    executor.close()


def test_a_rejected_batch_leaves_the_ranks_in_step(folder: Path, program: Program) -> None:
    executor = TWO(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(5, 16)
    before = logits_of(executor, [1, 2, 3], max_positions=64)
    with pytest.raises(ValueError, match="token_ids"):
        logits_of(executor, [1, 999, 3], max_positions=64)
    assert logits_of(executor, [1, 2, 3], max_positions=64).tobytes() == before.tobytes()
    executor.close()


def test_ranks_end_with_an_executor_that_nothing_closes(folder: Path, program: Program) -> None:
    executor = TWO(program, open_checkpoint(folder), OPTIONS)
    (process,) = executor.processes._processes
    with pytest.raises(CapacityError):
        executor.allocate_cache(1 << 40, 16)
    del executor
    gc.collect()
    assert process.popen.poll() is not None


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_rank_that_loses_its_device_says_so_unless_the_group_is_lost_already(
    monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    def load(start: object, group: object) -> None:
        raise DeviceLost("the card has fallen off the bus")

    aborted: list[bool] = []
    group = SimpleNamespace(
        native=SimpleNamespace(is_aborted=is_aborted), abort=lambda: aborted.append(True)
    )
    given: dict[str, Any] = {
        "group_of": lambda start, segment: group,
        "load": load,
        "start_logging": lambda *_: None,
        "run_on": lambda cpus: None,
    }
    for name, value in given.items():
        monkeypatch.setattr(main, name, value)
    there, answers = os.pipe()
    start = SimpleNamespace(rank=1, cpus=(), log_level="info", log_form="text")
    assert main._run(start, 0, answers) == GROUP_LOST  # type: ignore[arg-type]
    assert aborted
    os.close(answers)
    said = os.read(there, 4096)
    os.close(there)
    assert said == (b"" if is_aborted else b'{"failure": "the card has fallen off the bus"}\n')


def test_an_exchange_that_fails_inside_the_program_is_the_loss_of_the_group() -> None:
    def do(command: object) -> None:
        raise _native.RankLost("rank 3 does not respond")

    executor: Any = SimpleNamespace(do=do)
    command = command_wire().encode(Touch(layer=0, first=0, last=1))
    with pytest.raises(DeviceLost, match="rank 3 does not respond"):
        do_commands(executor, lambda: command)


@pytest.mark.parametrize(
    ("code", "failure", "found", "reason"),
    [
        (3, "", "rank 2 does not respond", "rank 2 does not respond"),
        (3, "", "rank 2 or another one cannot go on", "rank 1 (process 7) exited with code 3"),
        (
            *(3, "rank 2 does not respond", "a rank cannot go on"),
            "rank 2 does not respond, as rank 1 (process 7) found",
        ),
        (1, "", "rank 1 does not respond", "rank 1 (process 7) exited with code 1"),
        (-9, "", "rank 1 does not respond", "rank 1 (process 7) was ended by signal 9"),
    ],
)
def test_a_rank_that_ends_with_the_group_does_not_hide_the_reason(
    code: int, failure: str, found: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_END_S", 0.01)
    monkeypatch.setattr(processes, "_REASON_S", 0.01)
    answers, there = os.pipe()
    if failure:
        os.write(there, json.dumps({"failure": failure}).encode() + b"\n")
    os.close(there)
    popen: Any = SimpleNamespace(pid=7, returncode=code, wait=lambda: code)
    group: Any = SimpleNamespace(abort=lambda: None)
    lost: list[str] = []
    ranks = RankProcesses(group, lambda: lost.append(ranks.lost))
    for _ in range(2):  # a second end is no second loss
        ranks._watch(_RankProcess(1, popen, answers))
    os.close(answers)
    assert len(lost) == 1
    assert "rank 1 (process 7)" in lost[0]
    assert ranks.reason(found).endswith(reason)


@pytest.mark.parametrize("is_seen_first", [False, True])
def test_the_reason_of_a_loss_is_waited_for_where_an_end_names_none(
    is_seen_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is busy ends after one that only saw the group end."""
    monkeypatch.setattr(processes, "_END_S", 30.0)
    monkeypatch.setattr(processes, "_REASON_S", 0.0)
    popen: Any = SimpleNamespace(pid=7, returncode=3, wait=lambda: 3)
    group: Any = SimpleNamespace(abort=lambda: None)
    ranks = RankProcesses(group)

    def end(rank: int, line: bytes) -> None:
        answers, there = os.pipe()
        os.write(there, line)
        os.close(there)
        ranks._watch(_RankProcess(rank, popen, answers))
        os.close(answers)

    end(1, b"")
    late = threading.Timer(0.1, end, (2, b'{"failure": "rank 3 does not respond"}\n'))
    late.start()
    found = ranks.lost if is_seen_first else "rank 1 or another one cannot go on"
    assert ranks.reason(found) == "rank 3 does not respond, as rank 2 (process 7) found"
    late.join()


def test_the_files_of_ranks_go_when_the_others_have_ended_even_if_that_fails() -> None:
    calls: list[str] = []

    def end() -> None:
        calls.append("end")
        raise OSError("a process that is no more")

    others: Any = SimpleNamespace(end=end)
    kind: Any = SimpleNamespace(remove_files=lambda: calls.append("remove"))
    with pytest.raises(OSError, match="no more"):
        executor_class._end(others, kind)
    assert calls == ["end", "remove"]


def test_memory_is_that_of_all_ranks(program: Program) -> None:
    one = NativeExecutor.memory_for(program, LIMITS)
    two = TWO.memory_for(program, LIMITS)
    assert two.token_bytes == one.token_bytes
    assert two.weights_bytes > one.weights_bytes  # norms and the embedding are on each
    assert two.step_bytes > one.step_bytes
    four = RankedExecutorClass(degree=4).memory_for(program, LIMITS)
    assert four.token_bytes == 2 * one.token_bytes  # each KV head is on two ranks


def test_a_start_is_one_line_and_what_ranks_say_is_compared(program: Program) -> None:
    start = RankedExecutorClass(degree=2)._start(
        1,
        program,
        type("Checkpoint", (), {"path": Path("model")})(),
        OPTIONS,
        executor_class.SegmentSizes(slot_bytes=1, message_bytes=1),
        (0, 1),
    )
    line = start_line(start)
    assert line.count(b"\n") == 1
    assert read_start(line) == start
    own = ready_of("avx2", "digest")
    check_ready(1, own, own)
    with pytest.raises(ModelError, match="recipe is amx there and avx2 at rank 0"):
        check_ready(1, replace(own, recipe="amx"), own)
    with pytest.raises(WorkerError, match="start all ranks from one installation"):
        read_start(json.dumps({"version": "9"}).encode())
