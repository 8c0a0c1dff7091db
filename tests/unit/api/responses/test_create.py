"""POST /v1/responses: items, events, tools and refusals in the form of OpenAI's Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.api.openai.responses.history import sealed
from quire.base.errors import WorkerError
from quire.base.records import FinishReason
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.unit.api.responses.asking import (
    ASKED,
    CHAT,
    PATH,
    TOOL,
    ask,
    engine,
    events_of,
    kinds_of,
    of_chat,
    of_response,
    without_ids,
)
from tests.unit.api.shown_conversation import CALL, CHAT_TOOL, SCHEMA

SAID = [{"role": "user", "content": "hi"}]
ENDED = ["output_text.done", "content_part.done", "output_item.done"]


def test_a_whole_answer_is_a_response() -> None:
    made = engine()
    reply = ask({**ASKED, "metadata": {"a": "b"}, "instructions": "Be short."}, on=made)
    response = reply.json
    digits = response["id"].removeprefix("resp_")
    assert len(digits) == 24
    assert response["output"] == [
        {
            "id": f"msg_{digits}o0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
            ],
        }
    ]
    prompt_tokens = len(made.asked[0].prompt_ids)
    assert response["usage"] == {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + 2,
    }
    shown = ("status", "model", "metadata", "instructions", "max_output_tokens", "seed", "error")
    assert [response[name] for name in shown] == [
        *("completed", "fake", {"a": "b"}, "Be short.", 8, 7, None)
    ]


def test_the_events_of_a_stream_come_in_order() -> None:
    events = events_of(ask({**ASKED, "stream": True}, on=engine("Hel", "lo", "!")))
    assert kinds_of(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 3,
        *ENDED,
        "completed",
    ]
    assert events[0]["sequence_number"] == 0
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["status"] == "in_progress"
    assert [event["delta"] for event in events[4:7]] == ["Hel", "lo", "!"]
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_streamed_items_are_those_of_the_whole_answer(cut: int) -> None:
    text = f"<think>It is asked.</think>I look.{CALL}{CALL}"
    script = [text[at : at + cut] for at in range(0, len(text), cut)]
    body = {**ASKED, "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
    whole = ask(body, on=engine(*script)).json
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    thoughts, said, first, second = whole["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "It is asked."}]
    assert thoughts["encrypted_content"] == sealed("It is asked.")
    assert said["content"][0]["text"] == "I look."
    assert json.loads(first["arguments"]) == {"city": "Ulm"}
    assert first["call_id"] != second["call_id"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0 or cut == 1000
    events = events_of(ask({**body, "stream": True}, on=engine(*script)))
    streamed = events[-1]["response"]["output"]
    assert without_ids(streamed) == without_ids(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed
    for at, item in enumerate(streamed):
        deltas = [e["delta"] for e in events if "delta" in e and e["output_index"] == at]
        assert "".join(deltas) == item.get("arguments") or item["content"][0]["text"]
    assert kinds_of(events)[:5] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        "reasoning_text.delta",
    ]
    assert kinds_of(events)[-3:] == [
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_at_its_length_is_incomplete(stream: bool) -> None:
    reply = ask({**ASKED, "stream": stream}, on=engine("a", reason=FinishReason.LENGTH))
    if stream:
        last = events_of(reply)[-1]
        assert last["type"] == "response.incomplete"
    response = last["response"] if stream else reply.json
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


def test_an_answer_without_text_has_no_items() -> None:
    assert ask(ASKED, on=engine("")).json["output"] == []
    events = events_of(ask({**ASKED, "stream": True}, on=engine("")))
    assert kinds_of(events) == ["created", "in_progress", "completed"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_text(stream: bool) -> None:
    script = ("<think>", "a", "</think>", "b", "c")
    body = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = ask({**body, "stream": stream}, on=engine(*script))
    response = events_of(reply)[-1]["response"] if stream else reply.json
    (part,) = response["output"][1]["content"]
    assert part["text"] == "bc"
    assert [token["token"] for token in part["logprobs"]] == ["b", "c"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2


def test_an_error_within_a_stream_is_an_event_and_the_response_has_failed() -> None:
    made = engine("a", "b")
    made.fails_with, made.fails_after = WorkerError("it died"), 1
    events = events_of(ask({**ASKED, "stream": True}, on=made))
    assert kinds_of(events)[-2:] == ["error", "failed"]
    assert events[-2] == {
        "type": "error",
        "code": "worker_error",
        "message": "it died",
        "param": None,
        "sequence_number": len(events) - 2,
    }
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {
        "code": "server_error",
        "message": "it died",
        "param": None,
        "type": "server_error",
    }
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "a")


ITEMS: list[Any] = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
        {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "call_id": "t1", "name": "weather", "arguments": '{"city": "Ulm"}'},
    {"type": "function_call", "call_id": "t2", "name": "weather", "arguments": '{"city": "Köln"}'},
    {"type": "function_call_output", "call_id": "t1", "name": "weather", "output": "Rain."},
    {"type": "function_call_output", "call_id": "t2", "output": [
        {"type": "input_text", "text": "Snow.", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
    {"type": "reasoning", "summary": [], "encrypted_content": sealed("So.")},
    {"role": "assistant", "content": "Both."},
    {"role": "assistant", "content": "Wet."},
    {"role": "user", "content": "And?"},
]  # fmt: skip
MESSAGES: list[Any] = [
    {"role": "system", "content": "Answer."},
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": id_,
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps({"city": city})},
            }
            for id_, city in (("t1", "Ulm"), ("t2", "Köln"))
        ],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "t2", "content": "Snow."},
    {"role": "assistant", "content": "Both.", "reasoning_content": "So."},
    {"role": "assistant", "content": "Wet."},
    {"role": "user", "content": "And?"},
]


def test_a_conversation_has_the_prompt_and_parameters_of_the_same_chat() -> None:
    both = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "stop": ["x"]}
    asked = of_response({**both, "instructions": "Answer.", "input": ITEMS, "tools": [TOOL]})
    chat = of_chat({**both, "messages": MESSAGES, "tools": [CHAT_TOOL], "max_tokens": 8})
    assert bytes(asked.prompt_ids).decode() == bytes(chat.prompt_ids).decode()
    assert asked.sampling == chat.sampling
    assert asked.text_rules == chat.text_rules


@each_case(
    ("sent", "chat"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (
            {"tool_choice": {"type": "function", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "weather"}],
                }
            },
            {"tool_choice": "required"},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"reasoning": {"context": "auto", "mode": "standard"}}, {}),
        ({"background_options": {"completion_window": "soonest"}}, {}),
        ({"image": {"context_compression": "auto"}, "access_programs": None}, {}),
    ],
)
def test_a_field_has_the_prompt_and_grammar_of_the_same_chat(sent: Any, chat: Any) -> None:
    asked = of_response({**sent, "tools": [TOOL]})
    same = of_chat({**chat, "messages": SAID, "seed": 7, "max_tokens": 8, "tools": [CHAT_TOOL]})
    assert asked.prompt_ids == same.prompt_ids
    grammars = [each.sampling.structured_outputs for each in (asked, same)]
    assert [g and g.text for g in grammars] == [grammars[0] and grammars[0].text] * 2


def test_a_response_repeats_what_was_sent() -> None:
    labels = {
        "user": "me",
        "safety_identifier": "id",
        "max_tool_calls": 3,
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
    }
    nothing = dict.fromkeys((*labels, "prompt_cache_options", "prompt", "moderation"))
    plain = ask(ASKED).json
    assert {name: plain[name] for name in nothing} == nothing
    found = ask({**ASKED, **labels, "prompt_cache_options": {"mode": "explicit"}}).json
    options = {"mode": "explicit", "ttl": "30m"}
    assert {name: found[name] for name in nothing} == {
        **nothing,
        **labels,
        "prompt_cache_options": options,
    }
    ignored = ask({**ASKED, "prompt": {"id": "pmpt_1"}}, unknown_fields="warn").json
    assert ignored["prompt"] is None
    effort = {"effort": "low", "summary": None, "context": "auto", "mode": "standard"}
    assert ask({**ASKED, "reasoning": {"effort": "low"}}).json["reasoning"] == effort


FLAT_CHOICE = {"type": "function", "name": "weather"}
FLAT_ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [FLAT_CHOICE]}


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("required", "required"),
        (FLAT_CHOICE, FLAT_CHOICE),
        ({"type": "function", "function": {"name": "weather"}}, FLAT_CHOICE),
        ({**FLAT_ALLOWED, "mode": "required"}, {**FLAT_ALLOWED, "mode": "required"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"function": {"name": "weather"}}]},
            },
            FLAT_ALLOWED,
        ),
    ],
)
def test_a_response_repeats_tools_in_its_own_form(sent: Any, shown: Any) -> None:
    neutral = {"defer_loading": False, "allowed_callers": ["direct"]}
    body = {**ASKED, "tools": [{**TOOL, **neutral}], "tool_choice": sent}
    reply = ask(body, on=engine(CALL)).json
    assert reply["tool_choice"] == shown
    assert reply["tools"] == [{**TOOL, "strict": False, **neutral}]
    assert reply["parallel_tool_calls"] is True
    one = ask({**body, "parallel_tool_calls": False}, on=engine(CALL)).json
    assert one["parallel_tool_calls"] is False


def test_the_fields_of_a_coding_agent_pass() -> None:
    developer = [{"type": "input_text", "text": "Be brief."}]
    body = {
        "model": "fake",
        "instructions": "You write code.",
        "input": [
            {"type": "message", "role": "developer", "content": developer},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        ],
        "tools": [{**TOOL, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"installation": "a"},
    }
    reply = ask(body)
    assert reply.status == 200, reply.body
    assert "x-quire-ignored-fields" not in reply.headers


def test_the_phase_of_a_message_goes_to_the_template() -> None:
    made = engine()
    made.template = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.phase or '-' }}:{{ m.content }};{% endfor %}"},
        variables={},
    )
    said = {"role": "assistant", "content": "Hm.", "phase": "commentary"}
    assert ask({**ASKED, "input": [said, {**said, "phase": None}]}, on=made).status == 200
    assert bytes(made.asked[0].prompt_ids) == b"commentary:Hm.;-:Hm.;"


HARMONY = [
    *("<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>", "commentary", "<|message|>", "I ", "look.", "<|end|>", "<|start|>"),
    *("assistant", "<|channel|>", "final", "<|message|>", "Yes", "\n", "no."),
]


@pytest.mark.parametrize("cut", [0, 1, 1000])
def test_commentary_and_the_answer_are_messages_with_phases(cut: int) -> None:
    text = "".join(HARMONY)
    script = [text[at : at + cut] for at in range(0, len(text), cut)] if cut else HARMONY
    body = {**ASKED, "include": ["message.output_text.logprobs"], "max_output_tokens": 99}
    harmony = {"reasoning_parser": "harmony"}
    whole = ask(body, on=engine(*script), **harmony).json["output"]
    assert [item["type"] for item in whole] == ["reasoning", "message", "message"]
    assert [item.get("phase") for item in whole] == [None, "commentary", "final_answer"]
    assert [item["content"][0]["text"] for item in whole] == ["Hm.", "I look.", "Yes\nno."]
    events = events_of(ask({**body, "stream": True}, on=engine(*script), **harmony))
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("phase") for item in added] == [None, "commentary", "final_answer"]
    if not cut:
        tokens = [[one["token"] for one in item["content"][0]["logprobs"]] for item in whole[1:]]
        assert tokens == [["I ", "look."], ["Yes", "\n", "no."]]
    # Sent back, they are the message of the same chat.
    chat = ask({"messages": SAID, "seed": 7}, path=CHAT, on=engine(*script), **harmony)
    message = chat.json["choices"][0]["message"]
    assert message["content"] == "I look.\nYes\nno."
    asked = of_response({"input": [*SAID, *whole, *SAID]})
    assert asked.prompt_ids == of_chat({"messages": [*SAID, message, *SAID]}).prompt_ids


COUNT = f"{PATH}/input_tokens"


def test_the_tokens_of_a_prompt_are_counted() -> None:
    fields = {"input": ITEMS, "instructions": "Answer.", "tools": [TOOL]}
    made = engine()
    reply = ask(fields, path=COUNT, on=made)
    expected = len(of_response(fields).prompt_ids)
    assert reply.json == {"object": "response.input_tokens", "input_tokens": expected}
    assert made.asked == []
    # Beyond the context they are counted too, and only without truncation.
    long = {"input": long_talk(12)}
    whole = ask(long, path=COUNT, on=engine(context=512)).json["input_tokens"]
    cut = ask({**long, "truncation": "auto"}, path=COUNT, on=engine(context=512))
    assert cut.json["input_tokens"] <= 512 < whole
    hints = ask({"input": "a", "reasoning": {"summary": "auto"}}, path=COUNT)
    assert hints.headers["x-quire-ignored-fields"] == "reasoning.summary"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "max_output_tokens": 4}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "personality": "friendly"}, "personality"),
        ({"input": "a", "previous_response_id": "resp_0"}, "previous_response_id"),
    ],
)
def test_a_count_refuses_what_a_response_refuses(body: Any, param: str) -> None:
    reply = ask(body, path=COUNT)
    assert reply.status == (404 if param == "previous_response_id" else 400)
    assert reply.error["param"] == param


def test_a_compaction_is_refused_with_what_to_do() -> None:
    reply = ask({"input": "a"}, path=f"{PATH}/compact")
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")
    assert "conversations are not compacted here" in reply.error["message"]
    assert 'truncation: "auto"' in reply.error["message"]
    assert ask(b"", path=COUNT).status == 400  # no id of a response, so no 405


def test_hints_are_reported() -> None:
    body = {**ASKED, "reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}}
    header = ask(body).headers["x-quire-ignored-fields"]
    assert {*header.split(", ")} == {"reasoning.summary", "text.verbosity"}
    made = engine()
    made.template = ChatTemplate({"default": "{{ messages[0].content }}"}, variables={})
    reply = ask({**ASKED, "reasoning": {"effort": "high"}}, on=made)
    assert reply.headers["x-quire-ignored-fields"] == "reasoning.effort"


def long_talk(num_turns: int) -> list[Any]:
    turns: list[Any] = [{"role": "system", "content": "Keep this."}]
    for at in range(num_turns):
        turns.append({"role": "user", "content": f"Question {at}."})
        turns.append({"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": "{}"})
        turns.append({"type": "function_call_output", "call_id": f"c{at}", "output": "x" * 40})
    return [*turns, {"role": "user", "content": "And now?"}]


def test_truncation_drops_the_oldest_turns_and_keeps_system_messages() -> None:
    made = engine(context=512)
    body = {"input": long_talk(12), "seed": 7, "truncation": "auto", "max_output_tokens": 64}
    assert ask(body, on=made).status == 200
    (asked,) = made.asked
    text = bytes(asked.prompt_ids).decode()
    assert text.startswith("system:Keep this.;user:Question ")
    assert text.endswith("user:And now?;")
    kept = text.count("Question")
    # One turn more would not fit.
    per_turn = text.index(";user:", 20) - text.index(";user:")
    assert 0 < kept < 12
    assert len(asked.prompt_ids) <= 512 - 64 < len(asked.prompt_ids) + per_turn + 8


def test_truncation_keeps_as_much_as_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.generation.text_bounds._MIN_TEXT_LIMIT", 1)
    made = engine(context=512)
    monkeypatch.setattr(type(made.tokenizer), "min_num_tokens", lambda self, text: 1)
    body = {"input": long_talk(120), "truncation": "auto", "max_output_tokens": 64}
    assert ask({**body, "truncation": "disabled"}, on=made).status == 400
    assert ask(body, on=made).status == 200
    assert bytes(made.asked[0].prompt_ids).decode().endswith("user:And now?;")


@pytest.mark.parametrize("truncation", ["disabled", "auto"])
def test_what_cannot_fit_is_refused_with_both_numbers(truncation: str) -> None:
    body = {"input": "x" * 900, "truncation": truncation}
    error = ask(body, on=engine(context=512)).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "512" in error["message"]


def items(*given: Any) -> dict[str, Any]:
    return {"input": [*given]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a context of reasoning": (
        {"reasoning": {"context": "all_turns"}},
        'reasoning.context is "all_turns"; "auto" is allowed',
    ),
    "a mode of reasoning": ({"reasoning": {"mode": "pro"}}, 'reasoning.mode is "pro"'),
    "a phase": (
        items({"role": "assistant", "content": "a", "phase": "draft"}),
        'input[0].phase is "draft"; commentary and final_answer are allowed',
    ),
    "a breakpoint": (
        items(
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"ttl": "1h"}}
                ],
            }
        ),
        'input[0].content[0].prompt_cache_breakpoint.ttl is "1h"',
    ),
    "an output of another function": (
        items(
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "name": "g", "output": "a"},
        ),
        'has the name "g", and the function_call with its call_id the name "f"',
    ),
    "a name of an output": (
        items({"type": "function_call_output", "call_id": "c", "name": 5, "output": "a"}),
        "input[0].name is 5",
    ),
    "a stored prompt": (
        {"prompt": {"id": "pmpt_1"}},
        "no prompts are stored here; write its text as instructions and input",
    ),
    "a prompt as text": ({"prompt": "hi"}, "which takes input"),
    "a warm cache": (
        {"prompt_cache_options": {"prewarm": True}},
        "prompt_cache_options.prewarm is true: a prompt is computed with an answer only",
    ),
    "a later window": (
        {"background_options": {"completion_window": "2h"}},
        'background_options.completion_window is "2h"',
    ),
    "a namespace of a call": (
        items(
            {"type": "function_call", **{"call_id": "c", "name": "f", "arguments": "{}"}}
            | {"namespace": 3}
        ),
        "input[0].namespace is 3",
    ),
    "no input": ({"input": None}, "input is missing"),
    "an empty list": (items(), "input is []"),
    "no object": (items("hi"), 'input[0] is "hi"'),
    "an unknown role": (items({"role": "tool", "content": "a"}), 'input[0].role is "tool"'),
    "no content": (items({"role": "user"}), "input[0].content is missing"),
    "an unknown key": (items({"role": "user", "content": "a", "name": "b"}), 'input[0] has "name"'),
    "an item of a hosted tool": (
        items({"type": "web_search_call", "id": "ws_1"}),
        'input[0].type is "web_search_call"',
    ),
    "an image": (
        items({"role": "user", "content": [{"type": "input_image"}]}),
        "the model reads text only",
    ),
    "output text of a user": (
        items({"role": "user", "content": [{"type": "output_text", "text": "a"}]}),
        'input[0].content[0].type is "output_text"',
    ),
    "a part without text": (
        items({"role": "user", "content": [{"type": "input_text"}]}),
        "input[0].content[0].text is missing",
    ),
    "an output without its call": (
        items({"type": "function_call_output", "call_id": "c9", "output": "a"}),
        'call_id "c9"',
    ),
    "a call without a name": (
        items({"type": "function_call", "call_id": "c", "arguments": "{}"}),
        "input[0].name is missing",
    ),
    "arguments as an object": (
        items({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}),
        "input[0].arguments is {}",
    ),
    "an id of another type": (items({"role": "user", "content": "a", "id": 3}), "input[0].id is 3"),
    **{
        f"the tool {kind}": ({"tools": [{"type": kind}]}, f'tools[0].type is "{kind}"')
        for kind in (
            *("web_search", "file_search", "computer_use_preview", "code_interpreter"),
            *("image_generation", "mcp", "custom"),
        )
    },
    "a tool in the form of chats": ({"tools": [CHAT_TOOL]}, "tools[0] has function"),
    "a schema of a list": (
        {"tools": [{**TOOL, "parameters": {"type": "array"}}]},
        "tools[0].parameters: the schema has the type",
    ),
    "an unknown key of a tool": ({"tools": [{**TOOL, "async": True}]}, "tools[0].async is true"),
    "an unknown key of a tool with a neutral value": (
        {"tools": [{**TOOL, "other": False}]},
        "tools[0].other is false",
    ),
    "a hosted tool as the choice": (
        {"tools": [TOOL], "tool_choice": {"type": "web_search"}},
        "tool_choice is",
    ),
    "a choice of no tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}},
        '"other"',
    ),
    "a format in the form of chats": (
        {"text": {"format": {"type": "json_schema", "json_schema": {}}}},
        "text.format is",
    ),
    "a format without a schema": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format is",
    ),
    "an effort": ({"reasoning": {"effort": "huge"}}, 'reasoning.effort is "huge"'),
    "an inclusion": ({"include": ["message.text"]}, 'include holds "message.text"'),
    "an inclusion without a list": ({"include": "message.output_text.logprobs"}, "include is"),
    "alternatives without log-probabilities": ({"top_logprobs": 2}, "top_logprobs is 2"),
    "a truncation": ({"truncation": "yes"}, 'truncation is "yes"'),
    "metadata": ({"metadata": {"a": 1}}, "metadata is"),
    "max_output_tokens of 0": ({"max_output_tokens": 0}, "max_output_tokens is 0"),
    "the name of chats": ({"max_tokens": 5}, "write it as max_output_tokens"),
    "messages": ({"messages": []}, "write it as input"),
    "a conversation": ({"conversation": 5}, "the id of a conversation"),
    "a response_format": ({"response_format": {}}, "write it as text.format"),
    "n": ({"n": 2}, '"n" is not a field'),
    "options of other streams": (
        {"stream": True, "stream_options": {"include_usage": True}},
        "include_usage",
    ),
}


@each_case("case", REFUSED)
def test_a_refusal_names_what_is_wrong(case: str) -> None:
    body, words = REFUSED[case]
    reply = ask({**ASKED, **body})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), reply.body
    assert words in reply.error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"input": ['])
def test_an_unreadable_body_is_an_invalid_request(raw: bytes) -> None:
    reply = ask(raw)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


def test_errors_of_the_edge_have_openais_form() -> None:
    assert ask({**ASKED, "model": "other"}).error["code"] == "model_not_found"
    assert ask(ASKED, api_key=("k",)).error["code"] == "invalid_api_key"
    assert ask(ASKED, path=f"{PATH}/a/b").error["code"] == "unknown_url"
