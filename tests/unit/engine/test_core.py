"""EngineCore and its loop: order, failures, and idling."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from quire.base.errors import DeviceLost, OverloadedError, WorkerError
from quire.base.records import FinishReason, Request, RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.cache.manager import CacheManager
from quire.engine.core import (
    AUDIT_AFTER_S,
    MAX_FAILED_STEPS,
    QUICK_AUDIT_EVERY_MS,
    RETRY_AFTER_S,
    EngineCore,
    serve,
)
from quire.engine.process.messages import (
    Abort,
    FromEngine,
    Hold,
    HoldClient,
    Join,
    Outputs,
    QueryTimelines,
    Refused,
    Stop,
    Submit,
    TimelinesReported,
    ToEngine,
)
from quire.runner.model_runner import ModelRunner
from quire.runner.prefault import PIECE_BYTES, Prefault
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler
from tests.unit.runner.scripted_executor import ScriptedExecutor
from tests.unit.runner.test_split_step import TOO_MUCH, Room, tight


class Rig:
    """A core over a scripted executor; `reports` are its log lines."""

    def __init__(
        self,
        *,
        plans_in_flight: int = 1,
        max_queued: int = 100,
        queue_timeout_ms: float = 0.0,
        ahead: int = 0,
    ) -> None:
        self.touched = Touched()
        self.executor = ScriptedExecutor()
        self.reports: list[str] = []
        limits = SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=64,
            plans_in_flight=plans_in_flight,
            max_queued_requests=max_queued,
            queue_timeout_ms=queue_timeout_ms,
            timeline_steps=256,
        )
        runner = ModelRunner(
            self.executor, num_slots=4, max_model_len=64, block_size=16, max_samples=64
        )
        self.core = EngineCore(
            Scheduler(limits, CacheManager(16, 16, prefix_caching=True), FirstCome()),
            runner,
            plans_in_flight=plans_in_flight,
            report=self._report,
            touch_ahead=self._touch_ahead(ahead) if ahead else None,
        )
        self._clock = count()
        self.clock_ms = 0.0

    def _touch_ahead(self, ahead_bytes: int) -> Prefault:
        return Prefault(
            self.touched,
            num_blocks=16,
            layers=1,
            block_bytes=PIECE_BYTES,
            ahead_bytes=ahead_bytes,
        )

    def _report(self, what: str, **fields: object) -> None:
        self.reports.append(" ".join([what, *map(str, fields.values())]))

    def now_ms(self) -> float:
        return float(next(self._clock)) + self.clock_ms

    def finish(self) -> dict[str, list[RequestOutput]]:
        """Step until nothing is left to do; return outputs by request."""
        outputs: dict[str, list[RequestOutput]] = {}
        while self.core.has_work:
            for output in self.core.step(self.now_ms) or ():
                outputs.setdefault(output.request_id, []).append(output)
        return outputs


def request(name: str, *, prompt: int = 3, output: int = 4, stream: int = 0) -> Request:
    return Request(
        request_id=f"{name}/{stream}",
        group_id=name,
        stream=stream,
        prompt_ids=np.arange(5, 5 + prompt, dtype=np.int32),
        sampling=SamplingParams(seed=1),
        stop_ids=(),
        max_total_tokens=prompt + output,
        arrival_ms=0.0,
    )


def _token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_requests_get_their_tokens_and_the_work_ends(plans_in_flight: int) -> None:
    rig = Rig(plans_in_flight=plans_in_flight)
    rig.core.add([request("a"), request("b", prompt=30)])
    outputs = rig.finish()
    assert _token_ids(outputs["a/0"]) == [3, 4, 5, 6]
    assert _token_ids(outputs["b/0"]) == [30, 31, 32, 33]
    assert outputs["a/0"][-1].finish_reason is FinishReason.LENGTH
    assert rig.core.step(rig.now_ms) is None
    assert rig.core.scheduler.check_integrity() == []


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_failed_step_ends_only_its_requests_with_an_error(
    plans_in_flight: int,
) -> None:
    rig = Rig(plans_in_flight=plans_in_flight)
    rig.executor.fail_next_trunk = MemoryError("buffers are gone")
    rig.core.add([request("a")])
    outputs = []
    for _ in range(plans_in_flight):
        outputs += list(rig.core.step(rig.now_ms) or ())
    rig.core.add([request("b")])
    rest = rig.finish()
    failed = [output for output in outputs if output.request_id == "a/0"]
    assert failed[-1].finish_reason is FinishReason.ERROR
    assert "MemoryError: buffers are gone" in str(failed[-1].error)
    assert _token_ids(rest["b/0"]) == [3, 4, 5, 6]
    assert len(rig.reports) == 1
    assert "buffers are gone" in rig.reports[0]
    assert "scripted_executor.py" in rig.reports[0]  # with its origin
    assert rig.core.stats().blocks_used == 0
    assert rig.core.scheduler.check_integrity() == []


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_prefix_of_a_failed_step_is_not_shared(plans_in_flight: int) -> None:
    rig = Rig(plans_in_flight=plans_in_flight)
    rig.core.add([request("a", prompt=48)])
    rig.executor.fail_next_trunk = RuntimeError("no")
    rig.finish()
    rig.core.add([request("b", prompt=48)])
    outputs = rig.finish()
    assert outputs["b/0"][0].cached_tokens == 0
    assert _token_ids(outputs["b/0"]) == [48, 49, 0, 1]


def test_several_failed_steps_in_a_row_end_the_engine() -> None:
    rig = Rig()
    for _ in range(MAX_FAILED_STEPS - 1):
        rig.executor.fail_next_trunk = RuntimeError("broken")
        rig.core.add([request("a")])
        rig.core.step(rig.now_ms)
    rig.executor.fail_next_trunk = RuntimeError("broken")
    rig.core.add([request("a")])
    with pytest.raises(WorkerError, match="3 steps in a row failed, the last with RuntimeError"):
        rig.core.step(rig.now_ms)


def test_a_lost_device_ends_the_engine_at_once() -> None:
    rig = Rig()
    rig.executor.fail_next_trunk = DeviceLost("the device is lost")
    rig.core.add([request("a")])
    with pytest.raises(DeviceLost, match="the device is lost"):
        rig.core.step(rig.now_ms)
    assert any("step failed" in line for line in rig.reports)


def test_separate_failed_steps_do_not_end_the_engine() -> None:
    rig = Rig()
    for _ in range(2 * MAX_FAILED_STEPS):
        rig.executor.fail_next_trunk = RuntimeError("now and then")
        rig.core.add([request("bad")])
        rig.core.step(rig.now_ms)
        rig.core.add([request("good")])
        assert _token_ids(rig.finish()["good/0"]) == [3, 4, 5, 6]


def test_the_streams_of_a_request_are_admitted_together_or_not_at_all() -> None:
    rig = Rig(max_queued=2)
    with pytest.raises(OverloadedError):
        rig.core.add([request("a", stream=index) for index in range(7)])
    assert not rig.core.has_work
    rig.core.add([request("a", stream=index) for index in range(2)])
    assert set(rig.finish()) == {"a/0", "a/1"}


def test_an_abort_frees_blocks_within_a_step() -> None:
    rig = Rig()
    rig.core.add([request("a", prompt=30, output=30)])
    rig.core.step(rig.now_ms)
    assert rig.core.stats().blocks_used > 0
    (output,) = rig.core.abort(["a/0", "nobody"])
    assert output.finish_reason is FinishReason.ABORT
    rig.core.step(rig.now_ms)
    assert rig.core.stats().blocks_used == 0
    assert not rig.core.has_work


class Touched:
    """An executor of one layer that records touched blocks."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        self.blocks += range(first, last)


class Inbox:
    """Return scripted messages; `waits` are the timeouts of each poll."""

    def __init__(self, *messages: list[ToEngine]) -> None:
        self._messages = list(messages)
        self.waits: list[float | None] = []

    def take(self, wait_s: float | None) -> list[ToEngine]:
        self.waits.append(wait_s)
        return self._messages.pop(0) if self._messages else [Stop()]


def _served(rig: Rig, inbox: Inbox) -> list[FromEngine]:
    sent: list[FromEngine] = []
    serve(rig.core, inbox, sent.append, rig.now_ms)
    return sent


def test_an_idle_engine_touches_blocks_between_polls_and_then_waits() -> None:
    rig = Rig(ahead=3 * PIECE_BYTES)
    inbox = Inbox([], [], [], [])
    _served(rig, inbox)
    assert rig.touched.blocks == [0, 1, 2]
    assert inbox.waits == [0.0, 0.0, 0.0, 0.0, None]


def test_new_work_precedes_touching_and_its_blocks_are_skipped() -> None:
    rig = Rig(ahead=2 * PIECE_BYTES)
    _served(rig, Inbox([Submit(requests=(request("a"),))], *([] for _ in range(20))))
    assert rig.touched.blocks == [1, 2]  # block 0 is the request's


def test_the_loop_waits_without_timeout_when_idle() -> None:
    inbox = Inbox()
    assert _served(Rig(), inbox) == []
    assert inbox.waits == [None]


def test_the_loop_waits_for_more_requests_where_the_scheduler_says_so() -> None:
    """It takes no step between two messages then, and the same ones afterwards."""
    rig = Rig()
    waits_s = [0.0, 0.03, 0.02, 0.0]
    asked_at: list[int] = []

    class Continued:
        is_active = True

        def gather_s(self, now_ms: float) -> float:
            asked_at.append(rig.core.steps.num_submitted)
            return waits_s.pop(0) if waits_s else 0.0

    rig.core.scheduler.continued = Continued()  # type: ignore[assignment]
    work: list[list[ToEngine]] = [[Submit(requests=(request("a", output=3),))], *([[]] * 4)]
    inbox = Inbox(*work)
    sent = _served(rig, inbox)
    assert inbox.waits[:5] == [None, 0.0, 0.03, 0.02, 0.0]
    assert asked_at[:5] == [0, 1, 1, 1, 2]
    assert len(sent) == 3


def test_a_new_client_gets_the_counters_at_once() -> None:
    sent = _served(Rig(), Inbox([Join(client=3, process_id=1)]))
    assert [type(message) for message in sent] == [Outputs]
    assert isinstance(sent[0], Outputs)
    assert sent[0].stats.blocks_total > 0


def test_requests_of_a_stopped_client_wait_and_the_loop_looks_for_its_return() -> None:
    rig = Rig()
    alive = [request("1/a", output=4), request("1/b", output=4)]
    stop: list[ToEngine] = [HoldClient(prefix="1/", is_held=True)]
    goes_on: list[ToEngine] = [HoldClient(prefix="1/", is_held=False)]
    work: list[list[ToEngine]] = [[Submit(requests=(one,)) for one in alive], [], stop, [], [], []]
    inbox = Inbox(*work, goes_on, *([[]] * 6))
    sent = _served(rig, inbox)
    assert inbox.waits[3:7] == [RETRY_AFTER_S] * 4
    stats = [message.stats for message in sent if isinstance(message, Outputs)]
    assert max(one.held for one in stats) == 2
    assert stats[-1].held == 0
    steps = [message.outputs for message in sent if isinstance(message, Outputs)]
    assert sum(len(output.token_ids) for one in steps for output in one or ()) == 8


def test_the_loop_does_not_wait_while_busy_and_audits_once_afterwards() -> None:
    rig = Rig()
    rig.core.scheduler.check_integrity = (  # type: ignore[method-assign]
        lambda *, repair=False, quick=False: [] if quick else ["a block too few"]
    )
    work: list[list[ToEngine]] = [[Submit(requests=(request("a", output=2),))], [], [], []]
    inbox = Inbox(*work)
    sent = _served(rig, inbox)
    # Idle; a step before and after the second poll; the audit; nothing left to audit.
    assert inbox.waits == [None, 0.0, AUDIT_AFTER_S, None, None]
    assert rig.reports == ["audit of the KV blocks a block too few False"]
    assert [type(message) for message in sent] == [Outputs, Outputs]


def test_an_engine_at_work_looks_for_leaks_now_and_then_but_not_in_its_first_step() -> None:
    rig = Rig()
    looks: list[bool] = []
    rig.core.scheduler.check_integrity = (  # type: ignore[method-assign]
        lambda *, repair=False, quick=False: looks.append(quick) or []
    )
    rig.core.add([request("a", output=8)])
    rig.core.step(rig.now_ms)
    rig.core.step(rig.now_ms)
    assert looks == []
    rig.clock_ms = QUICK_AUDIT_EVERY_MS
    rig.core.step(rig.now_ms)
    rig.core.step(rig.now_ms)
    assert looks == [True]


def test_a_leaked_block_is_freed_by_the_audit_and_reported_once() -> None:
    rig = Rig()
    pool = rig.core.scheduler._cache.pool
    pool.allocate(1)  # no table names it
    assert rig.core.stats().blocks_used == 1
    rig.core.audit()
    assert rig.core.stats().blocks_used == 0
    assert rig.reports
    assert all(report.endswith("True") for report in rig.reports)
    told = len(rig.reports)
    rig.core.audit()
    assert len(rig.reports) == told
    rig.core.add([request("a", prompt=48)])
    assert _token_ids(rig.finish()["a/0"]) == [48, 49, 0, 1]


def test_a_leak_is_found_while_busy_and_reported_with_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    free = CacheManager.free

    def forgets_one(self: CacheManager, slots: Any, last_steps: Any) -> int:
        leaky = next((s for s in slots if self.tables.holder(s) == "leaky/0"), None)
        if leaky is not None:  # its last block is in no table and in no list any more
            self.tables.counts[leaky] -= 1
            self.tables.blocks[leaky, self.tables.counts[leaky]] = -1
        return free(self, slots, last_steps)

    monkeypatch.setattr(CacheManager, "free", forgets_one)
    rig.core.add([request("leaky", prompt=40), request("other", prompt=9, output=40)])
    while not rig.reports:
        assert rig.core.has_work
        rig.core.step(rig.now_ms)
        rig.clock_ms += 10_000.0
    assert rig.core.has_work
    (report,) = rig.reports
    assert "leaked" in report
    assert "last held by leaky/0" in report
    assert "other/0" not in report
    assert report.endswith("True")
    assert rig.core.scheduler.check_integrity() == []
    while rig.core.has_work:
        rig.core.step(rig.now_ms)
    assert rig.core.stats().blocks_used == 0
    assert len(rig.reports) == 1


def test_one_stream_of_one_timeline_query_is_reported_between_two_steps() -> None:
    rig = Rig()
    streams = tuple(request("a", stream=stream, output=8) for stream in range(2))
    asks: list[ToEngine] = [QueryTimelines(ask_id=id_, prefixes=("a",)) for id_ in (1, 2)]
    sent = _served(rig, Inbox([Submit(requests=streams)], asks, *([] for _ in range(12))))
    kinds = [type(message) for message in sent]
    answered = [place for place, kind in enumerate(kinds) if kind is TimelinesReported]
    assert [m.ask_id for m in sent if isinstance(m, TimelinesReported)] == [1, 2]
    assert [len(m.reports) for m in sent if isinstance(m, TimelinesReported)] == [2, 2]
    assert kinds[: answered[0]].count(Outputs) == 3  # a step for each stream after the first step
    assert kinds[answered[0] : answered[1]].count(Outputs) == 2


def test_an_idle_engine_answers_timeline_queries_without_waiting() -> None:
    inbox = Inbox([QueryTimelines(ask_id=id_, prefixes=("a",)) for id_ in (1, 2)], [])
    sent = _served(Rig(), inbox)
    assert [m.ask_id for m in sent if isinstance(m, TimelinesReported)] == [1, 2]
    assert inbox.waits[1] == 0.0


def test_the_loop_reports_rejections_with_the_reason() -> None:
    rig = Rig(max_queued=1)
    streams = tuple(request("a", stream=index) for index in range(6))
    (refused,) = _served(rig, Inbox([Submit(requests=streams)]))
    assert isinstance(refused, Refused)
    assert refused.request_ids == tuple(stream.request_id for stream in streams)
    assert refused.fault.kind == "OverloadedError"


def test_the_loop_rejects_timed_out_requests_and_continues() -> None:
    rig = Rig(queue_timeout_ms=5.0)
    streams = tuple(request(f"r{index}", output=9) for index in range(5))  # four can run
    submits: list[ToEngine] = [Submit(requests=(stream,)) for stream in streams]
    sent = _served(rig, Inbox(submits, *([] for _ in range(20))))
    (refused,) = (message for message in sent if isinstance(message, Refused))
    assert refused.request_ids == ("r4/0",)
    assert refused.fault.kind == "QueueTimedOut"
    told = [m.outputs for m in sent if isinstance(m, Outputs) and m.outputs is not None]
    ends = [out.request_id for step in told for out in step if out.finish_reason is not None]
    assert sorted(ends) == ["r0/0", "r1/0", "r2/0", "r3/0"]


def test_the_loop_answers_an_abort_with_the_last_output() -> None:
    rig = Rig()
    sent = _served(
        rig,
        Inbox([Submit(requests=(request("a", output=9),))], [Abort(request_ids=("a/0", "b/0"))]),
    )
    last = [m for m in sent if isinstance(m, Outputs) and m.outputs is not None][-1]
    assert last.outputs is not None
    assert [output.finish_reason for output in last.outputs] == [FinishReason.ABORT]


def test_the_loop_pauses_held_requests_reports_it_once_and_resumes_them() -> None:
    rig = Rig()
    submit = Submit(requests=(request("a", output=9),))
    hold = Hold(request_ids=("a/0", "nobody"), is_held=True)
    go_on = Hold(request_ids=("a/0",), is_held=False)
    inbox = Inbox([submit], [hold], [], [], [go_on], *([] for _ in range(20)))
    sent = [message for message in _served(rig, inbox) if isinstance(message, Outputs)]
    aside = [at for at, message in enumerate(sent) if message.stats.held]
    assert aside == [1]  # after the first step, and not repeated while idle
    assert (sent[1].outputs, sent[1].stats.running, sent[1].stats.blocks_used) == (None, 0, 0)
    assert inbox.waits[1:5] == [0.0, RETRY_AFTER_S, RETRY_AFTER_S, RETRY_AFTER_S]
    outputs = [output for message in sent for output in message.outputs or ()]
    assert len(_token_ids(outputs)) == 9
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_out_of_memory_of_one_request_fails_it_and_never_the_engine(plans_in_flight: int) -> None:
    rig = Rig(plans_in_flight=plans_in_flight)
    rig.core.runner = ModelRunner(
        tight(Room(2), overlap=plans_in_flight > 1),
        num_slots=4,
        max_model_len=64,
        block_size=16,
        max_samples=64,
        overlap=plans_in_flight > 1,
    )
    for number in range(2 * MAX_FAILED_STEPS):  # more than the engine may fail in a row
        big = replace(request(f"big{number}"), prompt_ids=np.array([TOO_MUCH], np.int32))
        rig.core.add([replace(big, max_total_tokens=5)])
    for name in "abc":
        rig.core.add([request(name)])
    outputs = rig.finish()
    ends = {name: told[-1] for name, told in outputs.items()}
    for name, end in ends.items():
        if name.startswith("big"):
            assert end.finish_reason is FinishReason.ERROR
            assert "does not fit" in (end.error or "")
        else:
            assert end.finish_reason is FinishReason.LENGTH
            assert _token_ids(outputs[name]) == [3, 4, 5, 6]
    assert not rig.reports
    assert rig.core.scheduler.check_integrity() == []
