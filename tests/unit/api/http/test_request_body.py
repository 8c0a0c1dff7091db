"""Bodies: what is accepted, and the errors of what is not."""

from __future__ import annotations

import asyncio

import pytest

from quire.api.http import request_io as gone
from quire.api.http.request_io import parse
from quire.base.errors import RequestError
from tests.cases import each_case
from tests.unit.api.fake_engine import Site

LIMIT = 1 << 20


def refused(raw: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse(raw, limit_bytes=LIMIT)
    return str(caught.value)


def test_an_object_is_read() -> None:
    assert parse('{"prompt": "Grüße 🌍", "n": 2}'.encode(), limit_bytes=LIMIT) == {
        "prompt": "Grüße 🌍",
        "n": 2,
    }


@each_case(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"[1]", "it is [1]; an object"),
        (b'"text"', 'it is "text"; an object'),
        (b"null", "it is null; an object"),
        (b"{", "not JSON"),
        (b'{"a": 1}{"b": 2}', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b'{"m": {"x": 1, "x": 1}}', "given twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": 1' + b"0" * 5_000 + b"}", "digits"),
        (b"[" * 10_000 + b"]" * 10_000, "nested"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "more than 64 levels"),
        (b'{"a":' + b'{"b":' * 500 + b"1" + b"}" * 501, "more than 64 levels"),
        (b'{"a": "x\ny"}', "not JSON"),
        (b"\xef\xbb\xbf{}", ""),
    ],
)
def test_invalid_json_is_rejected_with_a_reason(raw: bytes, words: str) -> None:
    assert words in refused(raw)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (rb'{"prompt": "\ud800"}', "prompt"),
        (rb'{"prompt": "\uDC00 tail"}', "prompt"),
        (rb'{"stop": ["fine", "\ud83d"]}', "stop"),
        (rb'{"messages": [{"content": [{"text": "\ud800\ud800"}]}]}', "messages"),
        (rb'{"metadata": {"\ud800": 1}}', "metadata"),
    ],
)
def test_lone_surrogates_are_rejected_with_the_field(raw: bytes, param: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        parse(raw, limit_bytes=LIMIT)
    assert caught.value.param == param


def test_a_key_with_a_lone_surrogate_is_shown_as_an_escape() -> None:
    assert "\\ud800" in refused(rb'{"\ud800": 1}')


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse(rb'{"prompt": "\ud83c\udf0d"}', limit_bytes=LIMIT) == {"prompt": "🌍"}


def test_a_body_beyond_the_limit_is_read_to_its_end_and_rejected_with_both_numbers() -> None:
    async def exchange() -> None:
        site = Site(max_body_bytes=2048)
        raw = b'{"prompt": "' + b"x" * 10_000 + b'"}'
        reply = await site.post("/v1/completions", raw, part_bytes=1000)
        assert reply.status == 413
        assert str(len(raw)) in reply.error["message"]
        assert "2048" in reply.error["message"]
        assert not site.engine.asked

    asyncio.run(exchange())


@each_case("length", [str(10**12), "9" * 5000])
def test_a_length_far_beyond_the_limit_is_rejected_before_it_is_read(length: str) -> None:
    async def exchange() -> None:
        site = Site()
        reply = await site.post("/v1/completions", b'{"pro', headers={"content-length": length})
        assert reply.status == 413
        assert len(reply.error["message"]) < 200

    asyncio.run(exchange())


def test_a_body_in_many_parts_is_joined() -> None:
    async def exchange() -> None:
        site = Site()
        reply = await site.post("/v1/completions", {"prompt": "abc"}, part_bytes=1)
        assert reply.status == 200
        assert site.engine.asked[0].prompt_ids == [97, 98, 99]

    asyncio.run(exchange())


def test_a_large_body_is_read_too() -> None:
    async def exchange() -> None:
        site = Site()
        body = {"prompt": "abc", "metadata": {"note": "x" * 300_000}}
        assert (await site.post("/v1/completions", body)).status == 200

    asyncio.run(exchange())


def test_a_disconnect_while_sending_is_no_error() -> None:
    async def exchange() -> None:
        site = Site()
        gone = asyncio.Event()
        gone.set()
        scope_reply = await site.call(
            "POST", "/v1/completions", b'{"prompt"', gone=gone, part_bytes=4, cut_short=True
        )
        assert scope_reply.status == 0
        assert site.metric("quire_disconnects_total") == 1

    asyncio.run(exchange())


@each_case("depth", [62, 64, 300, 970, 980, 990])
@each_case("padding", [0, 140_000])
def test_deeply_nested_values_are_a_client_error_in_any_thread(depth: int, padding: int) -> None:
    async def exchange() -> None:
        raw = b'{"prompt":"a","user":"' + b"x" * padding + b'","n":' + b"[" * depth + b"]" * depth
        reply = await Site().post("/v1/completions", raw + b"}")
        assert reply.status == 400

    asyncio.run(exchange())


@pytest.mark.parametrize("settings", [{"request_timeout_s": 0.01}, {}])
def test_a_body_that_does_not_arrive_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, float]
) -> None:
    if not settings:
        monkeypatch.setattr(gone, "BODY_TIME_S", 0.01)

    async def exchange() -> None:
        site = Site(**settings)
        reply = await site.call("POST", "/v1/completions", b'{"prompt"', cut_short=True)
        assert (reply.status, reply.error["code"]) == (504, "timeout")
        assert "body did not come" in reply.error["message"]

    asyncio.run(exchange())


def test_an_unfinished_body_does_not_delay_shutdown() -> None:
    async def exchange() -> None:
        site = Site()
        waiting = asyncio.create_task(
            site.call("POST", "/v1/completions", b'{"prompt"', cut_short=True)
        )
        await asyncio.sleep(0.01)
        site.server_state.lifecycle.drain()
        reply = await waiting
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        assert site.server_state.idle.is_set()

    asyncio.run(exchange())


def test_the_time_limit_includes_work_before_the_engine() -> None:
    async def exchange() -> None:
        site = Site(request_timeout_s=0.05)
        stuck = asyncio.Event()
        loop = asyncio.get_running_loop()

        def render(_: object, **settings: object) -> str:
            asyncio.run_coroutine_threadsafe(stuck.wait(), loop).result()
            return ""

        site.engine.template.render = render  # type: ignore[union-attr, method-assign]
        body = {"messages": [{"role": "user", "content": "a"}]}
        reply = await site.post("/v1/chat/completions", body)
        assert (reply.status, reply.error["code"]) == (504, "timeout")
        stuck.set()

    asyncio.run(exchange())


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity", "zstd"])
def test_a_compressed_body_is_rejected_without_decompression(encoding: str) -> None:
    async def exchange() -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/generate"):
            reply = await Site().post(path, {"prompt": "a"}, headers={"content-encoding": encoding})
            assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")
            assert "only identity" in reply.error["message"]
            assert reply.headers["accept-encoding"] == "identity"
        body, headers = {"prompt": "a"}, {"content-encoding": "identity"}
        assert (await Site().post("/v1/completions", body, headers=headers)).status == 200

    asyncio.run(exchange())
