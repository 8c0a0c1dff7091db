"""Discovery, what requests ask for, the breaker, settings: which replica may get a request."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.router.breaker import CircuitBreaker, RetryBudget
from quire.router.discovery import WatchedFile
from quire.router.event_blocks import CursorComment, EventBlocks
from quire.router.routed_request import RoutedRequest
from quire.router.settings import RouterSettings
from tests.cases import each_case

# ---- discovery

SETTLE_S = 0.5


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 7.0

    def __call__(self) -> float:
        return self.now_s


def _watched(path: Path, said: io.StringIO, clock: Clock) -> WatchedFile:
    return WatchedFile(path, Log("router", said), SETTLE_S, clock)


def test_a_watched_file_is_followed_and_bad_versions_are_ignored(tmp_path: Path) -> None:
    path, said, clock = tmp_path / "replicas", io.StringIO(), Clock()
    path.write_text("# two\nhttp://a:1\n\nhttp://b:2\nhttp://a:1\n")
    watched = _watched(path, said, clock)
    assert [one.shown for one in watched.poll()] == ["http://a:1", "http://b:2"]
    for bad, why in (
        (b"http://a:1\nhttp://b", "half-written"),
        (b"", "names no replica"),
        (b"http://a:1\nftp://b:2\n", "line 2"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"# " + b"x" * (1 << 20) + b"\n", "bytes"),
        (b"http://a:99999\n", "line 1"),
        (bytes(20) + b"\nhttp://a:1\n", "line 1"),  # blocks of a disk that were never written
        (b"http://a:1\nhttp://b :2\n", "line 2"),
        ("".join(f"http://a:{at}\n" for at in range(1, 1100)).encode(), "at most 1024"),
    ):
        path.write_bytes(bad)
        os.utime(path, ns=(len(said.getvalue()), 7))
        assert [one.shown for one in watched.poll()] == ["http://a:1", "http://b:2"]
        lines = said.getvalue()
        assert why in lines.splitlines()[-1]
        watched.poll()
        assert said.getvalue() == lines, "each version is reported once"
    path.unlink()
    assert len(watched.poll()) == 2
    path.write_text("http://c:3\n")
    watched.poll()
    clock.now_s += SETTLE_S
    assert [one.shown for one in watched.poll()] == ["http://c:3"]


def test_a_file_that_is_written_line_by_line_loses_no_replica(tmp_path: Path) -> None:
    path, said, clock = tmp_path / "replicas", io.StringIO(), Clock()
    path.write_text("a:1\nb:2\nc:3\n")
    watched = _watched(path, said, clock)

    def written(text: str) -> str:
        with path.open("w" if not text else "a") as file:
            file.write(text)
        clock.now_s += SETTLE_S
        return ",".join(one.host for one in watched.poll())

    for text in ("", "a:1\n", "b:2\n", "", "b:2\n", "a:1\nc:3\n"):
        assert written(text) == ("b,a,c" if "c" in text else "a,b,c")
    assert written("d:4\n") == "b,a,c,d", "more replicas at once"
    assert "ignored" in said.getvalue(), "the empty file"
    assert written("") == "b,a,c,d"
    assert written("d:4\n") == "b,a,c,d"
    clock.now_s += SETTLE_S
    assert ",".join(one.host for one in watched.poll()) == "d", "fewer, as it stays"
    assert said.getvalue().count("replicas file read") == 3
    for text in ("", "e:5\n"):  # in the place of another
        assert written(text) == "d"
    clock.now_s += SETTLE_S
    assert ",".join(one.host for one in watched.poll()) == "e"
    path.unlink()
    assert ",".join(one.host for one in watched.poll()) == "e"


def test_polls_that_follow_at_once_are_not_taken_for_a_file_that_stays(tmp_path: Path) -> None:
    """After a failure of a replica, the next poll comes after 20 ms."""
    path, said, clock = tmp_path / "replicas", io.StringIO(), Clock()
    path.write_text("a:1\nb:2\n")
    watched = _watched(path, said, clock)
    path.write_text("a:1\n")
    for _ in range(20):
        assert len(watched.poll()) == 2
        clock.now_s += SETTLE_S / 21
    path.write_text("b:2\n")
    assert len(watched.poll()) == 2
    clock.now_s += SETTLE_S / 21
    assert len(watched.poll()) == 2, "it has become another one"
    clock.now_s += SETTLE_S
    assert [one.host for one in watched.poll()] == ["b"]


def test_a_file_that_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="replicas-file"):
        _watched(tmp_path / "none", io.StringIO(), Clock())


# ---- what requests ask for


@each_case(
    ("fields", "why"),
    [
        ({"prompt": "a"}, ""),
        ({"prompt": ["a"]}, ""),
        ({"prompt": [1, 2, 3]}, ""),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": ["a", "b"], "n": 3, "best_of": 3}, ""),
        ({"prompt": "a", "n": 1, "best_of": None}, ""),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "n_cmpl": 1}, ""),
        ({"prompt": "a", "num_return_sequences": 2}, ""),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "stream_options": 5}, "stream_options"),
        ({"prompt": "a", "stream_options": {"resumable": True}}, ""),
        ({"prompt": "a", "output_ids": ["x"]}, "output_ids"),
        ({"prompt": "a", "output_ids": [[1], ["x"]]}, "output_ids"),
        ({"prompt": "a", "output_ids": [[1], 2]}, "output_ids"),
        ({"prompt": "a", "output_ids": [[1], []]}, ""),
    ],
)
def test_which_streams_can_be_continued(fields: dict[str, object], why: str) -> None:
    request = RoutedRequest("/v1/completions", [], json.dumps({"stream": True, **fields}).encode())
    assert bool(request.why_not) == bool(why)
    assert why in request.why_not
    again = json.loads(request.body())
    assert ("seed" in again) == (not why)


@each_case(
    ("path", "fields", "options"),
    [
        ("/v1/completions", {"prompt": "a"}, {"include_output_ids": True, "include_usage": True}),
        ("/generate", {"prompt": "a"}, {"include_output_ids": True, "include_usage": True}),
        ("/v1/completions", {"prompt": "a", "echo": True}, {"include_usage": True}),
        ("/v1/completions", {"stream": False}, {"resumable": True, "include_usage": True}),
        ("/v1/messages", {}, {"resumable": True, "include_usage": True}),
    ],
)
def test_no_stream_is_resumable_by_its_client(
    path: str, fields: dict[str, object], options: dict[str, object]
) -> None:
    """Where it can be left out it is; other routes refuse it."""
    asked = {"resumable": True, "include_usage": True}
    body = {"stream": True, "stream_options": asked, **fields}
    request = RoutedRequest(path, [], json.dumps(body).encode())
    assert json.loads(request.body())["stream_options"] == options


def test_deltas_do_not_depend_on_how_bytes_are_cut() -> None:
    stream = (
        b'id: a:1\ndata: {"x":1}\n\n: {"output_ids":[1],"output_cursor":"g:1:1:0"}\n\n'
        b': \n\ndata: {"text":"data: {\\"error\\":1}"}\n\ndata: {"y":2}\n\n'
        b': {"output_ids":[2,3],"output_cursor":"g:1:2:1"}\n\ndata: {"z":3}\n\ndata: [DONE]\n\n'
        b': {"ended":null}\n\n'
    )
    whole = EventBlocks().push(stream)
    assert [delta.is_last for delta in whole] == [False, False, False, True]
    assert whole[2].blocks.count(b"\n\n") == 2
    assert b"".join(one.blocks for one in whole).count(b"data: ") == 5 + 1
    for size in (1, 2, 3, 7, 50):
        blocks = EventBlocks()
        found = []
        for at in range(0, len(stream), size):
            found += blocks.push(stream[at : at + size])
        assert found == whole


def test_deltas_that_come_together_are_one_and_others_stay_between_them() -> None:
    def delta(first: int, more: bytes = b"") -> bytes:
        cursor = b'"output_cursor":"g:1:%d:0"' % first
        return b'data: {"x":%d}\n\n: {"output_ids":[%d],%b%b}\n\n' % (first, first, cursor, more)

    start = delta(1, b',"seed":7,"prompt_tokens":3')
    found = EventBlocks().push(start + delta(2) + delta(3) + b": \n\n" + delta(4) + b"data: {}\n\n")
    cursors = [one.cursor for one in found]
    assert cursors[0] == CursorComment([1, 2, 3], "g:1:3:0", 7, 3)
    assert cursors[1:] == [None, CursorComment([4], "g:1:4:0")]
    events = [one.blocks for one in found]
    assert events[0] == b"".join(b'data: {"x":%d}\n\n' % one for one in (1, 2, 3))
    assert events[1:] == [b": \n\n", b'data: {"x":4}\n\n']
    error = b'data: {"error":{}}\n\n: {"ended":"device_lost"}\n\n'
    found = EventBlocks().push(delta(1) + delta(2) + error)
    assert [one.error for one in found] == ["", "device_lost"]
    assert found[0].cursor == CursorComment([1, 2], "g:1:2:0")


# ---- breaker and budget


def test_a_breaker_opens_after_three_failures_and_lets_one_request_try() -> None:
    breaker = CircuitBreaker()
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.began()
    assert not breaker.allows(1.0), "one at a time"
    breaker.failed(1.0)
    assert not breaker.allows(2.9)
    assert breaker.allows(3.0)
    breaker.began()
    breaker.succeeded()
    assert breaker.allows(3.0)


def test_a_breaker_lets_others_in_once_the_request_that_tries_has_output() -> None:
    breaker = CircuitBreaker()
    for _ in range(3):
        breaker.failed(0.0)
    assert not CircuitBreaker().gave_output()
    breaker.began()
    assert breaker.gave_output()
    assert breaker.allows(1.0)
    breaker.failed(1.0)
    assert not breaker.allows(2.9), "it opens again for longer: no request has ended well"
    assert breaker.allows(3.0)


def test_a_replica_that_was_away_is_tried_at_once_by_one_request() -> None:
    breaker = CircuitBreaker()
    for now_s in (0.0, 0.0, 0.0, 1.0, 3.0):
        breaker.failed(now_s)
    assert not breaker.allows(6.9)
    breaker.returned()
    assert breaker.allows(4.0)
    breaker.began()
    assert not breaker.allows(4.0)
    breaker.failed(4.0)
    assert breaker.allows(5.0), "the times begin anew"


def test_a_retry_budget_is_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.25)
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(4):
        budget.requested()
    assert [budget.take(), budget.take()] == [True, False]


def test_settings_name_what_is_wrong() -> None:
    for wrong, words in (
        ({"policy": "best"}, "--policy"),
        ({"stall_s": 0.5, "probe_s": 0.4}, "--stall-seconds"),
        ({"connect_s": 0.0}, "connect_s"),
        ({"max_open": 0}, "max_open"),
        ({"resume_s": float("nan")}, "resume_s"),
    ):
        with pytest.raises(SettingError, match=words):
            RouterSettings(**wrong)  # type: ignore[arg-type]
