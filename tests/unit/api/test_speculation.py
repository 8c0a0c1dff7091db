"""The fields speculation and prediction: what is accepted, what reaches the engine, and usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from quire.base.errors import InvalidParameter
from quire.base.speculation_params import SpeculationParams
from quire.engine.client.speculation import speculation_of
from quire.engine.output.output_stream import TextDelta
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, FakeEngine, Reply, Site

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PREDICTION = {"type": "content", "content": "Hello"}
ABLE = replace(CARD, max_draft_tokens=8)


class DraftingEngine(FakeEngine):
    """An engine that reports three accepted drafts and one rejected one with the last delta."""

    async def generate(self, *args: Any, **settings: Any) -> AsyncIterator[TextDelta]:
        async for delta in super().generate(*args, **settings):
            if delta.finish_reason is not None and settings["terms"].speculation is not None:
                delta = structs.replace(delta, accepted_drafts=3, rejected_drafts=1)
            yield delta


def post(body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[Reply, FakeEngine]:
    engine = DraftingEngine(card=ABLE)

    async def exchange() -> Reply:
        return await Site(engine).post(path, body)

    return asyncio.run(exchange()), engine


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"speculation": "off"}, SpeculationParams(is_on=False)),
        ({"speculation": "auto"}, SpeculationParams(is_on=True)),
        (
            {"speculation": {"max_draft_tokens": 3}},
            SpeculationParams(is_on=True, max_drafts=3),
        ),
        ({"prediction": PREDICTION}, SpeculationParams(prediction_ids=tuple(b"Hello"))),
        (
            {
                "prediction": {
                    "type": "content",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            },
            SpeculationParams(prediction_ids=tuple(b"ab")),
        ),
        (
            {
                "prediction": {
                    "type": "content",
                    "content": [
                        {
                            "type": "text",
                            "text": "a",
                            "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"},
                        }
                    ],
                }
            },
            SpeculationParams(prediction_ids=tuple(b"a")),
        ),
        ({"speculation": None}, None),
        ({}, None),
    ],
)
def test_the_fields_reach_the_engine(
    fields: dict[str, Any], expected: SpeculationParams | None
) -> None:
    reply, engine = post({**CHAT, **fields})
    assert reply.status == 200
    assert engine.asked[0].terms.speculation == expected
    assert engine.asked[0].sampling == post(CHAT)[1].asked[0].sampling.changed(
        seed=engine.asked[0].sampling.seed
    )


def test_usage_counts_prediction_tokens_where_there_are_any() -> None:
    reply, _ = post({**CHAT, "prediction": PREDICTION, "n": 2})
    details = reply.json["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 6
    assert details["rejected_prediction_tokens"] == 2
    assert "accepted_draft_tokens" not in details


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_prediction_is_none(content: Any) -> None:
    reply, engine = post({**CHAT, "prediction": {"type": "content", "content": content}})
    assert engine.asked[0].terms.speculation == SpeculationParams()
    details = reply.json["usage"]["completion_tokens_details"]
    assert details.keys() == {"reasoning_tokens", "accepted_draft_tokens", "rejected_draft_tokens"}


@pytest.mark.parametrize("num_choices", [1, 2])
def test_the_last_chunk_of_a_stream_counts_prediction_tokens(num_choices: int) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}, "n": num_choices}
    reply, _ = post({**CHAT, **stream, "prediction": PREDICTION})
    *chunks, last, done = reply.events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 3 * num_choices,
        "rejected_prediction_tokens": num_choices,
    }
    assert all(chunk["usage"] is None for chunk in chunks)
    whole = post({**CHAT, "n": num_choices, "prediction": PREDICTION})[0].json["usage"]
    assert last["usage"] == whole
    plain = post({**CHAT, **stream})[0].events[-2]["usage"]["completion_tokens_details"]
    assert plain == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/api/chat", CHAT),
        ("/completion", {"prompt": "x"}),
    ],
)
def test_other_routes_take_a_prediction_too(path: str, body: dict[str, Any]) -> None:
    reply, engine = post({**body, "prediction": PREDICTION}, path)
    assert reply.status == 200
    assert engine.asked[0].terms.speculation == (SpeculationParams(prediction_ids=tuple(b"Hello")))


def test_usage_counts_drafts_under_other_names_without_a_prediction() -> None:
    reply, _ = post({**CHAT, "speculation": "auto"})
    details = {"reasoning_tokens": 0, "accepted_draft_tokens": 3, "rejected_draft_tokens": 1}
    assert reply.json["usage"]["completion_tokens_details"] == details
    plain = post(CHAT)[0].json["usage"]["completion_tokens_details"]
    assert plain == {"reasoning_tokens": 0}


def test_a_prediction_of_which_nothing_was_tried_counts_nothing() -> None:
    engine = FakeEngine(card=ABLE)
    reply = asyncio.run(_posted(engine, {**CHAT, "prediction": PREDICTION}))
    details = reply.json["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


async def _posted(engine: FakeEngine, body: dict[str, Any]) -> Reply:
    return await Site(engine).post("/v1/chat/completions", body)


@each_case(
    ("fields", "param"),
    [
        ({"speculation": "on"}, "speculation"),
        ({"speculation": True}, "speculation"),
        ({"speculation": {}}, "speculation"),
        ({"speculation": {"max_draft_tokens": 0}}, "speculation"),
        ({"speculation": {"max_draft_tokens": 2.0}}, "speculation"),
        ({"speculation": {"max_draft_tokens": 2, "more": 1}}, "speculation"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction"),
        (
            {
                "prediction": {
                    "type": "content",
                    "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": "here"}],
                }
            },
            "prediction",
        ),
        ({"prediction": PREDICTION, "speculation": "off"}, "prediction"),
    ],
)
def test_other_values_are_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    reply, engine = post({**CHAT, **fields})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not engine.asked


def test_a_wrong_number_of_drafts_is_refused_with_the_limit_of_the_server() -> None:
    reply, _ = post({**CHAT, "speculation": {"max_draft_tokens": -1}})
    assert '{"max_draft_tokens": 1 to 8} is allowed' in reply.json["error"]["message"]


def test_a_prediction_longer_than_the_context_is_refused_as_such() -> None:
    text = "x" * (CARD.max_model_len + 1)
    reply, engine = post({**CHAT, "prediction": {"type": "content", "content": text}})
    assert (reply.status, reply.json["error"]["param"]) == (400, "prediction")
    assert reply.json["error"]["message"].startswith("prediction has more tokens than the")
    assert not engine.asked


def test_a_prediction_is_a_field_of_chats() -> None:
    reply, _ = post({"prompt": "x", "prediction": PREDICTION}, "/v1/completions")
    assert (reply.status, reply.json["error"]["param"]) == (400, "prediction")


@each_case(
    ("card", "wishes", "expected"),
    [
        (CARD, {}, None),
        (CARD, {"is_on": False}, None),
        (ABLE, {}, None),
        (ABLE, {"is_on": True}, (8, True, 0)),
        (ABLE, {"is_on": True, "max_drafts": 3}, (3, True, 0)),
        (ABLE, {"prediction_ids": (1, 2)}, (8, False, 2)),
        (replace(ABLE, speculates=True), {}, (8, True, 0)),
        (replace(ABLE, speculates=True), {"is_on": False}, None),
        (replace(ABLE, speculates=True), {"prediction_ids": (1,)}, (8, True, 1)),
    ],
)
def test_a_request_speculates_as_it_asks_and_as_the_server_is_set(
    card: Any, wishes: dict[str, Any], expected: tuple[int, bool, int] | None
) -> None:
    found = speculation_of(card, SpeculationParams(**wishes))
    if found is None:
        assert expected is None
        return
    assert (found.max_drafts, found.uses_proposer, len(found.prediction_ids)) == expected


@pytest.mark.parametrize(
    ("card", "wishes", "message"),
    [
        (CARD, {"is_on": True}, "speculation is given, and this server verifies no draft tokens"),
        (CARD, {"prediction_ids": (1,)}, "prediction is given, and this server verifies no"),
        (ABLE, {"is_on": True, "max_drafts": 9}, "this server allows at most 8"),
        (ABLE, {"is_on": True, "max_drafts": 2**70}, "this server allows at most 8"),
    ],
)
def test_what_a_server_does_not_offer_is_refused(
    card: Any, wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message):
        speculation_of(card, SpeculationParams(**wishes))


@pytest.mark.parametrize(
    ("path", "body", "details"),
    [
        ("/v1/responses", {"input": "hi"}, "output_tokens_details"),
        ("/v1/messages", {**CHAT, "max_tokens": 5}, "output_tokens_details"),
    ],
)
def test_other_dialects_count_proposed_tokens_too(
    path: str, body: dict[str, Any], details: str
) -> None:
    predicted = post({**body, "prediction": PREDICTION}, path)[0].json["usage"][details]
    assert predicted["accepted_prediction_tokens"] == 3
    assert predicted["rejected_prediction_tokens"] == 1
    drafted = post({**body, "speculation": "auto"}, path)[0].json["usage"][details]
    assert (drafted["accepted_draft_tokens"], drafted["rejected_draft_tokens"]) == (3, 1)
    assert len(post(body, path)[0].json["usage"][details]) == 1


@each_case(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
def test_routes_without_a_prediction_say_so(path: str, body: dict[str, Any]) -> None:
    reply, engine = post({**body, "prediction": PREDICTION}, path)
    assert reply.status == 400
    assert "prediction" in str(reply.json["error"])
    assert not engine.asked
    assert post({**body, "speculation": "auto"}, path)[1].asked[0].terms.speculation == (
        SpeculationParams(is_on=True)
    )
