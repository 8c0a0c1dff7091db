"""GET /health/beats: beats beside a busy event loop, and changes of the health as they come."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire._native import BeatWriter
from quire.api.admin.beats import (
    MAX_READERS,
    BeatRoutes,
    EngineWatch,
    _event_of,
    _fields_of,
    _has_changed,
    _LoopWriter,
)
from quire.base.errors import OverloadedError
from quire.engine.model_card import Health

BEAT = b"3\r\n:\n\n\r\n"


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(30)
    return ours, theirs


def _read(reader: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        piece = reader.recv(num_bytes - len(found))
        assert piece
        found += piece
    return found


def _drain(reader: socket.socket) -> bytes:
    """Return all that has come, up to 64 KiB."""
    try:
        return reader.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_they_are_written_while_the_interpreter_lock_is_held() -> None:
    """By Python code they would be late where another thread computes, or waits with the lock."""
    beats, (ours, theirs) = BeatWriter(0.001, BEAT), _pair()
    beats.add(ours.fileno())
    assert _read(theirs, 3 * len(BEAT)) == 3 * BEAT
    theirs.setblocking(False)
    for _ in range(50):  # on a busy machine its thread may not run meanwhile
        _drain(theirs)
        ctypes.PyDLL(None).usleep(200_000)  # such calls keep the lock
        if _drain(theirs).count(BEAT) > 5:
            break
    else:
        pytest.fail("no beats while the lock was held")
    beats.remove(ours.fileno())
    for one in (ours, theirs):
        one.close()


def test_events_are_written_between_beats_and_removed_sockets_are_left_alone() -> None:
    beats, (ours, theirs), other = BeatWriter(0.001, BEAT), _pair(), _pair()
    beats.add(ours.fileno())
    assert _read(theirs, len(BEAT)) == BEAT
    beats.write(ours.fileno(), b"1\r\nx\r\n")
    found = b""
    while not found.endswith(b"x\r\n"):
        found += _read(theirs, 1)
    assert found.replace(BEAT, b"") == b"1\r\nx\r\n", "whole, and not within a beat"
    beats.remove(ours.fileno())
    beats.write(ours.fileno(), b"nothing")
    beats.remove(ours.fileno())
    assert len(beats) == 0
    theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            assert set(theirs.recv(len(BEAT))) <= set(BEAT)
    beats.add(other[0].fileno())  # the thread goes on
    assert _read(other[1], len(BEAT)) == BEAT
    del beats  # with a socket, and its thread ends
    for one in (ours, theirs, *other):
        one.close()


def test_a_reader_that_does_not_keep_up_misses_beats_and_one_that_has_left_is_forgotten() -> None:
    beats, slow, gone, good = BeatWriter(0.001, BEAT), _pair(), _pair(), _pair()
    try:
        while True:
            slow[0].send(b"." * 4096)
    except BlockingIOError:
        pass
    gone[1].close()
    for ours, _ in (slow, gone, good):
        beats.add(ours.fileno())
    assert _read(good[1], 20 * len(BEAT)) == 20 * BEAT
    assert len(beats) == 2
    beats.write(slow[0].fileno(), b"an event that has no room")
    assert len(beats) == 1, "it would have a part of an event"
    while piece := slow[1].recv(1 << 16):
        assert set(piece) == set(b"."), "nothing after what it had"
    for ours, theirs in (slow, gone, good):
        beats.remove(ours.fileno())
        ours.close()
        theirs.close()


def test_a_reader_that_comes_as_the_last_one_leaves_gets_beats_at_their_pace() -> None:
    beats, last, new = BeatWriter(60.0, BEAT), _pair(), _pair()
    beats.add(last[0].fileno())
    beats.remove(last[0].fileno())
    beats.add(new[0].fileno())
    new[1].settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        assert new[1].recv(100) == b"nothing so soon"
    assert len(beats) == 1
    for one in (*last, *new):
        one.close()


class _State:
    """A server's health, which a test changes."""

    def __init__(self) -> None:
        self.state: Any = "ready"

    def health(self) -> Health:
        return Health(
            ok=self.state == "ready", state=self.state, reason="", pending=0, steps_total=0
        )


def test_without_a_connection_of_its_own_the_event_loop_writes() -> None:
    """As under TLS and other servers; a change is written at once, and the end of a server ends
    it."""

    async def story() -> None:
        state, gone = _State(), asyncio.Event()
        sent = list[Any]()
        routes = BeatRoutes(state)  # type: ignore[arg-type]

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message.get("body", message.get("status")))
            if sent.count(b":\n\n") == 2 and state.state == "ready":
                state.state = "restarting"
            elif b"restarting" in str(sent[-1]).encode():
                state.state = "draining"

        serving = asyncio.ensure_future(routes.serve({"scheme": "https"}, receive, send))
        await asyncio.wait_for(serving, 30)
        events = [one for one in sent if one != b":\n\n"]
        assert events[0] == 200
        assert [
            b'"state":"%b"' % name in one
            for name, one in zip((b"ready", b"restarting", b"draining"), events[1:-1], strict=True)
        ] == [True] * 3
        assert events[-1] == b""
        state.state = "ready"
        serving = asyncio.ensure_future(routes.serve({}, receive, send))
        gone.set()
        await asyncio.wait_for(serving, 30)
        assert routes._num_readers == 0

    asyncio.run(story())


def test_a_reader_that_leaves_at_once_is_no_fault() -> None:
    """Its socket is closed before the thread could write to it."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.close()
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                gone.set()

        transport = SimpleNamespace(
            get_write_buffer_size=lambda: 0, get_extra_info=lambda name: ours
        )
        scope = {"scheme": "http", "http_version": "1.1", "quire.transport": transport}
        routes = BeatRoutes(_State())  # type: ignore[arg-type]
        await asyncio.wait_for(routes.serve(scope, receive, send), 30)
        assert routes._num_readers == 0
        assert isinstance(routes._writer(scope, send), _LoopWriter), "not noticed yet"

    asyncio.run(story())


def test_an_engine_is_silent_after_several_usual_gaps_and_not_while_the_loop_was_busy() -> None:
    watch, now_s, sent_s = EngineWatch(), 100.0, 100.0

    def look(later_s: float = 0.02, *, is_working: bool = True) -> bool:
        nonlocal now_s
        now_s += later_s
        silent_ms = round(1000 * (now_s - sent_s)) if is_working else 0
        health = Health(
            ok=True, state="ready", reason="", pending=1, steps_total=7, silent_ms=silent_ms
        )
        return watch.is_silent(health, now_s)

    for number in range(400):
        sent_s = now_s if number % 5 == 0 else sent_s
        assert not look()
    assert not look(1.5), "the loop was busy for so long and has read nothing"
    assert not look()
    sent_s = now_s
    late = [look() for _ in range(40)]
    assert late.index(True) in (30, 31), "0.6 s, and two looks"
    assert all(late[31:])
    sent_s = now_s
    assert not look()
    assert not any(look(is_working=False) for _ in range(200))
    sent_s = now_s
    assert not any(look() for _ in range(20))


def test_the_event_says_that_the_engine_is_silent_and_that_it_goes_on() -> None:
    health = Health(ok=True, state="ready", reason="", pending=1, steps_total=7, silent_ms=700)
    silent, again = (_fields_of(health, (), is_silent=one) for one in (True, False))
    assert _has_changed(again, silent)
    assert _has_changed(silent, again)
    assert not _has_changed(silent, {**silent, "silent_ms": 900, "reason": "more"})
    assert b'"silent_ms":700' in _event_of(silent)
    assert b"silent" not in _event_of(again)


def test_readers_are_bounded() -> None:
    async def story() -> None:
        routes = BeatRoutes(_State())  # type: ignore[arg-type]
        routes._num_readers = MAX_READERS
        request: Any = _Request()
        with pytest.raises(OverloadedError, match="read /health instead"):
            await routes.get(request)

    asyncio.run(story())
    assert threading.active_count() < 50


class _Request:
    method = "GET"

    def __init__(self) -> None:
        self.query_params: dict[str, str] = {}
        self.scope = {"query_string": b""}

    async def body(self) -> bytes:
        return b""
