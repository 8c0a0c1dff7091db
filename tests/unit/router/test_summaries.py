"""Summaries of prompts that do not fit: asked for, bounded, reported, refused with the reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from quire.router.features import Features
from quire.router.lanes import Lanes
from quire.router.model_names import ModelNames
from quire.router.quotas import LocalBuckets, Quotas
from quire.router.route_file import LanesTable, ModelTable, QuotaTable, SummariesTable
from quire.router.summaries import HEADER, REPORT_FIELD, PromptSummary, SummaryOrder, _piece
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run

CHAT = "/v1/chat/completions"
FITS_CHARS = 900
TABLE = SummariesTable(model="small", max_tokens=16)
SYSTEM = {"role": "system", "content": "Be brief."}
LAST = {"role": "user", "content": "What is my name?"}
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}


def too_long(what: str) -> bytes:
    error = {"message": f"{what} too long", "code": "context_length_exceeded"}
    return json.dumps({"error": error}).encode()


def chars(fields: dict[str, Any]) -> int:
    return sum(len(str(one["content"])) for one in fields["messages"])


def answer_of(text: str, finish: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": USAGE}).encode()


def target(limit: int = FITS_CHARS, name: str = "one") -> FakeReplica:
    """Return a replica that takes prompts of so many characters."""
    replica = FakeReplica(f"fp_{name}", name)

    def answer(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        if "messages" in fields and chars(fields) > limit:
            return 400, too_long(name)
        return None if fields.get("stream") else (200, answer_of("Ada"))

    replica.answer = answer
    return replica


def summarizer(
    limit: int = 10**6, text: Callable[[dict[str, Any]], str] = lambda fields: "It is Ada."
) -> FakeReplica:
    """Return a replica that answers with a text."""
    replica = FakeReplica("fp_small", "small")

    def answer(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
        return (400, too_long("piece")) if chars(fields) > limit else (200, answer_of(text(fields)))

    replica.answer = answer
    return replica


def chat(turns: int = 12, **fields: Any) -> dict[str, Any]:
    """Return a conversation with so many earlier turns."""
    messages: list[dict[str, Any]] = [SYSTEM]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"Question {turn}: {'word ' * 20}"},
            {"role": "assistant", "content": f"Answer {turn}."},
        ]
    return {"model": "one", "messages": [*messages, LAST], "summarize_prompt": True, **fields}


def features(table: SummariesTable | None = TABLE, **others: Any) -> Features:
    return Features(summaries=table, **others)


async def error_of(router: Router, fields: dict[str, Any], path: str = CHAT) -> tuple[int, Any]:
    status, _, body = await router.post(path, fields)
    return status, json.loads(body)["error"]


def know_context(router: Router, tokens: int) -> None:
    """Let the router know another context than the 100 tokens that a FakeReplica lists."""
    for replica in router.fleet.replicas.values():
        for entry in replica.model_entries:
            entry["max_model_len"] = tokens


def test_the_earlier_part_is_summarized_and_both_usages_are_reported() -> None:
    one, small = target(), summarizer()

    async def story(router: Router) -> None:
        know_context(router, 4000)
        status, headers, body = await router.post(CHAT, chat(seed=3, cache_salt="s"))
        answer = json.loads(body)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == "Ada"
        assert answer["usage"] == USAGE, "that of the answer alone"
        report = answer[REPORT_FIELD]
        assert report == {
            **{"model": "small", "messages": 24, "requests": 1, "finish_reason": "stop"},
            **{"usage": USAGE, "text": "It is Ada."},
        }
        del report["text"]
        assert json.loads(headers[HEADER]) == report
        assert router.count("quire_router_summaries_total") == 1
        assert router.count("quire_router_summary_tokens_total") == 14

    run([one, small], story, features())
    refused, sent = one.requests
    assert "summarize_prompt" not in refused
    system, summary, reply, last = sent["messages"]
    assert (system, last) == (SYSTEM, LAST)
    assert [summary["role"], reply["role"]] == ["user", "assistant"]
    assert summary["content"].endswith("It is Ada.")
    assert sent["seed"] == 3
    [asked] = small.requests
    assert (asked["temperature"], asked["seed"], asked["max_tokens"]) == (0, 0, 16)
    assert asked["cache_salt"] == "s", "prefixes stay those of the client"
    assert "Question 11" in asked["messages"][0]["content"]
    assert "Be brief" not in asked["messages"][0]["content"]


@pytest.mark.parametrize("given", [None, False])
def test_nothing_is_summarized_unasked(given: Any) -> None:
    one, small = target(), summarizer()

    async def story(router: Router) -> None:
        status, error = await error_of(router, chat(summarize_prompt=given))
        assert (status, error["message"]) == (400, "one too long"), "as the replica says it"

    run([one, small], story, features())
    assert not small.requests


def test_a_prompt_that_fits_is_sent_as_it_is_and_one_that_does_not_goes_to_the_longer_model() -> (
    None
):
    one, long, small = target(), target(10**6, "long"), summarizer()
    tables = {"chat": ModelTable(targets=(), longer="long"), "one": ModelTable(longer="long")}

    async def story(router: Router) -> None:
        for turns in (1, 12):
            status, headers, body = await router.post(CHAT, chat(turns))
            assert status == 200
            assert HEADER not in headers
            assert REPORT_FIELD not in json.loads(body)

    run([one, long, small], story, features(names=ModelNames({"one": tables["one"]})))
    assert not small.requests
    assert [len(asked["messages"]) for asked in long.requests] == [26]


def test_after_a_summary_the_named_model_answers_and_not_the_longer_one() -> None:
    one, long, small = target(), target(1200, "long"), summarizer()
    names = ModelNames({"one": ModelTable(longer="long")})

    async def story(router: Router) -> None:
        know_context(router, 4000)
        assert (await router.post(CHAT, chat()))[0] == 200

    run([one, long, small], story, features(names=names))
    assert (len(one.requests), len(long.requests)) == (2, 1)


def test_long_parts_are_summarized_piece_by_piece_each_with_the_summary_so_far() -> None:
    one = target()
    small = summarizer(
        limit=1500, text=lambda fields: f"S{fields['messages'][0]['content'].count('Question')}"
    )

    async def story(router: Router) -> None:
        know_context(router, 0)  # not known: the first piece is all, and halved as it is refused
        status, _, body = await router.post(CHAT, chat(30))
        assert status == 200
        report = json.loads(body)[REPORT_FIELD]
        assert report["requests"] == len(small.requests) - 2 > 2, "two were too long"
        assert report["usage"]["prompt_tokens"] == 11 * report["requests"]

    run([one, small], story, features())
    done = [asked["messages"][0]["content"] for asked in small.requests][2:]
    assert "Summary of what came before" not in done[0]
    for before, after in pairwise(done):
        assert f"S{before.count('Question')}" in after
    for turn in range(30):
        assert sum(f"Question {turn}:" in piece for piece in done) == 1


def test_pieces_end_between_messages_or_words_and_lose_nothing() -> None:
    text = "\n\n".join(f"user: {'wort ' * at}" for at in range(40)) + "x" * 500
    for size in (1, 7, 64, 300):
        at, pieces = 0, []
        while at < len(text):
            pieces.append(_piece(text, at, size))
            at += len(pieces[-1])
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= size


def test_turns_that_are_kept_keep_their_tool_calls_and_system_messages_stay() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a":1}'}}
    messages = [
        {"role": "user", "content": "x" * 1000},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image_url"}]},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "again"},
    ]
    one, small = target(), summarizer()

    async def story(router: Router) -> None:
        know_context(router, 4000)
        fields = {"model": "one", "messages": messages, "summarize_prompt": {"keep_turns": 2}}
        assert (await router.post(CHAT, fields))[0] == 200
        assert (await router.post(CHAT, {**fields, "summarize_prompt": {}}))[0] == 200

    run([one, small], story, features())
    sent = one.requests[1]["messages"]
    assert sent[0] == messages[3]
    assert sent[3:] == messages[4:]
    text = small.requests[0]["messages"][0]["content"]
    assert '[calls find with {"a":1}]' in text
    assert "tool: found" in text
    assert one.requests[3]["messages"][3:] == messages[6:]
    assert "user: two\n[image_url]" in small.requests[1]["messages"][0]["content"]


@pytest.mark.parametrize("options", [{}, {"n": 2}])
def test_a_stream_has_the_report_in_its_first_event_once(options: dict[str, Any]) -> None:
    """Also where it is continued by another replica, and where it cannot be continued."""
    one, again, small = target(), target(), summarizer()
    if not options:
        one.fails_after = again.fails_after = 5

    async def story(router: Router) -> None:
        know_context(router, 4000)
        one_again = asyncio.ensure_future(router.post(CHAT, chat(stream=True, **options)))
        status, headers, body = await one_again
        assert status == 200
        assert headers[HEADER]
        assert body.count(REPORT_FIELD.encode()) == 1
        first, *others = body.split(b"\n\n")
        event = json.loads(first.removeprefix(b"data: "))
        assert event["token"] == 100
        assert event[REPORT_FIELD]["text"] == "It is Ada."
        shown = b"".join(block for block in others if not block.startswith(b":"))
        tokens = range(101, 100 + LENGTH)
        assert shown == b"".join(b'data: {"token": %d}' % at for at in tokens) + b"data: [DONE]"

    run([one, again, small], story, features(), resume_s=10.0)
    assert len(small.requests) == 1, "a stream that continues is not summarized again"


def test_no_text_of_an_answer_is_taken_for_the_beginning_of_an_event() -> None:
    """Pieces of a stream that is passed on begin anywhere."""
    stream = b': beat\n\ndata: {"text":"data: {data: {x"}\n\ndata: {"text":"y"}\n\ndata: [DONE]\n\n'

    async def unasked(fields: Any) -> tuple[int, bytes]:
        raise AssertionError("nothing is summarized here")

    for first in range(len(stream)):
        order = SummaryOrder(model="small", max_tokens=16, keep_turns=1)
        summary = PromptSummary(TABLE, order, unasked, 0)
        shown, is_added = b"", False
        for piece in (stream[:first], stream[first : first + 9], stream[first + 9 :]):
            added = None if is_added else summary.shown_event(piece)
            is_added = is_added or added is not None
            shown += piece if added is None else added
        events = [json.loads(one[6:]) for one in shown.split(b"\n\n") if one[:7] == b"data: {"]
        assert [one["text"] for one in events] == ["data: {data: {x", "y"]
        assert sum(REPORT_FIELD in one for one in events) == is_added == 1


def test_a_prompt_that_cannot_be_shortened_is_refused_with_the_reason() -> None:
    one, small = target(), summarizer()
    long_last = {"role": "user", "content": "y" * 2000}
    answers = {
        "nothing to summarize": chat(0, messages=[SYSTEM, long_last]),
        "newest 20 turns stay": chat(summarize_prompt={"keep_turns": 20}),
        "max-prompt-tokens": chat(400),
        "summarized already": chat(messages=[*chat(2)["messages"], long_last]),
    }

    async def story(router: Router) -> None:
        know_context(router, 100_000)
        for why, fields in answers.items():
            status, error = await error_of(router, fields)
            assert (status, error["code"]) == (400, "context_length_exceeded"), error
            assert why in error["message"]
            assert "one too long" in error["message"], "with what the replica said"
            assert error["param"] == "messages"

    run([one, small], story, features(SummariesTable(model="small", max_prompt_tokens=4000)))
    assert len(small.requests) == 1, "only the last one"


def test_the_number_of_requests_is_bounded_before_any_is_sent() -> None:
    one, small = target(), summarizer()

    async def story(router: Router) -> None:
        know_context(router, 300)  # pieces of 324 characters
        status, error = await error_of(router, chat(30))
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "max-requests" in error["message"]
        know_context(router, 100)
        status, error = await error_of(router, chat(30))
        assert (status, error["code"]) == (400, "summary_failed")
        assert "context of 100 tokens" in error["message"]

    run([one, small], story, features(SummariesTable(model="small", max_tokens=16, max_requests=3)))
    assert not small.requests


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, {"summarize_prompt": "yes"}, "true or an object"),
        (CHAT, {"summarize_prompt": {"keep": 1}}, "keep_turns"),
        (CHAT, {"summarize_prompt": {"keep_turns": 0}}, "keep_turns"),
        (CHAT, {"summarize_prompt": {"max_tokens": 17}}, "max-tokens of [summaries]"),
        (CHAT, {"summarize_prompt": {"model": ""}}, "model"),
        (CHAT, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": "a"}, "leave it out of /v1/completions"),
        ("/v1/messages", {}, "leave it out of /v1/messages"),
    ],
)
def test_what_the_field_does_not_allow_is_refused(path: str, fields: Any, why: str) -> None:
    one = target()

    async def story(router: Router) -> None:
        status, error = await error_of(router, chat(1, **fields), path)
        assert status == 400
        assert why in error["message"]

    run([one], story, features())
    assert not one.requests


def test_a_router_without_summaries_refuses_the_field() -> None:
    async def story(router: Router) -> None:
        status, error = await error_of(router, chat(1))
        assert (status, error["param"]) == (400, "summarize_prompt")
        assert "[summaries]" in error["message"]
        assert (await router.post(CHAT, chat(1, summarize_prompt=False)))[0] == 200

    run([target()], story, features(None))


@pytest.mark.parametrize(
    ("answered", "status", "why"),
    [
        ((200, answer_of(" ")), 503, "no text"),
        ((200, b'{"choices":5}'), 503, "no text"),
        ((401, b'{"error":{"message":"no key"}}'), 400, "no key"),
        ((400, b'{"error":{"message":"odd","code":"invalid_value"}}'), 400, "answered 400: odd"),
        ((429, b'{"error":{"message":"slower"}}'), 503, "answered 429: slower"),
        ((400, too_long("piece")), 400, "too long for it"),
    ],
)
def test_what_the_summarizing_model_refuses_is_said(
    answered: tuple[int, bytes], status: int, why: str
) -> None:
    one, small = target(), summarizer()
    small.answer = lambda method, path, fields: answered

    async def story(router: Router) -> None:
        know_context(router, 4000)
        found, error = await error_of(router, chat())
        assert (found, error["code"]) == (status, "summary_failed")
        assert why in error["message"]
        assert "'small'" in error["message"]

    table = SummariesTable(model="small", max_requests=1000)
    run([one, small], story, features(table))
    assert len(one.requests) == 1


@pytest.mark.parametrize("body", [b"{}", b"[]", b""])
def test_an_answer_that_is_no_object_with_fields_is_passed_on(body: bytes) -> None:
    one, small = target(), summarizer()
    answer = one.answer

    def odd(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        status, said = answer(method, path, fields) or (200, b"")
        return (status, said) if status == 400 else (200, body)

    one.answer = odd

    async def story(router: Router) -> None:
        know_context(router, 4000)
        status, headers, found = await router.post(CHAT, chat())
        assert (status, found) == (200, body)
        assert headers[HEADER]

    run([one, small], story, features())


def test_a_model_that_no_replica_has_is_named() -> None:
    async def story(router: Router) -> None:
        status, error = await error_of(router, chat(summarize_prompt={"model": "none"}))
        assert (status, error["code"]) == (400, "summary_failed")
        assert "'none' is not served here" in error["message"]

    run([target(), summarizer()], story, features())


def test_a_summarizing_replica_that_fails_is_replaced() -> None:
    one, bad, good = target(), summarizer(), summarizer()
    bad.answer = lambda method, path, fields: (500, b'{"error":{"message":"x"}}')

    async def story(router: Router) -> None:
        know_context(router, 4000)
        for _ in range(2):
            assert (await router.post(CHAT, chat()))[0] == 200

    run([one, bad, good], story, features())
    assert len(good.requests) == 2


def test_a_client_that_leaves_ends_the_summary() -> None:
    one, small = target(), summarizer()
    small.answer = lambda method, path, fields: None
    small.whole_gate = asyncio.Event()  # never set

    async def story(router: Router) -> None:
        know_context(router, 4000)
        body, sent = json.dumps(chat()).encode(), [False]

        async def receive() -> dict[str, Any]:
            if not sent[0]:
                sent[0] = True
                return {"type": "http.request", "body": body}
            await small.began.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b""}
        await router.app({**scope, "headers": []}, receive, send)  # type: ignore[arg-type]

    run([one, small], story, features())
    assert len(one.requests) == 1


def test_quotas_reserve_and_charge_the_summary_too() -> None:
    one, small = target(), summarizer()
    buckets = LocalBuckets(lambda: 0.0)
    table = QuotaTable(tokens_per_minute=4000)
    quotas = Quotas(table, {}, buckets)

    async def story(router: Router) -> None:
        know_context(router, 4000)
        assert (await router.post(CHAT, chat(max_tokens=10)))[0] == 200
        text = router.metrics.text().decode()
        assert 'quire_router_quota_tokens_total{kind="used"} 28.0' in text
        status, error = await error_of(router, chat(max_tokens=3400))
        assert (status, error["code"]) == (429, "quota_exceeded"), "the prompt counts twice"

    run([one, small], story, features(quotas=quotas))


def test_a_deadline_holds_for_summary_and_answer() -> None:
    one, small = target(), summarizer()

    async def story(router: Router) -> None:
        know_context(router, 4000)
        assert (await router.post(CHAT, chat(deadline_ms=60_000)))[0] == 200

    run([one, small], story, features())
    left = [small.requests[0]["deadline_ms"], one.requests[1]["deadline_ms"]]
    assert 60_000 >= left[0] >= left[1] >= 1


def test_a_shortened_prompt_leaves_the_lane_of_long_ones() -> None:
    one, small = target(), summarizer()
    lanes = Lanes(LanesTable(long_prompt_tokens=500, max_long_per_replica=1))
    one.gate = asyncio.Event()

    async def story(router: Router) -> None:
        know_context(router, 4000)
        asked = asyncio.ensure_future(router.post(CHAT, chat(stream=True)))
        while len(one.requests) < 2:
            await asyncio.sleep(0.01)
        assert all(not replica.num_long for replica in router.fleet.replicas.values())
        assert one.gate is not None
        one.gate.set()
        assert (await asked)[0] == 200

    run([one, small], story, features(lanes=lanes))


def test_a_client_that_leaves_during_the_summary_pays_what_that_has_taken() -> None:
    """Not the answer, which no replica has begun."""
    one, small = target(), summarizer()
    quotas = Quotas(QuotaTable(tokens_per_minute=60_000), {}, LocalBuckets(lambda: 0.0))
    answer = small.answer
    small.whole_gate = asyncio.Event()  # never set

    def slow(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        return answer(method, path, fields) if len(small.requests) < 2 else None

    small.answer = slow

    async def story(router: Router) -> None:
        know_context(router, 300)
        await router.leave(CHAT, chat(max_tokens=1000), 1.0)
        text = router.metrics.text().decode()
        _, second = small.requests
        begun = len(msgspec.json.encode(second)) // 4 + TABLE.max_tokens
        assert f'quire_router_quota_tokens_total{{kind="used"}} {14 + begun}.0' in text

    run([one, small], story, features(quotas=quotas))
    assert len(one.requests) == 1
