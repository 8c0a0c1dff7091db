"""POST /v1/messages: answers, events, tools and errors in the form of Anthropic's API."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from quire.base.errors import WorkerError
from quire.base.records import FinishReason
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, FakeEngine, Reply, Site
from tests.unit.api.shown_conversation import CALL, CHAT_TOOL, SCHEMA, TEMPLATE

PATH, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
SAID = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"messages": SAID, "max_tokens": 8, "seed": 7}
TOOL = {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
NOTHING_MADE = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}


def engine(*script: str, reason: FinishReason = FinishReason.STOP) -> Any:
    made = FakeEngine(*script, card=replace(CARD, max_model_len=2048))
    made.template = ChatTemplate({"default": TEMPLATE}, variables={})
    made.last_reason = reason
    return made


def ask(
    body: Any,
    *,
    path: str = PATH,
    on: Any = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> Reply:
    async def exchange() -> Reply:
        site = Site(on or engine(), **settings)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        path_alone, _, query = path.partition("?")
        return await site.call(method, path_alone, raw, headers=headers, query=query.encode())

    return asyncio.run(exchange())


def of_chat(sent: dict[str, Any]) -> Any:
    """Return what the engine was asked by a chat."""
    made = engine()
    assert ask(sent, path=CHAT, on=made).status == 200
    return made.asked[0]


def test_log_probabilities_are_beside_the_content_of_a_whole_message() -> None:
    """For programs that judge how sure the model was."""
    made = engine("a", "b")
    body = ask({**ASKED, "logprobs": True}, on=made).json
    assert made.asked[0].sampling.logprobs == 0
    of_chat = ask({**ASKED, "logprobs": True}, path=CHAT, on=engine("a", "b")).json
    tokens = of_chat["choices"][0]["logprobs"]["content"]
    assert body["logprobs"] == [one["logprob"] for one in tokens]
    assert len(body["logprobs"]) == body["usage"]["output_tokens"]
    assert "logprobs" not in ask(ASKED).json
    refused = ask({**ASKED, "logprobs": True, "stream": True})
    assert (refused.status, "logprobs" in refused.error["message"]) == (400, True)


def of_message(sent: dict[str, Any]) -> Any:
    """Return what the engine was asked by a message; check that the count agrees."""
    made = engine()
    reply = ask({**ASKED, **sent}, on=made)
    assert reply.status == 200, reply.body
    of_prompt = ("messages", "system", "tools", "tool_choice", "thinking")
    counted = {name: sent[name] for name in of_prompt if name in sent}
    count = ask({"messages": SAID, **counted}, path=COUNT).json
    assert count == {"input_tokens": len(made.asked[0].prompt_ids)}
    return made.asked[0]


def refusal(body: Any, **options: Any) -> tuple[int, str, str]:
    reply = ask(body, **options)
    error = reply.json["error"]
    assert reply.json["request_id"] == reply.headers["request-id"]
    return reply.status, error["type"], error["message"]


def test_a_whole_answer_is_a_message() -> None:
    made = engine()
    reply = ask(ASKED, on=made)
    message = reply.json
    assert message.pop("id").startswith("msg_")
    prompt = len(made.asked[0].prompt_ids)
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "stop_sequence",
        "stop_sequence": "END",
        "stop_details": None,
        "container": None,
        "diagnostics": None,
        "usage": {
            "input_tokens": prompt - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "cache_creation": NOTHING_MADE,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
            "speed": "standard",
        },
        "seed": 7,
    }
    assert reply.headers["request-id"] == reply.json["id"]


def events_of(reply: Reply) -> list[tuple[str, Any]]:
    """Return (name, data) of each event."""
    events = [event.split("\n") for event in reply.body.decode().split("\n\n") if event]
    found = [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in events
    ]
    assert all(name == data["type"] for name, data in found)
    return found


def test_the_events_of_a_stream_come_in_order() -> None:
    events = events_of(ask({**ASKED, "stream": True}, on=engine("Hel", "lo", "!")))
    assert [name for name, _ in events] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    data = [data for _, data in events]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["usage"]["cache_read_input_tokens"] == 2
    assert data[1]["content_block"] == {"type": "text", "text": ""}
    assert [event["delta"]["text"] for event in data[2:5]] == ["Hel", "lo", "!"]
    assert data[6]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "END",
        "stop_details": None,
        "container": None,
    }
    assert data[6]["usage"]["output_tokens"] == 3


def joined(events: list[tuple[str, Any]]) -> list[Any]:
    """Return the content that a client makes of a stream."""
    blocks: list[Any] = []
    for name, data in events:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(dict(data["content_block"], partial_json=""))
        elif name == "content_block_delta":
            for key in data["delta"].keys() - {"type"}:
                blocks[data["index"]][key] += data["delta"][key]
    for block in blocks:
        arguments = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return blocks


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_streamed_blocks_are_those_of_the_whole_answer(cut: int) -> None:
    text = f"<think>It is asked.</think>I look.{CALL}{CALL}"
    script = [text[at : at + cut] for at in range(0, len(text), cut)]
    body = {**ASKED, "tools": [TOOL]}
    whole = ask(body, on=engine(*script)).json
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thinking, said, first, second = whole["content"]
    assert (thinking["thinking"], said["text"]) == ("It is asked.", "I look.")
    assert thinking["signature"]
    assert first["input"] == {"city": "Ulm"}
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    streamed = joined(events_of(ask({**body, "stream": True}, on=engine(*script))))
    for block in streamed[2:]:  # ids begin with those of the requests
        assert block.pop("id").startswith("toolu_")
    for block in (first, second):
        del block["id"]
    assert streamed == whole["content"]


@pytest.mark.parametrize(
    ("script", "reason", "stop_reason"),
    [
        ((CALL,), FinishReason.STOP, "stop_sequence"),
        (("a",), FinishReason.LENGTH, "max_tokens"),
        ((CALL[:40],), FinishReason.LENGTH, "max_tokens"),
    ],
)
def test_the_reason_of_the_end(script: Any, reason: FinishReason, stop_reason: str) -> None:
    message = ask({**ASKED, "tools": [TOOL]}, on=engine(*script, reason=reason)).json
    assert message["stop_reason"] == stop_reason


def test_a_complete_call_ends_with_tool_use_and_a_text_ends_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = FakeEngine._delta

    def without_stop(self: Any, *args: Any) -> Any:
        return structs.replace(given(self, *args), stop_reason=None)

    monkeypatch.setattr(FakeEngine, "_delta", without_stop)
    body = {**ASKED, "tools": [TOOL]}
    assert ask(body, on=engine(CALL)).json["stop_reason"] == "tool_use"
    assert ask(body, on=engine("Hello")).json["stop_reason"] == "end_turn"


def test_arguments_that_are_not_json_are_returned_as_a_text() -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": "U'
    message = ask({**ASKED, "tools": [TOOL]}, on=engine(broken, reason=FinishReason.LENGTH)).json
    (block,) = message["content"]
    assert block["input"] == {"INVALID_JSON": '{"city": "U'}


def test_max_tokens_beyond_the_context_fill_it() -> None:
    made = engine("a", reason=FinishReason.LENGTH)
    message = ask({**ASKED, "max_tokens": 32_000}, on=made).json
    (asked,) = made.asked
    assert asked.sampling.max_tokens == 2048 - len(asked.prompt_ids)
    assert message["stop_reason"] == "model_context_window_exceeded"


HISTORY = [
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "zzz"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Köln"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "Rain."},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [{"type": "text", "text": "No such city."}],
                "is_error": True,
            },
            {"type": "text", "text": "And?", "cache_control": EPHEMERAL},
        ],
    },
]


def chat_call(id_: str, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": city}, ensure_ascii=False)}
    return {"id": id_, "type": "function", "function": function}


CHAT_HISTORY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [chat_call("t1", "Ulm"), chat_call("t2", "Köln")],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "t2", "content": "Error: No such city."},
    {"role": "user", "content": "And?"},
]


def test_a_conversation_has_the_prompt_and_parameters_of_the_same_chat() -> None:
    system = [{"type": "text", "text": "Be short.", "cache_control": EPHEMERAL}]
    both = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "max_tokens": 8}
    message = of_message(
        {**both, "system": system, "messages": HISTORY, "tools": [TOOL], "stop_sequences": ["x"]}
    )
    chat = of_chat({**both, "messages": CHAT_HISTORY, "tools": [CHAT_TOOL], "stop": ["x"]})
    assert bytes(message.prompt_ids).decode() == bytes(chat.prompt_ids).decode()
    assert message.sampling == chat.sampling
    assert message.text_rules == chat.text_rules


def test_the_last_message_of_the_assistant_is_continued() -> None:
    said = [*SAID, {"role": "assistant", "content": "The answer is"}]
    chat = of_chat({"messages": said, "continue_final_message": True, "max_tokens": 8, "seed": 7})
    asked = of_message({"messages": said})
    assert asked.prompt_ids == chat.prompt_ids
    assert bytes(asked.prompt_ids).endswith(b"The answer is")


@pytest.mark.parametrize(
    ("thinking", "chat"),
    [
        ({"type": "disabled"}, {"reasoning_effort": "none"}),
        ({"type": "adaptive"}, {"reasoning_effort": "medium"}),
        (None, {}),
    ],
)
def test_thinking_is_the_effort_of_a_chat(thinking: Any, chat: dict[str, Any]) -> None:
    expected = of_chat({"messages": SAID, "max_tokens": 8, **chat})
    assert of_message({"thinking": thinking}).prompt_ids == expected.prompt_ids


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"type": "tool", "name": "weather"},
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                }
            },
        ),
        ({"type": "auto", "name": None, "disable_parallel_tool_use": None}, {}),
    ],
)
def test_a_tool_choice_has_the_grammar_of_the_same_chat(choice: Any, chat: dict[str, Any]) -> None:
    asked = of_message({"tools": [TOOL], "tool_choice": choice})
    same = of_chat({**ASKED, "tools": [CHAT_TOOL], **chat})
    assert asked.sampling == same.sampling
    assert asked.prompt_ids == same.prompt_ids


def test_a_format_of_the_answer_has_the_grammar_of_the_same_chat() -> None:
    asked = of_message({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}})
    same = of_chat(
        {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    )
    assert asked.sampling.structured_outputs == same.sampling.structured_outputs is not None


def test_a_system_message_keeps_its_place() -> None:
    said = [*SAID, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    chat = [*SAID, {"role": "system", "content": "Be brief."}]
    asked = of_message({"messages": said, "system": "Hello."})
    same = of_chat({**ASKED, "messages": [{"role": "system", "content": "Hello."}, *chat]})
    assert asked.prompt_ids == same.prompt_ids
    made = engine()
    refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
    made.template = ChatTemplate({"default": f"{refuses}{{% endif %}}{{% endfor %}}"}, variables={})
    assert refusal({**ASKED, "messages": said}, on=made)[:2] == (400, "invalid_request_error")


def test_the_scope_of_a_cached_prefix_is_that_of_its_tenant() -> None:
    def pins(control: dict[str, str]) -> Any:
        block = {"type": "text", "text": "Long.", "cache_control": control}
        return of_message({"system": [block]}).terms.cache_pins

    plain = {"type": "ephemeral"}
    assert pins({**plain, "scope": "global"}) == pins(plain) != ()
    block = {"type": "text", "text": "Long.", "cache_control": {**plain, "scope": "world"}}
    assert "system[0].cache_control is" in refusal({**ASKED, "system": [block]})[2]


def test_a_system_block_is_a_system_message_in_its_place() -> None:
    text = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    blocks = [
        {"type": "text", "text": "One."},
        {"type": "mid_conv_system", "content": [text]},
        {"type": "text", "text": "Two."},
    ]
    asked = of_message({"messages": [{"role": "user", "content": blocks}]})
    chat = [("user", "One."), ("system", "Be brief."), ("user", "Two.")]
    same = of_chat({**ASKED, "messages": [{"role": role, "content": said} for role, said in chat]})
    assert asked.prompt_ids == same.prompt_ids
    # A breakpoint within it keeps the prefix up to its end.
    (pin,) = asked.terms.cache_pins
    assert bytes(asked.prompt_ids[: pin.num_tokens]).endswith(b"Be brief.;")
    for bad in ({"content": 3}, {}, {"content": [{"type": "image"}]}, {"content": "a", "x": 1}):
        said = [{"role": "user", "content": [{"type": "mid_conv_system", **bad}]}]
        assert "messages[0].content[0]" in refusal({**ASKED, "messages": said})[2]


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
    ],
)
def test_an_effort_that_the_template_does_not_read_is_listed_by_its_name(
    sent: dict[str, Any], name: str
) -> None:
    made = engine()
    made.template = ChatTemplate({"default": "{{ messages[0].content }}"}, variables={})
    assert ask({**ASKED, **sent}, on=made).headers["x-quire-ignored-fields"] == name


def test_thinking_is_counted_and_its_text_left_out_on_request() -> None:
    script = ("<think>", "It is", " asked.", "</think>", "I look.")
    shown = {"type": "adaptive", "display": "summarized"}
    whole = ask({**ASKED, "thinking": shown}, on=engine(*script)).json
    assert whole["content"][0]["thinking"] == "It is asked."
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    hidden = {**ASKED, "thinking": {**shown, "display": "omitted"}}
    omitted = ask(hidden, on=engine(*script)).json
    assert omitted["content"] == [{**whole["content"][0], "thinking": ""}, whole["content"][1]]
    events = events_of(ask({**hidden, "stream": True}, on=engine(*script)))
    assert joined(events) == omitted["content"]
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert deltas == ["signature_delta", "text_delta"]
    usages = [data["usage"] for name, data in events if name == "message_delta"]
    assert usages == [omitted["usage"]]
    assert events[0][1]["message"]["usage"]["output_tokens_details"] is None
    # Sent back, a block without its text adds nothing to the prompt.
    turn = {"role": "assistant", "content": omitted["content"]}
    plain = {"role": "assistant", "content": "I look."}
    asked = of_message({"messages": [*SAID, turn, *SAID]})
    assert asked.prompt_ids == of_message({"messages": [*SAID, plain, *SAID]}).prompt_ids


@pytest.mark.parametrize("stream", [False, True])
def test_without_output_the_prompt_is_computed_and_cached(stream: bool) -> None:
    made = engine("", reason=FinishReason.LENGTH)
    said = [{"role": "user", "content": "a" * 2042}]  # fills the context
    reply = ask({**ASKED, "messages": said, "max_tokens": 0, "stream": stream}, on=made)
    assert reply.status == 200
    (asked,) = made.asked
    assert (asked.sampling.max_tokens, asked.sampling.prompt_logprobs) == (0, 0)
    if not stream:
        assert (reply.json["content"], reply.json["stop_reason"]) == ([], "max_tokens")


NEUTRAL: list[dict[str, Any]] = [
    {"speed": "standard"},
    {"diagnostics": {"previous_message_id": None}},
    {"metadata": {"user_id": "u" * 1000}},
    {"cache_control": {"type": "ephemeral", "ttl": None}},
    {"output_config": {"effort": None, "format": None, "task_budget": None}},
    {"thinking": {"type": "disabled", "budget_tokens": None, "display": None}},
]


@pytest.mark.parametrize("sent", NEUTRAL)
def test_what_asks_for_nothing_is_accepted(sent: dict[str, Any]) -> None:
    reply = ask({**ASKED, **sent})
    assert (reply.status, reply.headers.get("x-quire-ignored-fields")) == (200, None)


def test_a_region_is_a_hint() -> None:
    reply = ask({**ASKED, "inference_geo": "eu"})
    assert reply.headers["x-quire-ignored-fields"] == "inference_geo"


@pytest.mark.parametrize(("path", "sent"), [(PATH, ASKED), (COUNT, {"messages": SAID})])
def test_beta_clients_add_a_parameter_to_the_query(path: str, sent: dict[str, Any]) -> None:
    assert ask(sent, path=f"{path}?beta=true").status == 200
    status, kind, words = refusal(sent, path=f"{path}?beta=true&other=1")
    assert (status, kind) == (400, "invalid_request_error")
    assert '"other"' in words


def test_conversations_may_have_many_messages() -> None:
    turns = [{"role": role, "content": ""} for role in ("user", "assistant")] * 2100
    made = engine()
    made.card = replace(CARD, max_model_len=60_000)
    assert ask({**ASKED, "messages": [*turns, *SAID]}, on=made).status == 200
    assert made.asked[0].prompt_ids.count(ord(";")) == 4201


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages is missing"),
    "an empty list": ({"messages": []}, "messages is []"),
    "no object": ({"messages": ["hi"]}, 'messages[0] is "hi"'),
    "an unknown role": (
        {"messages": [{"role": "robot", "content": "a"}]},
        "user, assistant and sy",
    ),
    "a role of lists": ({"messages": [{"role": [], "content": "a"}]}, "messages[0].role is []"),
    "an image of the system": (
        {"messages": [{"role": "system", "content": [{"type": "image"}]}]},
        'messages[0].content[0].type is "image"; text is allowed here',
    ),
    "thinking between tools": ({"thinking": {"type": "between_tools"}}, "not between calls of"),
    "an unknown display": (
        {"thinking": {"type": "adaptive", "display": "full"}},
        "display of summarized or omitted",
    ),
    "another speed": ({"speed": "fast"}, "there is one speed"),
    "a message to compare": ({"diagnostics": {"previous_message_id": "msg_a"}}, "not compared"),
    "a tool that is not offered": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "train"}},
        'tool_choice names "train"',
    ),
    "an unknown key": ({"messages": [{**SAID[0], "name": "me"}]}, 'messages[0] has "name"'),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    "an image": (blocks({"type": "image", "source": {}}), 'messages[0].content[0].type is "image"'),
    "a document": (blocks({"type": "document"}), 'messages[0].content[0].type is "document"'),
    "an image in a result": (
        {
            "messages": [
                *HISTORY[:2],
                *blocks(
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}
                )["messages"],
            ]
        },
        'messages[2].content[0].content[0].type is "image"',
    ),
    "a result without its call": (
        blocks({"type": "tool_result", "tool_use_id": "t9", "content": "a"}),
        'tool_use_id is "t9"',
    ),
    "a block without text": (blocks({"type": "text"}), "messages[0].content[0].text is missing"),
    "a key of a block": (blocks({"type": "text", "text": "a", "bold": 1}), '"bold"'),
    "a ttl that is no text": (
        {"cache_control": {"type": "ephemeral", "ttl": {}}},
        "cache_control is",
    ),
    "a cache_control of another type": (
        blocks({"type": "text", "text": "a", "cache_control": {"type": "forever"}}),
        "messages[0].content[0].cache_control is",
    ),
    "a ttl that is not offered": (
        {"cache_control": {"type": "ephemeral", "ttl": "2d"}},
        "cache_control is",
    ),
    "a call as the last block": ({"messages": HISTORY[:2]}, "does not end with text"),
    "an image as system": ({"system": [{"type": "image"}]}, 'system[0].type is "image"'),
    "no max_tokens": ({"max_tokens": None}, "max_tokens is missing"),
    "max_tokens of false": ({"max_tokens": False}, "max_tokens is false"),
    "a temperature above 1": ({"temperature": 1.5}, "0 to 1"),
    "a tool of the server": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        'tools[0].type is "web_search_20250305"',
    ),
    "a tool without a schema": ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
    "a schema of a list": (
        {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema: the schema has the type",
    ),
    "a tool twice": ({"tools": [TOOL, TOOL]}, 'two functions named "weather"'),
    "an unknown tool_choice": ({"tools": [TOOL], "tool_choice": "auto"}, 'tool_choice is "auto"'),
    "a choice of no tool": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        '"other"',
    ),
    "a flag of another type": (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": {}}},
        "disable_parallel_tool_use is {}",
    ),
    "an error of another type": (
        {
            "messages": [
                *HISTORY[:2],
                *blocks({"type": "tool_result", "tool_use_id": "t1", "is_error": 0})["messages"],
            ]
        },
        "messages[2].content[0].is_error is 0",
    ),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "no tools"),
    "a budget as large as the answer": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking.budget_tokens is 1024",
    ),
    "a budget of no tokens": (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens is 0",
    ),
    "a budget as a text": (
        {"thinking": {"type": "adaptive", "budget_tokens": "7"}},
        'thinking.budget_tokens is "7"',
    ),
    "a budget without reasoning": (
        {"thinking": {"type": "disabled", "budget_tokens": 7}},
        "thinking is disabled",
    ),
    "a type of thinking": ({"thinking": {"type": "deep"}}, "thinking is"),
    "stop under OpenAI's name": ({"stop": "a"}, "stop_sequences"),
    "stop_sequences as a text": ({"stop_sequences": "a"}, 'stop_sequences is "a"'),
    "too many stop_sequences": ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
    "n": ({"n": 2}, '"n" is not a field'),
    "metadata with other keys": ({"metadata": {"user": "me"}}, "metadata is"),
    "a format without a schema": ({"output_config": {"format": {"type": "text"}}}, "json_schema"),
    "servers of tools": ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
}


@each_case("case", REFUSED)
def test_a_refusal_names_what_is_wrong(case: str) -> None:
    body, words = REFUSED[case]
    status, kind, message = refusal({**ASKED, **body})
    assert (status, kind) == (400, "invalid_request_error"), message
    assert words in message


@pytest.mark.parametrize(
    ("raw", "path"),
    [(raw, path) for raw in (b"", b"{", b"[]", b'{"messages": [') for path in (PATH, COUNT)],
)
def test_an_unreadable_body_is_an_invalid_request(raw: bytes, path: str) -> None:
    assert refusal(raw, path=path)[:2] == (400, "invalid_request_error")


def test_errors_of_the_edge_have_this_apis_form() -> None:
    assert refusal(b"", path=f"{PATH}/none")[:2] == (404, "not_found_error")
    assert refusal(b"", method="GET")[:2] == (405, "invalid_request_error")
    assert refusal({**ASKED, "model": "other"})[:2] == (404, "not_found_error")
    assert refusal(b"x" * 9999, max_body_bytes=4096)[:2] == (413, "request_too_large")
    encoded = {"content-encoding": "gzip"}
    assert refusal(b"x", headers=encoded)[:2] == (415, "invalid_request_error")
    assert refusal(ASKED, api_key=("k",))[:2] == (401, "authentication_error")
    long = {**ASKED, "messages": [{"role": "user", "content": "a" * 3000}]}
    status, kind, message = refusal(long)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")
    assert "2048" in message


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "k", "anthropic-version": "2023-06-01"}, 200),
        ({"authorization": "Bearer k"}, 200),
        ({"x-api-key": "other"}, 401),
        ({"authorization": "Basic k"}, 401),
        ({}, 401),
    ],
)
def test_the_key_is_in_either_header(headers: dict[str, str], status: int) -> None:
    assert ask(ASKED, headers=headers, api_key=("k",)).status == status


def test_a_server_without_capacity_answers_529() -> None:
    async def exchange() -> Reply:
        site = Site(engine())
        site.server_state.lifecycle.drain()
        return await site.post(PATH, ASKED)

    reply = asyncio.run(exchange())
    assert (reply.status, reply.json["error"]["type"]) == (529, "overloaded_error")


def test_an_error_within_a_stream_is_its_last_event() -> None:
    made = engine("a", "b")
    made.fails_with, made.fails_after = WorkerError("it died"), 1
    reply = ask({**ASKED, "stream": True}, on=made)
    name, data = events_of(reply)[-1]
    assert name == "error"
    assert data["error"] == {"type": "api_error", "message": "it died"}
    assert data["request_id"] == reply.headers["request-id"]


def test_an_answer_without_text_has_no_blocks() -> None:
    assert ask(ASKED, on=engine("")).json["content"] == []
    names = [name for name, _ in events_of(ask({**ASKED, "stream": True}, on=engine("")))]
    assert names == ["message_start", "message_delta", "message_stop"]
