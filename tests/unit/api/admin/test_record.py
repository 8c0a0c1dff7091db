"""GET /admin/record: what is recorded, what is not, and that requests notice nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.api.admin import record
from quire.api.app import build_app
from quire.api.generation import recorder
from quire.api.generation.recorder import Recorder, RecordingEngine
from quire.api.workers import sibling_workers
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base.errors import OverloadedError
from quire.obs.recording import VERSION, DroppedRequests
from tests.unit.api.fake_engine import FakeEngine, Reply, Site

COMPLETIONS = "/v1/completions"
PROMPT = list(range(1, 41))
ASKED = {"prompt": PROMPT, "max_tokens": 4, "seed": 5, "stop": ["SECRET"]}


class Recording:
    """A recording of a site that was started; its lines so far, read by `end`."""

    def __init__(self, site: Site, query: bytes = b"") -> None:
        self._gone = asyncio.Event()
        self._begun = asyncio.Event()
        self._reply = asyncio.ensure_future(
            site.call(
                "GET", "/admin/record", b"", query=query, gone=self._gone, on_part=self._on_part
            )
        )

    async def _on_part(self, part: bytes) -> None:
        self._begun.set()

    async def begun(self) -> Recording:
        waiting = asyncio.ensure_future(self._begun.wait())
        await asyncio.wait({waiting, self._reply}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        return self

    async def end(self, *, leave: bool = True) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        if leave:
            self._gone.set()
        reply = await self._reply
        assert reply.status == 200
        return [json.loads(line) for line in reply.body.splitlines() if line]


def run(story: Callable[[Site], Awaitable[Any]], **settings: Any) -> Any:
    async def play() -> Any:
        return await asyncio.wait_for(story(Site(FakeEngine(), **settings)), 30)

    return asyncio.run(play())


def test_lengths_times_and_parameters_are_recorded_and_no_text() -> None:
    async def story(site: Site) -> list[dict[str, Any]]:
        recording = await Recording(site).begun()
        await site.post(COMPLETIONS, ASKED)
        await site.post(COMPLETIONS, {**ASKED, "prompt": [*PROMPT[:16], *PROMPT], "n": 2})
        return await recording.end()

    header, first, second = run(story)
    assert header["quire_recording"] == VERSION
    assert (header["model"], header["content"], header["block_tokens"]) == ("fake", False, 16)
    assert first["prompt_tokens"] == 40
    assert first["output_tokens"] == [2]
    assert first["finish_reasons"] == ["stop"]
    assert (first["ttft_ms"], first["total_ms"]) == (2.0, 10.0)
    assert first["sampling"] == {"seed": 5, "max_tokens": 4}
    assert not {"prompt_ids", "output_ids"} & first.keys()
    assert second["arrival_ms"] >= first["arrival_ms"]
    assert second["output_tokens"] == [2, 2]
    assert len(first["block_ids"]) == 2
    assert len(second["block_ids"]) == 3
    assert first["block_ids"][0] == second["block_ids"][0]
    assert first["block_ids"][1] != second["block_ids"][1]


def test_digests_differ_by_recording_and_by_salt() -> None:
    async def story(site: Site) -> list[Any]:
        ids = []
        for salt in ("", "", "pepper"):
            recording = await Recording(site).begun()
            await site.post(COMPLETIONS, {**ASKED, "cache_salt": salt})
            ids.append((await recording.end())[1]["block_ids"])
        return ids

    first, again, _ = run(story)
    assert first != again
    one = Recorder(key=b"k", block_tokens=16, content=False)
    assert one.block_ids(PROMPT, "") != one.block_ids(PROMPT, "pepper")
    assert one.block_ids(PROMPT, "") == one.block_ids(PROMPT[:33], "")


def test_content_is_recorded_only_where_the_operator_allows_it() -> None:
    async def story(site: Site) -> Any:
        recording = await Recording(site, b"content=true").begun()
        await site.post(COMPLETIONS, ASKED)
        return await recording.end()

    header, request = run(story, record_content=True)
    assert header["content"] is True
    assert request["prompt_ids"] == PROMPT
    assert request["output_ids"] == [[0, 1]]
    assert request["sampling"]["stop"] == ["SECRET"]

    async def refused(site: Site) -> Reply:
        return await site.get("/admin/record", query=b"content=true")

    reply = run(refused)
    assert reply.status == 400
    assert "--record-content" in reply.error["message"]


@pytest.mark.parametrize(
    "query", [b"content=yes", b"seconds=0", b"seconds=nan", b"seconds=x", b"more=1"]
)
def test_wrong_options_are_refused(query: bytes) -> None:
    async def story(site: Site) -> Reply:
        return await site.get("/admin/record", query=query)

    assert run(story).status == 400


def test_a_disconnected_request_is_recorded_with_what_its_client_received() -> None:
    async def story(site: Site) -> list[dict[str, Any]]:
        recording = await Recording(site).begun()
        gone = asyncio.Event()
        asked = {**ASKED, "stream": True}

        async def leave(_: bytes) -> None:
            gone.set()

        site.engine.pause = asyncio.Event().wait
        await site.post(COMPLETIONS, asked, gone=gone, on_part=leave)
        return await recording.end()

    _, request = run(story)
    assert request["finish_reasons"] == ["abort"]
    assert request["output_tokens"] == [1]


def test_requests_pay_nothing_when_nothing_is_recorded() -> None:
    async def story(site: Site) -> None:
        state = site.server_state
        assert state.engine() is site.engine
        recordings = [await Recording(site).begun() for _ in range(2)]
        assert isinstance(state.engine(), RecordingEngine)
        assert state.loaded_engine is site.engine
        assert len(await recordings[0].end()) == 1
        assert isinstance(state.engine(), RecordingEngine)
        await recordings[1].end()
        assert state.engine() is site.engine

    run(story)


def test_a_refused_request_is_not_recorded_and_its_error_stays() -> None:
    async def story(site: Site) -> Any:
        recording = await Recording(site).begun()
        reply = await site.post(COMPLETIONS, {**ASKED, "temperature": -1})
        return reply.status, await recording.end()

    status, lines = run(story)
    assert (status, len(lines)) == (400, 1)


def test_a_recording_of_some_seconds_waits_for_the_requests_of_that_time() -> None:
    def stopped(site: Site) -> bool:
        return all(one._is_stopped for one in site.server_state.recorders)

    async def story(site: Site) -> Any:
        recording = await Recording(site, b"seconds=0.01").begun()
        more = asyncio.Event()
        site.engine.pause = more.wait
        answer = asyncio.ensure_future(site.post(COMPLETIONS, ASKED))
        while not stopped(site):
            await asyncio.sleep(0.001)
        late = asyncio.ensure_future(site.post(COMPLETIONS, {**ASKED, "prompt": [1]}))
        await asyncio.sleep(0)
        more.set()
        await asyncio.gather(answer, late)
        return await recording.end(leave=False)

    lines = run(story)
    assert [line.get("prompt_tokens") for line in lines] == [None, 40]


def test_a_slow_reader_loses_requests_and_delays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_PENDING_BYTES", 300)

    async def story(site: Site) -> Any:
        one = Recorder(key=b"k", block_tokens=16, content=False)
        site.server_state.recorders.add(one)
        site.server_state.serve_through(RecordingEngine(site.engine, {one}))  # type: ignore[arg-type]
        for _ in range(4):
            assert (await site.post(COMPLETIONS, ASKED)).status == 200
        one.stop()
        return [json.loads(line) async for part in one.lines() for line in part.splitlines()]

    lines = run(story)
    assert lines[-1] == {"dropped": 3}
    assert len(lines) == 2


def test_the_number_of_recordings_is_limited() -> None:
    async def story(site: Site) -> int:
        recordings = [await Recording(site).begun() for _ in range(4)]
        status = (await site.get("/admin/record")).status
        for recording in recordings:
            await recording.end()
        return status

    assert run(story) == 503


def test_a_stopping_server_ends_its_recordings() -> None:
    async def story(site: Site) -> list[dict[str, Any]]:
        recording = await Recording(site).begun()
        site.server_state.lifecycle.drain()
        return await recording.end(leave=False)

    assert len(run(story)) == 1


def test_an_ended_recording_keeps_nothing_while_its_requests_go_on() -> None:
    async def story(site: Site) -> None:
        stopping = site.server_state.lifecycle.stopping
        before = len(stopping._callbacks or ())  # type: ignore[attr-defined]
        recording = await Recording(site).begun()
        (recorder,) = site.server_state.recorders
        more = asyncio.Event()
        site.engine.pause = more.wait
        answer = asyncio.ensure_future(site.post(COMPLETIONS, ASKED))
        while not recorder._num_open:
            await asyncio.sleep(0)
        await recording.end()
        more.set()
        assert (await answer).status == 200
        assert recorder._num_open == 0
        assert not recorder._lines
        assert len(stopping._callbacks or ()) == before  # type: ignore[attr-defined]

    run(story)


def test_a_request_of_a_full_queue_is_counted_and_one_that_failed_later_is_an_error() -> None:
    async def story(site: Site) -> list[dict[str, Any]]:
        async def fail() -> None:
            raise OverloadedError("the queue is full")

        recording = await Recording(site).begun()
        site.engine.pause = fail
        generate = site.engine.generate

        async def refuse(*_: Any, **__: Any) -> Any:
            raise OverloadedError("the queue is full")
            yield

        await site.post(COMPLETIONS, ASKED)
        site.engine.generate = refuse  # type: ignore[method-assign]
        await site.post(COMPLETIONS, ASKED)
        site.engine.generate = generate  # type: ignore[method-assign]
        return await recording.end()

    _, *lines = run(story)
    assert {"dropped": 1} in lines
    assert [line["finish_reasons"] for line in lines if "dropped" not in line] == [["error"]]


# ---- several API processes

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
END = b"0\r\n\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run_with_sibling(
    folder: Path, answer: Answer, story: Callable[[Site], Awaitable[Any]], *, processes: int = 2
) -> Any:
    """Run a script against a process with a sibling that answers requests for recordings."""

    answers: set[asyncio.Task[Any] | None] = set()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers.add(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        with suppress(OSError):  # the other end has closed first
            await answer(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def of_both(site: Site) -> Any:
        site.app = build_app(site.server_state, SiblingWorkers(folder, 1))
        async with await asyncio.start_unix_server(answered, folder / "peer.2"):
            result = await story(site)
            await asyncio.gather(*filter(None, answers))
        return result

    return run(of_both, api_processes=processes)


async def never(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()  # until the other end closes


async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(REFUSAL)


async def record_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + END)


@pytest.mark.parametrize(
    ("answer", "processes", "reason"),
    [
        (refuse, 2, "its response has status 503"),
        (never, 2, "TimeoutError"),
        (record_nothing, 3, "1 of 2 other API processes are ready"),
    ],
)
def test_without_every_process_there_is_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, processes: int, reason: str
) -> None:
    if answer is never:
        monkeypatch.setattr(sibling_workers, "_ANSWER_S", 0.05)

    async def story(site: Site) -> None:
        reply = await site.get("/admin/record")
        assert reply.status == 503
        assert reason in reply.error["message"]
        assert not site.server_state.recorders
        assert site.server_state.engine() is site.engine

    run_with_sibling(tmp_path, answer, story, processes=processes)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_recording_breaks_off_when_another_process_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    monkeypatch.setattr(record, "IDLE_S", 0.05)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"3\r\n{}\n\r\n")
        if is_silent:
            await never(reader, writer)

    async def story(site: Site) -> None:
        reply = await site.get("/admin/record")
        assert reply.status == 200
        assert not reply.complete
        assert b"\n{}\n" in reply.body
        assert "a recording was broken off" in site.log.getvalue()
        assert not site.server_state.recorders

    run_with_sibling(tmp_path, answer, story)


def test_recordings_that_wait_for_another_process_count_against_the_limit(tmp_path: Path) -> None:
    limit, go_on = record.MAX_RECORDERS, asyncio.Event()
    num_waiting = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == limit:
            go_on.set()
        await go_on.wait()
        await record_nothing(reader, writer)

    async def story(site: Site) -> None:
        recordings = [Recording(site) for _ in range(limit + 1)]
        for recording in recordings:
            await recording.begun()
        *first, last = recordings
        assert (await last._reply).status == 503
        for recording in first:
            assert len(await recording.end()) == 1

    run_with_sibling(tmp_path, answer, story)


def test_a_slow_reader_leaves_the_lines_where_they_are_counted(tmp_path: Path) -> None:
    """One line is being written, one is queued, and one waits for the queue."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await never(reader, writer)

    async def story(site: Site) -> None:
        reads = asyncio.Event()
        call = site.call("GET", "/admin/record", b"", gone=asyncio.Event(), on_part=block(reads))
        reply = asyncio.ensure_future(call)
        while not site.server_state.recorders:
            await asyncio.sleep(0)
        (one,) = site.server_state.recorders
        for _ in range(8):
            await site.post(COMPLETIONS, ASKED)
            for _ in range(20):  # whatever takes the line has taken it
                await asyncio.sleep(0)
        assert len(one._lines) >= 8 - 3
        assert one._pending_bytes == sum(map(len, one._lines))
        reply.cancel()
        await asyncio.gather(reply, return_exceptions=True)

    def block(reads: asyncio.Event) -> Callable[[bytes], Awaitable[None]]:
        async def on_part(part: bytes) -> None:
            if b"prompt_tokens" in part:
                await reads.wait()

        return on_part

    run_with_sibling(tmp_path, answer, story)


# ---- sizes


def test_lines_are_read_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_PART_BYTES", 200)

    async def story(site: Site) -> None:
        one = Recorder(key=b"k", block_tokens=16, content=False)
        site.server_state.recorders.add(one)
        site.server_state.serve_through(RecordingEngine(site.engine, {one}))  # type: ignore[arg-type]
        for _ in range(4):
            await site.post(COMPLETIONS, ASKED)
        one.stop()
        parts = [part async for part in one.lines()]
        assert [part.count(b"\n") for part in parts] == [1, 1, 1, 1]
        assert one._pending_bytes == 0

    run(story)


def test_lines_of_long_requests_are_made_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MAX_INLINE_TOKENS", len(PROMPT) + 1)
    threads: list[bool] = []
    block_ids = Recorder.block_ids

    def noted(self: Recorder, *given: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return block_ids(self, *given)

    monkeypatch.setattr(Recorder, "block_ids", noted)

    async def story(site: Site) -> list[dict[str, Any]]:
        recording = await Recording(site, b"seconds=0.01").begun()
        await site.post(COMPLETIONS, ASKED)
        await site.post(COMPLETIONS, {**ASKED, "prompt": PROMPT[:8]})
        return await recording.end(leave=False)

    lines = run(story)
    assert sorted(threads) == [False, True]
    assert {line["prompt_tokens"] for line in lines[1:]} == {40, 8}


def test_long_lines_that_are_being_made_count_as_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_INLINE_TOKENS", 1)
    monkeypatch.setattr(recorder, "MAX_PENDING_BYTES", 600)

    async def story() -> list[dict[str, Any]]:
        one = Recorder(key=b"k", block_tokens=16, content=False)
        for _ in range(2):
            assert one.begin()
            one.end(lambda: DroppedRequests(dropped=7), num_tokens=40)
        one.stop()
        return [json.loads(line) async for part in one.lines() for line in part.splitlines()]

    lines = asyncio.run(story())
    assert sorted(line["dropped"] for line in lines) == [1, 7]
