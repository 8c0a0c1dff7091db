"""Answers: bodies, streams, errors midway, clients that disconnect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.base.errors import (
    ContextTooLong,
    OverloadedError,
    WorkerError,
)
from quire.base.records import TOO_FEW_SEQUENCES, FinishReason
from tests.cases import each_case
from tests.unit.api.fake_engine import FakeEngine, Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def test_a_completion_has_openais_shape() -> None:
    async def exchange() -> None:
        site = Site()
        reply = await site.post(COMPLETIONS, {"model": "fake", "prompt": "abc", "seed": 5})
        body = reply.json
        assert body.pop("id").startswith("cmpl-")
        assert body.pop("created") > 1_700_000_000
        assert reply.headers["x-request-id"].startswith("cmpl-")
        assert body == {
            "object": "text_completion",
            "model": "fake",
            "system_fingerprint": "fp_fake",
            "choices": [
                {
                    "index": 0,
                    "text": "Hello",
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": "END",
                    "seed": 5,
                    "prompt_logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "kv_transfer_params": None,
        }

    asyncio.run(exchange())


def test_a_chat_has_openais_shape() -> None:
    async def exchange() -> None:
        body = (await Site().post(CHAT, {"messages": MESSAGES, "logprobs": True})).json
        assert body["object"] == "chat.completion"
        choice = body["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hello",
            "refusal": None,
            "reasoning_content": None,
            "reasoning": None,
        }
        assert choice["finish_reason"] == "stop"
        assert 0 <= choice["seed"] < 2**53
        token = choice["logprobs"]["content"][0]
        assert (token["token"], token["logprob"]) == ("Hel", -0.5)
        assert token["bytes"] == list(b"Hel")
        assert token["top_logprobs"][1] == {
            "token": "no",
            "logprob": -9999.0,
            "bytes": [110, 255],
        }

    asyncio.run(exchange())


def test_completion_logprobs_hold_the_best_and_the_chosen_token() -> None:
    async def exchange() -> None:
        body = {"prompt": "abc", "logprobs": 2}
        logprobs = (await Site().post(COMPLETIONS, body)).json["choices"][0]["logprobs"]
        assert logprobs == {
            "tokens": ["Hel", "lo"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [
                {"Hel": -0.5, "bytes:\\x6e\\xff": -9999.0},
                {"lo": -0.5, "bytes:\\x6e\\xff": -9999.0},
            ],
            "text_offset": [0, 3],
        }

    asyncio.run(exchange())


def test_a_streamed_completion_is_chunks_then_done() -> None:
    async def exchange() -> None:
        site = Site()
        body = {"prompt": "abc", "stream": True, "logprobs": 0, "seed": 5}
        reply = await site.post(COMPLETIONS, body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.complete
        *chunks, done = reply.events
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["text"] for choice in choices] == ["Hel", "lo"]
        assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
        assert choices[1]["logprobs"]["text_offset"] == [3]
        assert choices[1]["seed"] == 5
        assert all("usage" not in chunk for chunk in chunks)
        assert len({chunk["id"] for chunk in chunks}) == 1

    asyncio.run(exchange())


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_finish_reason() -> None:
    async def exchange() -> None:
        body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = (await Site().post(CHAT, body)).events
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        assert [delta.get("content") for delta in deltas] == ["", "Hel", "lo", None]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None, None, None, "stop"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2

    asyncio.run(exchange())


def test_choices_are_numbered_prompt_by_prompt() -> None:
    async def exchange() -> None:
        site = Site()
        body = {"prompt": ["a", "bb"], "n": 2, "echo": True}
        whole = (await site.post(COMPLETIONS, body)).json
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in whole["choices"]]
        assert texts == ["aHello", "aHello", "bbHello", "bbHello"]
        assert whole["usage"]["prompt_tokens"] == 3
        assert whole["usage"]["completion_tokens"] == 8
        streamed = (await site.post(COMPLETIONS, {**body, "stream": True})).events[:-1]
        joined = dict.fromkeys(range(4), "")
        for chunk in streamed:
            joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert list(joined.values()) == texts

    asyncio.run(exchange())


def test_several_prompts_run_at_once() -> None:
    async def exchange() -> None:
        site = Site()
        all_began = asyncio.Event()
        site.engine.pause = all_began.wait
        body = {"prompt": ["a", "b", "c"]}
        task = asyncio.ensure_future(site.post(COMPLETIONS, body))
        await until(lambda: len(site.engine.asked) == 3)
        all_began.set()
        assert (await task).status == 200

    asyncio.run(exchange())


def test_many_prompts_with_more_output_than_is_read_are_all_answered() -> None:
    async def exchange() -> None:
        site = Site(FakeEngine(*("ab" for _ in range(40))))
        reply = await site.post(COMPLETIONS, {"prompt": ["x"] * 50})
        assert [choice["text"] for choice in reply.json["choices"]] == ["ab" * 40] * 50

    asyncio.run(exchange())


@each_case("stream", [False, True])
@each_case("prompt", ["a", ["a", "b"]])
@each_case(
    ("error", "status"),
    [
        (ContextTooLong("too long", param="prompt"), 400),
        (OverloadedError("the queue is full"), 503),
        (WorkerError("the engine died"), 500),
        (ValueError("a bug"), 500),
    ],
)
def test_an_engine_error_before_output_is_a_status_streamed_or_not(
    error: Exception, status: int, prompt: Any, stream: bool
) -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.fails_with = error
        reply = await site.post(COMPLETIONS, {"prompt": prompt, "stream": stream})
        assert reply.status == status
        assert set(reply.error) == {"message", "type", "param", "code"}
        kind = "QuireError" if isinstance(error, ValueError) else type(error).__name__
        assert site.metric(f'quire_errors_total{{kind="{kind}"}}') == 1
        site.engine.fails_with = None
        assert (await site.post(COMPLETIONS, {"prompt": "b"})).status == 200

    asyncio.run(exchange())


def test_a_bug_is_logged_with_its_traceback_and_not_shown_to_the_client() -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.fails_with = ValueError("secret detail")
        reply = await site.post(COMPLETIONS, {"prompt": "a"})
        assert "secret detail" not in reply.body.decode()
        assert "secret detail" in site.log.getvalue()
        assert "Traceback" in site.log.getvalue()

    asyncio.run(exchange())


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_an_error_midway_is_an_event_without_done(prompt: Any) -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.fails_with = WorkerError("the engine died")
        site.engine.fails_after = 1
        reply = await site.post(COMPLETIONS, {"prompt": prompt, "stream": True})
        assert reply.status == 200
        assert reply.complete
        assert reply.events[-1]["error"]["code"] == "worker_error"
        assert "[DONE]" not in reply.events
        assert site.metric('quire_errors_total{kind="WorkerError"}') == 1
        num = 1 if isinstance(prompt, str) else 2
        assert site.metric('quire_requests_total{finish_reason="abort"}') == num

    asyncio.run(exchange())


@pytest.mark.parametrize(
    ("why", "fields", "status"),
    [
        ("there is no token to choose: all is banned", {"no_repeat_ngram_size": 1}, 400),
        ("there is no token to choose: all is banned", {"allowed_token_ids": [1]}, 400),
        ("there is no token to choose: NaN", {}, 500),
        ("the grammar leaves no token", {"structured_outputs": {"regex": "a"}}, 400),
        (f"{TOO_FEW_SEQUENCES}1 of 2", {"structured_outputs": {"regex": "a"}}, 400),
        (f"{TOO_FEW_SEQUENCES}1 of 2", {"allowed_token_ids": [1]}, 400),
        ("the executor failed", {"structured_outputs": {"regex": "a"}}, 500),
    ],
)
def test_a_row_left_without_choices_by_its_request_is_a_client_error(
    why: str, fields: dict[str, Any], status: int
) -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.last_reason, site.engine.row_error = FinishReason.ERROR, why
        reply = await site.post(COMPLETIONS, {"prompt": "a", **fields})
        assert reply.status == status
        assert reply.error["message"] == why

    asyncio.run(exchange())


def test_a_failed_row_is_an_error_of_its_request() -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.last_reason = FinishReason.ERROR
        reply = await site.post(COMPLETIONS, {"prompt": "a"})
        assert (reply.status, reply.error["code"]) == (500, "step_row_error")
        assert "row 3" in reply.error["message"]
        assert site.metric('quire_requests_total{finish_reason="error"}') == 1

    asyncio.run(exchange())


def test_an_aborted_request_is_an_error_not_a_short_answer() -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.last_reason = FinishReason.ABORT
        reply = await site.post(COMPLETIONS, {"prompt": "a"})
        assert reply.status == 503

    asyncio.run(exchange())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_disconnect_closes_the_engines_generator_at_once(prompt: Any, stream: bool) -> None:
    async def exchange() -> None:
        site = Site()
        gone = asyncio.Event()
        site.engine.pause = asyncio.Event().wait  # never continues by itself
        body = {"prompt": prompt, "stream": stream}
        task = asyncio.ensure_future(site.post(COMPLETIONS, body, gone=gone))
        num = 1 if isinstance(prompt, str) else 2
        await until(lambda: site.engine.num_deltas == num)
        assert not site.engine.closed_early
        gone.set()
        await asyncio.wait_for(task, 60)
        assert len(site.engine.closed_early) == num
        assert site.metric("quire_disconnects_total") == 1
        assert site.metric('quire_requests_total{finish_reason="abort"}') == num
        assert site.metric("quire_open_requests") == 0

    asyncio.run(exchange())


def test_a_stalled_reader_delays_only_its_own_stream() -> None:
    async def exchange() -> None:
        site = Site(FakeEngine(*"abcdefghij"))
        reads = asyncio.Event()

        async def stuck(part: bytes) -> None:
            await reads.wait()

        body = {"prompt": "x", "stream": True}
        slow = asyncio.ensure_future(site.post(COMPLETIONS, body, on_part=stuck))
        await until(lambda: site.engine.num_deltas == 1)
        reply = await site.post(COMPLETIONS, body)
        assert reply.events[-1] == "[DONE]"
        assert site.engine.num_deltas == 1 + 10  # no further deltas for the slow reader
        reads.set()
        assert len((await slow).events) == 11

    asyncio.run(exchange())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_its_time_limit_ends_with_a_timeout(stream: bool) -> None:
    async def exchange() -> None:
        site = Site(request_timeout_s=0.3)
        site.engine.pause = asyncio.Event().wait
        reply = await site.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        error = reply.events[-1]["error"] if stream else reply.error
        assert reply.status == (200 if stream else 504)
        assert error["code"] == "timeout"
        assert "0.3 s" in error["message"]
        assert site.engine.closed_early
        assert site.metric("quire_timeouts_total") == 1

    asyncio.run(exchange())


def test_after_the_grace_period_open_requests_get_an_error_even_if_unread() -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.pause = asyncio.Event().wait

        async def stuck(part: bytes) -> None:
            await asyncio.Event().wait()

        body = {"prompt": "a"}
        whole = asyncio.ensure_future(site.post(COMPLETIONS, body))
        stream = asyncio.ensure_future(site.post(COMPLETIONS, {**body, "stream": True}))
        unread = asyncio.ensure_future(
            site.post(COMPLETIONS, {**body, "stream": True}, on_part=stuck)
        )
        await until(lambda: site.engine.num_deltas == 3)
        site.server_state.lifecycle.drain()
        site.server_state.lifecycle.end_all()
        assert (await whole).error["code"] == "shutting_down"
        assert (await stream).events[-1]["error"]["code"] == "shutting_down"
        await asyncio.wait_for(unread, 60)
        await asyncio.wait_for(site.server_state.idle.wait(), 60)
        assert len(site.engine.closed_early) == 3

    asyncio.run(exchange())


def test_settings_that_change_answers_are_in_the_fingerprint() -> None:
    async def fingerprint_of(**settings: Any) -> str:
        site = Site(**settings)
        reply = await site.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        model = (await site.get("/v1/models")).json["data"][0]
        assert reply.json["system_fingerprint"] == model["system_fingerprint"]
        return str(model["system_fingerprint"])

    async def all_fingerprints() -> list[str]:
        ways: list[dict[str, Any]] = [
            {},
            {"tool_call_parser": "none"},
            {"reasoning_parser": "none"},
            {"max_output_tokens": 1},
            {"max_output_tokens": 2},
        ]
        return [await fingerprint_of(**settings) for settings in ways]

    prints = asyncio.run(all_fingerprints())
    assert prints[0] == "fp_fake"
    assert len(set(prints)) == len(prints)
    assert all(len(one) == 19 for one in prints[1:])
