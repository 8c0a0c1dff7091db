"""EngineClient over a scripted link: every generate ends, whatever the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.clock import Clock
from quire.base.engine_stats import EngineStats
from quire.base.errors import (
    CapacityError,
    ContextTooLong,
    InvalidParameter,
    OverloadedError,
    QuireError,
    WorkerError,
)
from quire.base.records import (
    NO_INTS,
    FinishReason,
    RequestOutput,
    RequestTimes,
    StepOutputs,
    TokenLogprobs,
)
from quire.base.sampling_params import SamplingParams
from quire.config.groups import EngineConfig, ModelConfig
from quire.engine.client.deliveries import MAX_AT_ONCE
from quire.engine.client.engine_client import MAX_UNREAD, EngineClient
from quire.engine.model_card import ModelCard
from quire.engine.output.output_stream import OutputStream, TextDelta
from quire.engine.process.messages import (
    PROTOCOL_VERSION,
    Abort,
    Beat,
    Failed,
    FromEngine,
    Hello,
    Hold,
    Loading,
    Outputs,
    QuerySnapshot,
    Ready,
    Refused,
    SnapshotReported,
    Submit,
    ToEngine,
    fault_of,
)

CARD = ModelCard(
    name="m",
    path="/m",
    max_model_len=64,
    vocab_size=307,
    eos_ids=(1,),
    fingerprint="fp_0",
    generation_defaults={},
    dtype="f32",
    recipe="portable",
    num_blocks=4,
    block_size=16,
    max_num_seqs=4,
    created_s=0,
)


class ScriptedLink:
    """Records the client's messages; the test sends the engine's."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.is_connected = True
        self.num_closed = 0

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.say, self.end = on_message, on_end

    def send(self, message: ToEngine) -> bool:
        if self.is_connected:
            self.sent.append(message)
        return self.is_connected

    async def close(self) -> None:
        self.num_closed += 1

    def stream_id(self, name: str) -> str:
        """Return the engine's id of a client stream "id/stream", of the latest such request."""
        caller, _, stream = name.partition("/")
        submits = [message for message in self.sent if isinstance(message, Submit)]
        ids = [request.request_id for submit in submits for request in submit.requests]
        return [id_ for id_ in ids if id_.startswith(f"{caller}#") and id_.endswith(f"/{stream}")][
            -1
        ]

    def aborted(self, name: str) -> list[ToEngine]:
        """Return the single message that ends the stream."""
        return [Abort(request_ids=(self.stream_id(name),))]

    def tokens(self, name: str, *token_ids: int, step: int = 0, **more: Any) -> None:
        """Send tokens of a stream."""
        self.tokens_of(self.stream_id(name), *token_ids, step=step, **more)

    def tokens_of(self, stream_id: str, *token_ids: int, step: int = 0, **more: Any) -> None:
        """Send tokens by the engine's own stream id."""
        output = RequestOutput(request_id=stream_id, token_ids=token_ids, **more)
        outputs = StepOutputs(step=step, request_ids=[], token_ids=NO_INTS, events=(output,))
        stats = EngineStats(steps_total=step, last_step_ms=100.0 * step)
        self.say(Outputs(outputs=outputs, stats=stats))


class SetClock(Clock):
    """A clock with a settable time."""

    def __init__(self) -> None:
        self.ms = 0.0

    def now_ms(self) -> float:
        return self.ms


class Rig:
    def __init__(self, model: Path, **settings: Any) -> None:
        self.link = ScriptedLink()
        config = EngineConfig(model=ModelConfig(model=str(model)))
        self.client = EngineClient(self.link, config, **settings)
        self.clock = self.client._clock = SetClock()

    async def start(self) -> None:
        starting = asyncio.create_task(self.client.ready())
        await asyncio.sleep(0)
        self.link.say(Hello(protocol_version=PROTOCOL_VERSION, process_id=1))
        self.link.say(Ready(card=CARD, notes=("a line",)))
        await starting

    def ask(self, *, request_id: str = "r", **settings: Any) -> AsyncIterator[TextDelta]:
        sampling = SamplingParams(**settings)
        return self.client.generate([5, 6], sampling, request_id=request_id)


def run(model: Path, story: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
    """Run a script on a client that is ready."""

    async def play() -> None:
        rig = Rig(model, **settings)
        await rig.start()
        await asyncio.wait_for(story(rig), 30)

    asyncio.run(play())


async def _all(deltas: AsyncIterator[TextDelta]) -> list[TextDelta]:
    return [delta async for delta in deltas]


async def _started(rig: Rig, deltas: AsyncIterator[TextDelta]) -> asyncio.Task[list[TextDelta]]:
    task = asyncio.create_task(_all(deltas))
    num_sent = len(rig.link.sent)
    while len(rig.link.sent) == num_sent and not task.done():
        await asyncio.sleep(0)
    return task


def test_ready_delivers_the_card_the_notes_and_the_tokenizer(model: Path) -> None:
    async def story(rig: Rig) -> None:
        assert rig.client.card == CARD
        assert rig.client.notes == ("a line",)
        assert rig.client.template is not None
        assert rig.client.tokenizer.vocab_size == 307
        assert rig.client.health().ok
        assert rig.client.health().state == "ready"

    run(model, story)


def test_a_startup_error_is_raised_and_the_link_closed_once(
    model: Path,
) -> None:
    async def play() -> None:
        rig = Rig(model)
        starting = asyncio.create_task(rig.client.ready())
        await asyncio.sleep(0)
        assert rig.client.health().state == "starting"
        rig.link.say(Loading(done_bytes=1, total_bytes=2))
        assert rig.client.loading == (1, 2)
        rig.link.say(Failed(fault=fault_of(CapacityError("too small"))))
        with pytest.raises(CapacityError, match="too small"):
            await starting
        await rig.client.close()
        assert rig.link.num_closed == 1
        assert rig.client.dead.is_set()

    asyncio.run(play())


def test_an_engine_of_another_version_is_rejected(model: Path) -> None:
    async def play() -> None:
        rig = Rig(model)
        starting = asyncio.create_task(rig.client.ready())
        await asyncio.sleep(0)
        rig.link.say(Hello(protocol_version=PROTOCOL_VERSION + 1, process_id=1))
        with pytest.raises(WorkerError, match="one version of quire"):
            await starting

    asyncio.run(play())


def test_a_process_that_ends_while_starting_is_reported(model: Path) -> None:
    async def play() -> None:
        rig = Rig(model)
        starting = asyncio.create_task(rig.client.ready())
        await asyncio.sleep(0)
        rig.link.end("the engine process was ended by signal 9")
        with pytest.raises(WorkerError, match="signal 9"):
            await starting

    asyncio.run(play())


def test_tokens_become_text_and_the_stream_ends_with_its_reason(model: Path) -> None:
    async def story(rig: Rig) -> None:
        ids = rig.client.tokenizer.encode("Hello there", add_special_tokens=False)
        task = await _started(rig, rig.ask())
        (submit,) = rig.link.sent
        assert isinstance(submit, Submit)
        assert submit.requests[0].prompt_ids.tolist() == [5, 6]
        for token_id in ids[:-1]:
            rig.link.tokens("r/0", token_id)
        rig.link.tokens("r/0", ids[-1], finish_reason=FinishReason.LENGTH)
        deltas = await task
        assert "".join(delta.text for delta in deltas) == "Hello there"
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert rig.client.health().pending == 0
        assert rig.link.sent == [submit]

    run(model, story)


def test_a_large_step_is_handed_out_in_parts_and_whole_before_an_error(model: Path) -> None:
    async def story(rig: Rig) -> None:
        names = [f"r{number}" for number in range(MAX_AT_ONCE + 9)]
        tasks = [await _started(rig, rig.ask(request_id=name)) for name in names]
        events = tuple(
            RequestOutput(request_id=rig.link.stream_id(f"{name}/0"), token_ids=(40,))
            for name in names
        )
        for num_events, num_waiting in ((9, 9), (MAX_AT_ONCE + 9, MAX_AT_ONCE + 9)):
            outputs = StepOutputs(
                step=0, request_ids=[], token_ids=NO_INTS, events=events[:num_events]
            )
            rig.link.say(Outputs(outputs=outputs, stats=EngineStats()))
            num_first = sum(rig.client.num_waiting(name) > 0 for name in names)
            assert num_first == min(num_waiting, MAX_AT_ONCE)
        rig.link.say(Failed(fault=fault_of(WorkerError("it is gone"))))
        assert [rig.client.num_waiting(name) for name in names] == [3] * 9 + [2] * MAX_AT_ONCE
        for task in tasks:
            with pytest.raises(WorkerError, match="it is gone"):
                await task

    run(model, story)


def test_streams_are_interleaved_and_end_one_by_one(model: Path) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask(n=2))
        rig.link.tokens("r/1", 40)
        rig.link.tokens("r/0", 41, finish_reason=FinishReason.ERROR, error="row failed")
        rig.link.tokens("r/1", 42, finish_reason=FinishReason.STOP)
        deltas = await task
        assert [delta.index for delta in deltas] == [1, 0, 1]
        assert [delta.finish_reason for delta in deltas] == [None, "error", "stop"]
        assert deltas[1].error == "row failed"

    run(model, story)


def test_an_engine_that_was_given_up_is_silent_until_it_says_something(model: Path) -> None:
    """Although it was idle when it was stopped, so that its counters know of no request."""

    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask())
        rig.clock.ms += 3_000
        assert rig.client.health().silent_ms == 3_000
        rig.client.give_up_requests("it is silent")
        with pytest.raises(QuireError, match="it is silent"):
            await task
        assert rig.link.aborted("r/0")[0] in rig.link.sent
        rig.clock.ms += 1_000
        assert (rig.client.health().pending, rig.client.health().silent_ms) == (1, 4_000)
        (ask,) = (one for one in rig.link.sent if isinstance(one, QuerySnapshot))
        snapshot: Any = None  # not read
        rig.link.say(SnapshotReported(ask_id=ask.ask_id, snapshot=snapshot))
        assert (rig.client.health().pending, rig.client.health().silent_ms) == (0, 0)

    run(model, story)


def test_closing_a_generator_aborts_its_running_streams(model: Path) -> None:
    async def story(rig: Rig) -> None:
        deltas = rig.ask(n=2)
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        rig.link.tokens("r/1", 42, finish_reason=FinishReason.STOP)
        await first
        await deltas.aclose()  # type: ignore[attr-defined]
        assert rig.link.sent[1:] == rig.link.aborted("r/0")
        assert rig.client.health().pending == 0
        rig.link.tokens("r/0", finish_reason=FinishReason.ABORT)  # late, and ignored

    run(model, story)


def test_a_cancelled_consumer_aborts_too(model: Path) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert rig.link.sent[1:] == rig.link.aborted("r/0")

    run(model, story)


def test_a_stop_string_ends_the_stream_before_the_engine_does(model: Path) -> None:
    async def story(rig: Rig) -> None:
        ids = rig.client.tokenizer.encode("one two three", add_special_tokens=False)
        task = await _started(rig, rig.ask(stop=("two",)))
        for token_id in ids:
            rig.link.tokens("r/0", token_id)
        deltas = await task
        assert "".join(delta.text for delta in deltas) == "one "
        assert deltas[-1].stop_reason == "two"
        assert rig.link.sent[1:] == rig.link.aborted("r/0")

    run(model, story)


def test_a_stream_ended_by_the_client_has_the_time_of_its_last_token(model: Path) -> None:
    times = RequestTimes(
        arrival_ms=1.0, first_scheduled_ms=2.0, first_token_ms=100.0, last_token_ms=100.0
    )

    async def story(rig: Rig) -> None:
        ids = rig.client.tokenizer.encode("one two three", add_special_tokens=False)
        task = await _started(rig, rig.ask(stop=("two",)))
        rig.link.tokens("r/0", ids[0], step=1, times=times)
        for step, token_id in enumerate(ids[1:], 2):
            rig.link.tokens("r/0", token_id, step=step)
        last = (await task)[-1]
        assert last.stop_reason == "two"
        assert last.times == replace(times, last_token_ms=100.0 * last.num_output_tokens)
        assert last.num_output_tokens > 1

    run(model, story)


def test_an_abort_by_id_ends_the_generator_with_the_engines_last_output(model: Path) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask())
        await rig.client.abort("r")
        await rig.client.abort("nobody")
        assert rig.link.sent[1:] == rig.link.aborted("r/0")
        rig.link.tokens("r/0", finish_reason=FinishReason.ABORT)
        assert (await task)[-1].finish_reason is FinishReason.ABORT

    run(model, story)


def test_a_rejection_is_raised_with_its_class(model: Path) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask(n=3))
        ids = tuple(rig.link.stream_id(f"r/{stream}") for stream in range(3))
        fault = fault_of(OverloadedError("busy", retry_after_s=1.0))
        rig.link.say(Refused(request_ids=ids, fault=fault))
        with pytest.raises(OverloadedError, match="busy"):
            await task
        assert rig.client.health().pending == 0
        assert len(rig.link.sent) == 1

    run(model, story)


def test_an_unservable_request_is_raised_at_once_and_never_sent(model: Path) -> None:
    async def story(rig: Rig) -> None:
        sampling = SamplingParams()
        with pytest.raises(ContextTooLong, match="the prompt has 70 tokens"):
            await _all(rig.client.generate([5] * 70, sampling, request_id="a"))
        with pytest.raises(InvalidParameter, match="empty"):
            await _all(rig.client.generate([], sampling, request_id="a"))
        assert rig.link.sent == []

    run(model, story)


def test_an_unsendable_message_is_an_error_not_a_wait(model: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.link.is_connected = False
        with pytest.raises(WorkerError, match="takes no messages"):
            await _all(rig.ask())
        assert rig.client.health().pending == 0

    run(model, story)


def test_an_id_in_use_is_rejected_and_free_afterwards(model: Path) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask())
        with pytest.raises(InvalidParameter, match="in use"):
            await _all(rig.ask())
        rig.link.tokens("r/0", finish_reason=FinishReason.STOP)
        await task
        task = await _started(rig, rig.ask())
        rig.link.tokens("r/0", finish_reason=FinishReason.STOP)
        await task

    run(model, story)


def test_late_output_of_an_ended_stream_reaches_no_later_one_of_its_name(
    model: Path,
) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask())
        late = rig.link.stream_id("r/0")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        task = await _started(rig, rig.ask())
        assert rig.link.stream_id("r/0") != late
        rig.link.tokens_of(late, 99)
        rig.link.tokens_of(late, finish_reason=FinishReason.ABORT)
        rig.link.tokens("r/0", 42, finish_reason=FinishReason.LENGTH)
        deltas = await task
        assert [id_ for delta in deltas for id_ in delta.token_ids] == [42]
        assert deltas[-1].finish_reason is FinishReason.LENGTH

    run(model, story)


@pytest.mark.parametrize("told", [True, False])
def test_a_dead_engine_raises_in_every_open_generate_and_in_later_ones(
    model: Path, told: bool
) -> None:
    async def story(rig: Rig) -> None:
        tasks = [await _started(rig, rig.ask(request_id=f"r{i}", n=2)) for i in range(3)]
        if told:
            rig.link.say(Failed(fault=fault_of(WorkerError("out of luck"))))
        rig.link.end("ended by signal 9")
        why = "out of luck" if told else "signal 9"
        for task in tasks:
            with pytest.raises(WorkerError, match=why):
                await task
        assert rig.client.dead.is_set()
        assert rig.client.health().state == "dead"
        assert why in rig.client.health().reason
        with pytest.raises(WorkerError, match=why):
            await _all(rig.ask(request_id="later"))

    run(model, story)


def test_health_fails_when_work_is_pending_and_no_step_ends(model: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.clock.ms += 200.0
        assert rig.client.health().ok  # nothing is pending: no progress is needed
        task = await _started(rig, rig.ask())
        assert rig.client.health().ok
        rig.clock.ms += 200.0
        health = rig.client.health()
        assert not health.ok
        assert "1 requests are open and nothing was computed" in health.reason
        rig.link.tokens("r/0", 42, step=1)
        assert rig.client.health().ok
        assert rig.client.health().steps_total == 1
        rig.link.tokens("r/0", finish_reason=FinishReason.STOP, step=2)
        await task

    run(model, story, watchdog_s=0.1)


def test_health_fails_where_the_streams_of_a_hung_engine_were_aborted(model: Path) -> None:
    async def story(rig: Rig) -> None:
        deltas = rig.ask()
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        rig.link.tokens("r/0", 42, step=1)
        rig.link.say(Outputs(outputs=None, stats=EngineStats(steps_total=1, running=1)))
        await first
        await deltas.aclose()  # as a router's that waited for long enough
        rig.clock.ms += 200.0
        health = rig.client.health()
        assert not health.ok
        assert "1 requests are open and nothing was computed" in health.reason
        rig.link.say(Outputs(outputs=None, stats=EngineStats(steps_total=1)))
        assert rig.client.health().ok

    run(model, story, watchdog_s=0.1)


def test_operations_completed_within_a_long_step_are_progress(model: Path) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask())
        rig.link.say(Beat(ops_done=5))
        for ops_done, ok in [(9, True), (9, False), (10, True)]:
            rig.clock.ms += 200.0
            assert not rig.client.health().ok
            rig.link.say(Beat(ops_done=ops_done))
            assert rig.client.health().ok is ok
        rig.link.tokens("r/0", finish_reason=FinishReason.STOP)
        await task

    run(model, story, watchdog_s=0.1)


def test_a_silent_engine_shows_in_its_health_while_it_has_work(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(rig: Rig) -> None:
        now_ms = [1000.0]
        monkeypatch.setattr(rig.client._clock, "now_ms", lambda: now_ms[0])
        found = []

        def later() -> None:
            now_ms[0] += 700.0
            found.append(rig.client.health().silent_ms)

        later()  # without work nothing is expected
        task = await _started(rig, rig.ask())
        later()
        for message in (Beat(ops_done=5), Beat(ops_done=5)):  # signs of life, without progress
            rig.link.say(message)
            later()
        rig.link.tokens("r/0", 42, step=1)
        later()
        later()
        rig.link.tokens("r/0", finish_reason=FinishReason.STOP, step=2)
        later()
        assert found == [0, 700, 700, 700, 700, 1400, 0]
        await task

    run(model, story)


def test_unread_output_of_a_finished_request_is_not_pending(
    model: Path,
) -> None:
    async def story(rig: Rig) -> None:
        deltas = rig.ask(stop=("two",))
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        rig.link.tokens("r/0", 40, step=1)
        await first
        for token_id in rig.client.tokenizer.encode("one two three", add_special_tokens=False):
            rig.link.tokens("r/0", token_id, step=2)
        assert rig.client.health().pending == 0
        assert rig.link.sent[1:] == rig.link.aborted("r/0")
        rig.clock.ms += 200.0
        assert rig.client.health().ok
        assert (await _all(deltas))[-1].finish_reason is FinishReason.STOP

    run(model, story, watchdog_s=0.1)


def test_a_detokenization_error_ends_only_its_stream(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(stream: OutputStream, output: RequestOutput, step_ms: float) -> TextDelta | None:
        if 41 in output.token_ids:
            raise ValueError("no such token")
        return real_push(stream, output, step_ms)

    real_push = OutputStream.push
    monkeypatch.setattr(OutputStream, "push", push)

    async def story(rig: Rig) -> None:
        bad = await _started(rig, rig.ask(request_id="bad"))
        good = await _started(rig, rig.ask(request_id="good"))
        rig.link.tokens("bad/0", 41)
        rig.link.tokens("good/0", 42, finish_reason=FinishReason.STOP)
        (delta,) = await bad
        assert (delta.finish_reason, delta.token_ids) == (FinishReason.ERROR, ())
        assert "ValueError: no such token" in str(delta.error)
        assert rig.link.sent[2:] == rig.link.aborted("bad/0")
        assert (await good)[-1].finish_reason is FinishReason.STOP

    run(model, story)


def test_closing_ends_open_streams_and_does_not_count_as_failure(model: Path) -> None:
    async def story(rig: Rig) -> None:
        task = await _started(rig, rig.ask())
        await rig.client.close()
        with pytest.raises(WorkerError, match="closed"):
            await task
        assert not rig.client.dead.is_set()
        await rig.client.close()
        assert rig.link.num_closed == 1

    run(model, story)


def test_a_stalled_reader_does_not_delay_others(model: Path) -> None:
    async def story(rig: Rig) -> None:
        slow = rig.ask(request_id="slow")
        first = asyncio.ensure_future(anext(slow))
        await asyncio.sleep(0)
        for _ in range(1000):
            rig.link.tokens("slow/0", 42)
        task = await _started(rig, rig.ask(request_id="fast"))
        rig.link.tokens("fast/0", 42, finish_reason=FinishReason.STOP)
        assert (await task)[-1].finish_reason is FinishReason.STOP
        await first
        await slow.aclose()  # type: ignore[attr-defined]

    run(model, story)


def test_stats_are_the_latest_known(model: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.link.say(Outputs(outputs=None, stats=EngineStats(running=3, steps_total=9)))
        assert rig.client.stats == EngineStats(running=3, steps_total=9)

    run(model, story)


def test_a_request_with_a_slow_reader_is_held_until_it_catches_up(model: Path) -> None:
    async def story(rig: Rig) -> None:
        slow = rig.ask(request_id="slow", n=2)
        first = asyncio.ensure_future(anext(slow))
        await asyncio.sleep(0)
        ids = tuple(rig.link.stream_id(f"slow/{stream}") for stream in range(2))
        for _ in range(MAX_UNREAD + 1):
            rig.link.tokens("slow/0", 42)
            rig.link.tokens("slow/1", 42)
        assert rig.link.sent[1:] == [Hold(request_ids=ids, is_held=True)]
        await first
        while len(rig.link.sent) == 2:
            await anext(slow)
        assert rig.link.sent[2:] == [Hold(request_ids=ids, is_held=False)]
        await slow.aclose()  # type: ignore[attr-defined]
        assert rig.link.sent[3:] == [Abort(request_ids=ids)]

    run(model, story)


def test_logprobs_count_as_unread_output_too(model: Path) -> None:
    async def story(rig: Rig) -> None:
        slow = rig.ask(logprob_token_ids=tuple(range(99)), logprobs=0)
        first = asyncio.ensure_future(anext(slow))
        await asyncio.sleep(0)
        listed = tuple(-1.0 for _ in range(99))
        token = TokenLogprobs(token_id=42, logprob=-1.0, top=(), listed=listed)
        for _ in range(MAX_UNREAD // 100 + 1):
            rig.link.tokens("r/0", 42, logprobs=(token,))
        assert [type(message) for message in rig.link.sent[1:]] == [Hold]
        await first
        await slow.aclose()  # type: ignore[attr-defined]

    run(model, story)


def test_an_engine_that_only_waits_for_readers_is_healthy(model: Path) -> None:
    async def story(rig: Rig) -> None:
        slow = rig.ask(request_id="slow")
        first = asyncio.ensure_future(anext(slow))
        await asyncio.sleep(0)
        for _ in range(MAX_UNREAD + 1):
            rig.link.tokens("slow/0", 42)
        rig.clock.ms = 90_000.0
        assert rig.client.health().ok
        assert rig.client.health().pending == 1
        await first
        while not isinstance(rig.link.sent[-1], Hold) or rig.link.sent[-1].is_held:
            await anext(slow)
        rig.clock.ms += 50_000.0  # the watchdog's time starts here
        assert rig.client.health().ok
        rig.clock.ms += 20_000.0
        assert not rig.client.health().ok
        await slow.aclose()  # type: ignore[attr-defined]

    run(model, story)
