"""The front-end benchmark rejects wrong results: it counts events and texts, never times."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature

import numpy as np
import pytest

from bench.frontend import null_server
from bench.frontend.__main__ import check
from bench.frontend.client import text_of
from bench.frontend.null_executor import (
    FIRST_ID,
    NUM_IDS,
    NullExecutor,
    NullExecutorClass,
    token_at,
)
from bench.frontend.peers import check_peer
from bench.frontend.servers import cpu_s
from bench.peers.child import PeerFailed
from bench.soak.callers import Broken, streamed_text, whole_text
from quire.engine.assembly import sized_model
from quire.engine.process import main as process
from quire.execute.executor import Executor, ExecutorClass

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def _event(text: str) -> bytes:
    return b'id: r:1\ndata: {"choices":[{"text":"%b"}]}\n\n' % text.encode()


@pytest.mark.parametrize(
    ("made", "wanted"), [(NullExecutorClass, ExecutorClass), (NullExecutor, Executor)]
)
def test_the_null_executor_has_the_executor_interface(made: type, wanted: type) -> None:
    asked = {name for name in vars(wanted) if callable(vars(wanted)[name]) and name[0] != "_"}
    assert asked
    assert asked <= {name for name in vars(made) if callable(vars(made)[name])}


def test_the_null_server_replaces_what_the_engine_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replaced function takes what the start of an engine gives it."""
    wanted = signature(sized_model.choose_executor_class)
    monkeypatch.setattr(sized_model, "choose_executor_class", None)
    monkeypatch.setattr(process, "main", lambda: 0)
    assert null_server.child_main("quire.engine.process.main", 1.0) == 0
    arguments = wanted.parameters.values()
    assert isinstance(sized_model.choose_executor_class(*arguments), NullExecutorClass)


def test_events_are_counted_however_chunks_are_divided() -> None:
    whole = _event("a") + _event("b") + b"data: [DONE]\n\n"
    for cut in range(1, len(whole)):
        raw = _chunked(whole[:cut], whole[cut:])
        assert text_of(raw) == ("ab", 2)
        assert streamed_text(raw) == "ab"


@pytest.mark.parametrize(
    "raw",
    [
        _chunked(_event("a")),
        _chunked(_event("a"), b'data: {"error":{}}\n\n', b"data: [DONE]\n\n"),
        b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_an_incomplete_failed_or_rejected_stream_is_no_answer(raw: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        text_of(raw)
    with pytest.raises((Broken, LookupError)):
        streamed_text(raw)


def test_a_whole_answer_has_its_text() -> None:
    body = b'{"choices":[{"text":"ab"}]}'
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    assert text_of(raw) == ("ab", 0)
    assert whole_text(raw) == "ab"


@pytest.mark.parametrize(
    "told",
    [
        {"answers": 1, "events": {"3": 1}, "digests": {"x": 1}},
        {"answers": 2, "events": {"3": 1, "2": 1}, "digests": {"x": 2}},
        {"answers": 2, "events": {"3": 2}, "digests": {"x": 1, "y": 1}},
    ],
)
def test_a_wrong_count_or_text_is_not_reported(told: dict[str, object]) -> None:
    with pytest.raises(SystemExit):
        check(told, answers=2, events=3, digest="x")
    check({"answers": 2, "events": {"3": 2}, "digests": {"x": 2}}, answers=2, events=3, digest="x")


@pytest.mark.parametrize("events", [{"10": 2}, {"9": 1, "10": 1}])
def test_a_peer_may_send_parts_of_a_character_together(events: dict[str, int]) -> None:
    check_peer({"answers": 2, "events": events}, answers=2, tokens=10)


@pytest.mark.parametrize(
    "came",
    [
        {"answers": 1, "events": {"10": 1}},
        {"answers": 2, "events": {"10": 1, "8": 1}},
        {"answers": 2, "events": {"10": 1, "11": 1}},
    ],
)
def test_a_peer_with_incomplete_answers_is_not_reported(came: dict[str, object]) -> None:
    with pytest.raises(PeerFailed):
        check_peer(came, answers=2, tokens=10)


def test_processor_time_includes_all_descendants() -> None:
    inner = "import sys; print(flush=True); sys.stdin.read()"
    start = f"[sys.executable, '-c', {inner!r}]"
    outer = f"import subprocess, sys; subprocess.run({start})"
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the inner one runs
        assert len(cpu_s(process.pid)) == 2
        process.communicate()


def test_the_null_executors_tokens_are_in_its_range() -> None:
    ids = np.array([token_at(position) for position in range(2000)])
    assert ids.min() >= FIRST_ID
    assert ids.max() < FIRST_ID + NUM_IDS
    assert (ids[1:] != ids[:-1]).all()
