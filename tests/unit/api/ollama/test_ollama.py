"""Ollama's API: answers, lines, options, tools, models and errors in its form."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import WorkerError
from quire.base.records import FinishReason
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.gguf_writer import write_gguf
from tests.unit.api.fake_engine import CARD, FakeEngine, Reply, Site

CHAT, GENERATE, OPENAI = "/api/chat", "/api/generate", "/v1/chat/completions"
SAID = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"messages": SAID, "stream": False, "options": {"seed": 7}}
# Shows everything of a conversation that may change a prompt.
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.role == 'tool' %}({{ m.name }}){% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
COUNTS = {
    "done": True,
    "total_duration": 10_000_000,
    "load_duration": 0,
    "prompt_eval_duration": 1_000_000,
    "eval_count": 2,
    "eval_duration": 8_000_000,
    "seed": 7,
}


def engine(*script: str, reason: FinishReason = FinishReason.STOP, **card: Any) -> Any:
    made = FakeEngine(*script, card=replace(CARD, **{"max_model_len": 2048, **card}))
    made.template = ChatTemplate({"default": TEMPLATE}, variables={})
    made.last_reason = reason
    return made


def ask(
    body: Any,
    *,
    path: str = CHAT,
    on: Any = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> Reply:
    async def exchange() -> Reply:
        site = Site(on or engine(), **settings)
        raw = b"" if body is None else json.dumps(body).encode()
        reply = await site.call(method, path, raw, headers=headers)
        assert site.server_state.requests.num_open == 0
        return reply

    return asyncio.run(exchange())


def asked_by(body: dict[str, Any], path: str = CHAT) -> Any:
    """Return what the engine was asked by a request."""
    made = engine()
    reply = ask(body, path=path, on=made)
    assert reply.status == 200, reply.body
    return made.asked[0]


def refusal(body: Any, **options: Any) -> str:
    reply = ask(body, **options)
    assert reply.status == 400, reply.body
    assert reply.json.keys() == {"error"}
    words: str = reply.json["error"]
    return words


def test_a_whole_answer_has_text_counts_and_durations() -> None:
    made = engine()
    answer = ask(ASKED, on=made).json
    created = answer.pop("created_at")
    assert created.endswith("Z")
    assert answer == {
        **COUNTS,
        "model": "fake",
        "message": {"role": "assistant", "content": "Hello"},
        "done_reason": "stop",
        "prompt_eval_count": len(made.asked[0].prompt_ids),
    }


def test_a_stream_of_lines_is_the_default_and_has_the_parts_of_the_whole_answer() -> None:
    whole = ask(ASKED).json
    reply = ask({name: value for name, value in ASKED.items() if name != "stream"})
    assert reply.headers["content-type"] == "application/x-ndjson"
    *lines, last = reply.lines
    assert "".join(line["message"]["content"] for line in lines) == "Hello"
    assert [line["done"] for line in lines] == [False, False]
    assert {**last, "created_at": ""} == {
        **whole,
        "created_at": "",
        "message": {"role": "assistant", "content": ""},
    }


def test_a_completion_returns_a_context_that_the_next_one_continues() -> None:
    made = engine()
    first = ask({"prompt": "hi", "stream": False}, path=GENERATE, on=made).json
    prompt_ids = made.asked[0].prompt_ids
    assert (first["response"], first["context"]) == ("Hello", [*prompt_ids, 0, 1])
    streamed = ask({"prompt": "hi"}, path=GENERATE).lines
    assert streamed[-1]["context"] == first["context"]
    assert all("context" not in line for line in streamed[:-1])
    second = {"prompt": "on", "context": first["context"]}
    assert asked_by(second, GENERATE).prompt_ids == [*first["context"], *b"user:on;"]
    long = {"prompt": "hi", "context": [1] * 2045, "truncate": False}
    assert "maximum context length" in refusal(long, path=GENERATE)
    for bad in ([-1], [256], ["a"], "a", [True], {}):
        assert "context" in refusal({**second, "context": bad}, path=GENERATE)


def test_raw_prompts_and_models_without_a_template_are_used_as_they_are() -> None:
    assert asked_by({"prompt": "hi", "raw": True}, GENERATE).prompt_ids == [*b"hi"]
    made = engine()
    made.template = None
    assert ask({"prompt": "hi"}, path=GENERATE, on=made).status == 200
    assert made.asked[0].prompt_ids == [*b"hi"]
    for beside in ({"system": "be brief"}, {"context": [1]}):
        words = refusal({"prompt": "hi", "raw": True, **beside}, path=GENERATE)
        assert "raw are both given" in words
    system = {"prompt": "hi", "system": "Be brief."}
    assert bytes(asked_by(system, GENERATE).prompt_ids) == b"system:Be brief.;user:hi;"


def test_without_a_template_the_text_of_an_answer_is_continued() -> None:
    made = engine()
    made.template = None
    first = ask({"prompt": "hi", "stream": False}, path=GENERATE, on=made).json
    assert first["context"] == [*b"hi", 0, 1]
    second = {"prompt": "on", "context": first["context"], "stream": False}
    assert ask(second, path=GENERATE, on=made).json["context"] == [*b"hi", 0, 1, *b"on", 0, 1]
    raw = ask({"prompt": "hi", "raw": True, "stream": False}, path=GENERATE, on=made).json
    assert "context" not in raw


def test_thinking_without_a_template_is_listed_as_ignored() -> None:
    for think, names in ((True, "think"), ("high", "think"), (False, None), (None, None)):
        reply = ask({"prompt": "hi", "raw": True, "think": think}, path=GENERATE)
        assert reply.headers.get("x-quire-ignored-fields") == names


def test_the_newest_messages_that_fit_are_kept() -> None:
    def said(role: str, number: int) -> dict[str, Any]:
        return {"role": role, "content": f"{number:0100}"}

    turns = [said(role, at) for at in range(6) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "Be brief."}, *turns, *SAID]
    made = engine(max_model_len=512)
    sent = {"messages": messages, "stream": False}
    assert "maximum context length" in refusal({**sent, "truncate": False}, on=made)
    reply = ask(sent, on=made)
    assert reply.headers["x-quire-ignored-fields"] == "messages[:11]"
    kept = [messages[0], *turns[-2:], *SAID]
    # The same request as one with the messages that are left.
    assert made.asked[0].prompt_ids == asked_by({"messages": kept}).prompt_ids
    whole = {**sent, "truncate": True, "messages": messages[-4:]}
    assert "x-quire-ignored-fields" not in ask(whole, on=made).headers
    assert made.asked[1].prompt_ids == asked_by({"messages": messages[-4:]}).prompt_ids
    long = {**sent, "truncate": True, "messages": [*turns, {"role": "user", "content": "a" * 600}]}
    assert "maximum context length" in refusal(long, on=made)


def test_a_chat_that_fits_is_tokenized_once_and_its_hints_are_listed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, texts = engine(), list[str]()
    source = "{% for m in messages %}user:{{ m.content }};{% endfor %}"
    made.template = ChatTemplate({"default": source}, variables={})
    encode = made.tokenizer.encode

    def noted(text: str, **options: bool) -> list[int]:
        texts.append(text)
        return list(encode(text, **options))

    monkeypatch.setattr(made.tokenizer, "encode", noted)
    reply = ask({**ASKED, "think": "high"}, on=made)
    assert reply.status == 200, reply.body
    assert texts.count("user:hi;") == 1
    assert reply.headers["x-quire-ignored-fields"] == "think"


def test_more_bytes_than_are_tokenized_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.generation.text_bounds._MIN_TEXT_LIMIT", 1)
    made = engine(max_model_len=512)
    monkeypatch.setattr(type(made.tokenizer), "min_num_tokens", lambda self, text: 1)
    turns = [{"role": "user", "content": f"{at:0200}"} for at in range(60)]
    sent = {"messages": [*turns, *SAID], "stream": False}
    assert "are tokenized at once" in refusal({**sent, "truncate": False}, on=made)
    assert ask({**sent, "truncate": True}, on=made).status == 200
    assert 200 < len(made.asked[0].prompt_ids) < 512


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [
        ({}, 4, 448 - 4),
        ({"num_predict": 8}, 4, 504 - 4),
        ({"num_predict": 8, "num_keep": 0}, 0, 504),
        ({"num_predict": 8, "num_keep": 100}, 100, 404),
        ({"num_predict": 8, "num_keep": -1}, 503, 1),
        ({"num_predict": 8, "num_keep": 9999}, 503, 1),
    ],
)
def test_the_middle_of_a_prompt_that_does_not_fit_is_cut_out(
    options: dict[str, Any], first: int, last: int
) -> None:
    """An answer without a limit is left an eighth of the context."""
    made = engine(max_model_len=512)
    text = "".join(f"{at:03}," for at in range(200))
    sent = {"prompt": text, "raw": True, "stream": False, "options": options}
    reply = ask(sent, path=GENERATE, on=made)
    assert reply.headers["x-quire-ignored-fields"] == f"prompt[{first}:{800 - last}]"
    assert bytes(made.asked[0].prompt_ids) == (text[:first] + text[-last:]).encode()
    assert "maximum context length" in refusal({**sent, "truncate": False}, path=GENERATE, on=made)


def test_a_cut_prompt_keeps_its_begin_token_and_ends_with_what_was_sent() -> None:
    made = engine(max_model_len=512)
    made.tokenizer.bos_id = 2
    sent = {"prompt": "a" * 600 + "b", "raw": True, "stream": False, "options": {"num_keep": 1}}
    assert ask(sent, path=GENERATE, on=made).status == 200
    assert bytes(made.asked[0].prompt_ids) == b"\2" + b"a" * 446 + b"b"
    # The ids of an earlier answer are cut too, whatever their number.
    more = {"prompt": "hi", "context": [*range(9), *b"x" * 5000], "stream": False}
    reply = ask(more, path=GENERATE, on=made)
    assert bytes(made.asked[1].prompt_ids).startswith(bytes(range(4)) + b"xxx")
    assert bytes(made.asked[1].prompt_ids).endswith(b"xxxuser:hi;")
    assert reply.headers["x-quire-ignored-fields"].startswith("context[4:")
    # Texts that fit are not touched.
    short = {"prompt": "a" * 510, "raw": True, "stream": False}
    assert "x-quire-ignored-fields" not in ask(short, path=GENERATE, on=made).headers


def test_a_suffix_needs_a_model_with_infill_tokens() -> None:
    sent = {"prompt": "a", "suffix": "b"}
    assert "no tokens for infilling" in refusal(sent, path=GENERATE)
    made = engine()
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    made.tokenizer.marks = dict.fromkeys(marks, 1)
    answer = ask({**sent, "stream": False}, path=GENERATE, on=made).json
    assert bytes(made.asked[0].prompt_ids) == b"<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert answer["context"] == [*made.asked[0].prompt_ids, 0, 1]
    shown = ask({"model": "fake"}, path="/api/show", on=made).json
    assert "insert" in shown["capabilities"]


def test_a_prompt_with_a_gap_is_not_cut() -> None:
    made = engine(max_model_len=512)
    made.tokenizer.marks = dict.fromkeys(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), 1)
    sent = {"prompt": "a" * 300, "suffix": "b" * 300}
    assert "maximum context length" in refusal(sent, path=GENERATE, on=made)


@each_case("path", [CHAT, GENERATE])
@each_case(
    ("keep", "reason"),
    [
        *((keep, "load") for keep in (None, "5m", "10s", -1, "m")),
        *((keep, "unload") for keep in (0, "0", "0s", "0h0m0.0s")),
    ],
)
def test_without_a_prompt_nothing_is_generated(path: str, keep: Any, reason: str) -> None:
    made = engine()
    answer = ask({"model": "fake", "keep_alive": keep}, path=path, on=made).json
    assert (answer["done"], answer["done_reason"], made.asked) == (True, reason, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"think": 3},
        {"options": {"temperature": "hot"}},
        {"format": 3},
        {"top_logprobs": 21, "logprobs": True},
        {"keep_alive": True},
    ],
)
def test_malformed_fields_are_refused_in_requests_that_do_not_need_them(wrong: Any) -> None:
    assert next(iter(wrong)) in refusal(wrong)
    assert next(iter(wrong)) in refusal(wrong, path=GENERATE)
    assert next(iter(wrong)) in refusal({**wrong, "prompt": "a", "raw": True}, path=GENERATE)
    assert "tools is" in refusal({"tools": 3})
    assert "context holds" in refusal({"context": [-1]}, path=GENERATE)


# A conversation here, and the same one in OpenAI's form.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tools": [TOOL]}, {"tools": [TOOL]}),
    (
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *SAID,
                {
                    "role": "assistant",
                    "thinking": "Look.",
                    "content": "I look.",
                    "tool_calls": [
                        {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
                    ],
                },
                {"role": "tool", "tool_name": "weather", "content": "cold"},
            ]
        },
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *SAID,
                {
                    "role": "assistant",
                    "reasoning_content": "Look.",
                    "content": "I look.",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
                        }
                    ],
                },
                {"role": "tool", "name": "weather", "content": "cold"},
            ]
        },
    ),
    ({"think": False}, {"reasoning_effort": "none"}),
    ({"think": True}, {"reasoning_effort": "medium"}),
    ({"think": "high"}, {"reasoning_effort": "high"}),
    ({"think": "max"}, {"reasoning_effort": "max"}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    (
        {"format": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    ({"format": ""}, {}),
    (
        {"options": {"seed": 7, "num_predict": 9, "repeat_penalty": 1.5, "stop": ["a"]}},
        {"max_tokens": 9, "repetition_penalty": 1.5, "stop": ["a"], "repeat_last_n": 64},
    ),
    ({"options": {"seed": 7, "num_predict": -1, "min_p": 0.25}}, {"min_p": 0.25}),
    (
        {"options": {"seed": 7, "presence_penalty": 1, "repeat_last_n": -1}},
        {"presence_penalty": 1, "repeat_last_n": -1},
    ),
    (
        {"options": {"seed": 7, "min_p": 0.25, "top_p": 0.5, "temperature": 0.5}},
        {
            "min_p": 0.25,
            "top_p": 0.5,
            "temperature": 0.5,
            "samplers": ["temperature", "top_p", "min_p"],
        },
    ),
    ({"options": {"seed": 7, "mirostat": 1}}, {"mirostat": 1}),
    ({"options": {"seed": 7, "num_predict": 0}}, {}),
    ({"options": {"seed": 7, "num_predict": 4096}}, {}),
    ({"messages": [{**SAID[0], "thinking": "", "tool_name": ""}]}, {}),
    ({"truncate": True}, {}),
    ({"options": {"seed": 7, "num_gpu": 1, "num_thread": 4, "tfs_z": 1.0}}, {}),
    ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"priority": 3, "cache_salt": "a"}, {"priority": 3, "cache_salt": "a"}),
]


@each_case(("sent", "of_openai"), SAME)
def test_a_chat_asks_the_engine_for_what_the_same_chat_of_openai_asks(
    sent: dict[str, Any], of_openai: dict[str, Any]
) -> None:
    own = asked_by({**ASKED, **sent})
    other = asked_by({"messages": SAID, "seed": 7, **of_openai}, OPENAI)
    grammars = [
        None if each.sampling.structured_outputs is None else each.sampling.structured_outputs.text
        for each in (own, other)
    ]
    assert grammars[0] == grammars[1]
    sampling = [replace(each.sampling, structured_outputs=None) for each in (own, other)]
    assert sampling[0] == sampling[1]
    assert own.prompt_ids == other.prompt_ids
    assert (own.terms, own.cache_salt) == (other.terms, other.cache_salt)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    said = [*SAID, {"role": "assistant", "content": "I"}]
    own = asked_by({**ASKED, "messages": said})
    other = {"messages": said, "continue_final_message": True, "add_generation_prompt": False}
    assert own.prompt_ids == asked_by(other, OPENAI).prompt_ids


def test_thinking_and_calls_are_parts_of_the_message_whole_and_streamed() -> None:
    text = f"<think>Look.</think>I look.{CALL}"
    script = [text[at : at + 5] for at in range(0, len(text), 5)]
    sent = {**ASKED, "tools": [TOOL]}
    message = ask(sent, on=engine(*script)).json["message"]
    (call,) = message.pop("tool_calls")
    assert call["id"].startswith("call_")
    function = {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}}
    assert call["function"] == function
    assert message == {"role": "assistant", "content": "I look.", "thinking": "Look."}
    lines = ask({**sent, "stream": True}, on=engine(*script)).lines
    messages = [line["message"] for line in lines]
    assert "".join(each.get("thinking", "") for each in messages) == "Look."
    assert "".join(each["content"] for each in messages) == "I look."
    (calls,) = [each["tool_calls"] for each in messages if "tool_calls" in each]
    assert [each["function"] for each in calls] == [function]


def test_arguments_that_are_no_object_are_returned_as_text() -> None:
    script = '<tool_call>{"name": "weather", "arguments": {"city": '
    made = engine(script, reason=FinishReason.LENGTH)
    answer = ask({**ASKED, "tools": [TOOL]}, on=made).json
    assert answer["done_reason"] == "length"
    for call in answer["message"].get("tool_calls", ()):
        assert call["function"]["arguments"].keys() == {"INVALID_JSON"}


def test_log_probabilities_are_beside_the_message() -> None:
    sent = {**ASKED, "logprobs": True, "top_logprobs": 1}
    whole = ask(sent).json["logprobs"]
    assert [token["token"] for token in whole] == ["Hel", "lo"]
    assert whole[0]["top_logprobs"] == [{"token": "Hel", "logprob": -0.5, "bytes": [*b"Hel"]}]
    lines = ask({**sent, "stream": True}).lines
    assert [token for line in lines for token in line.get("logprobs", ())] == whole


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"options": {"nun_predict": 3}}, "options.nun_predict is not an option"),
    ({"options": {"max_tokens": 3}}, "write it as options.num_predict"),
    ({"options": {"temperature": "hot"}}, 'options.temperature is "hot"'),
    ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty is -1"),
    ({"options": {"num_predict": False}}, "options.num_predict is false"),
    ({"options": {"num_predict": -3}}, "options.num_predict is -3"),
    ({"options": {"mirostat": 3}}, "options.mirostat is 3"),
    ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n is -2"),
    ({"options": {"num_keep": 0.5}}, "options.num_keep is 0.5"),
    ({"options": {"num_gpu": "all"}}, "options.num_gpu"),
    ({"options": {"use_mmap": 1}}, "options.use_mmap is 1; true or false"),
    ({"options": {"tfs_z": 0.5}}, "tail-free sampling"),
    ({"options": {"num_ctx": "4k"}}, "options.num_ctx"),
    ({"options": []}, "options is []"),
    ({"temperature": 1}, "write it as an entry of options"),
    ({"max_tokens": 5}, '"num_predict"'),
    ({"response_format": {"type": "json_object"}}, "write it as format"),
    ({"reasoning_effort": "low"}, "write it as think"),
    ({"nonsense": 1}, '"nonsense" is not a field'),
    ({"think": "much"}, 'think is "much"'),
    ({"format": "xml"}, 'format is "xml"'),
    ({"format": {"city": 1}}, "format has"),
    ({"truncate": 1}, "truncate is 1"),
    ({"shift": "a"}, 'shift is "a"'),
    ({"keep_alive": []}, "keep_alive is []"),
    ({"stream": "yes"}, "stream is"),
    ({"top_logprobs": 2}, "without logprobs"),
    ({"messages": "hi"}, "messages is"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images"),
    ({"messages": [{"role": "user", "content": "a", "thinking": "b"}]}, '"thinking"'),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0]"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "b"}}]}
            ]
        },
        "arguments",
    ),
    ({"tools": {}}, "tools is"),
]


@each_case(("sent", "words"), REFUSED)
def test_a_field_that_is_not_honoured_is_refused_by_name(sent: dict[str, Any], words: str) -> None:
    assert words in refusal({**ASKED, **sent})


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"template": "{{ .Prompt }}"}, "raw: true"),
        ({"images": ["aGk="]}, "images is"),
        ({"prompt": 3}, "prompt is 3"),
        ({"raw": "no"}, "raw is"),
        ({"suffix": "a", "system": "b"}, "system and suffix"),
        ({"messages": SAID}, '"messages" is not a field'),
    ],
)
def test_a_completion_refuses_what_it_does_not_take(sent: dict[str, Any], words: str) -> None:
    assert words in refusal({"prompt": "a", **sent}, path=GENERATE)


def test_whole_numbers_may_be_written_with_a_point_and_roles_with_capitals() -> None:
    made, same = engine(), engine()
    options = {"top_k": 40.0, "num_predict": 8.0, "seed": 7.0, "num_thread": 2.0, "num_keep": 4.0}
    said = [{**message, "role": message["role"].capitalize()} for message in SAID]
    assert ask({"messages": said, "options": options}, on=made).status == 200
    whole = {name: int(value) for name, value in options.items()}
    assert ask({"messages": SAID, "options": whole}, on=same).status == 200
    assert made.asked[0].sampling == same.asked[0].sampling
    assert made.asked[0].prompt_ids == same.asked[0].prompt_ids
    for name in options:
        assert f"options.{name} is 1.5" in refusal({**ASKED, "options": {name: 1.5}})


def test_hints_are_listed_in_a_header_and_unknown_options_too_if_the_server_warns() -> None:
    reply = ask({**ASKED, "options": {"num_ctx": 4096}})
    assert reply.headers["x-quire-ignored-fields"] == "options.num_ctx"
    reply = ask({**ASKED, "shift": True, "truncate": True})
    assert reply.headers["x-quire-ignored-fields"] == "shift"
    reply = ask({"prompt": "a", "raw": True, "truncate": True}, path=GENERATE)
    assert "x-quire-ignored-fields" not in reply.headers
    reply = ask({**ASKED, "options": {"other": 1}}, unknown_fields="warn")
    assert reply.headers["x-quire-ignored-fields"] == "options.other"


def test_errors_are_texts_before_and_within_a_stream() -> None:
    reply = ask({**ASKED, "model": "other"})
    assert (reply.status, reply.json) == (
        404,
        {
            "error": 'model "other" is not served here; served: "fake" (--served-model-name adds '
            "names)"
        },
    )
    failing = engine()
    failing.fails_with, failing.fails_after = WorkerError("it was killed"), 1
    lines = ask({"messages": SAID}, on=failing).lines
    assert lines[0]["message"]["content"] == "Hel"
    assert "it was killed" in lines[-1]["error"]
    reply = ask(None, path="/api/chat", method="GET")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


def test_a_key_is_a_bearer_token() -> None:
    assert ask(ASKED, api_key=("k",)).json["error"].startswith("no API key was sent")
    right = {"authorization": "Bearer k"}
    assert ask(ASKED, api_key=("k",), headers=right).status == 200
    wrong = ask(ASKED, api_key=("k",), headers={"authorization": "Bearer x"})
    assert (wrong.status, wrong.headers["www-authenticate"]) == (401, "Bearer")


def test_the_model_is_listed_under_each_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    made = engine(path=str(tmp_path), aliases=("other",))
    listed = ask(None, path="/api/tags", method="GET", on=made).json["models"]
    assert [model["name"] for model in listed] == ["fake", "other"]
    assert (listed[0]["size"], listed[0]["details"]["family"]) == (100, "llama")
    (running, _) = ask(None, path="/api/ps", method="GET", on=made).json["models"]
    assert running["context_length"] == 2048
    assert listed[0]["details"]["context_length"] == 2048
    found = ["embedding", "completion", "tools", "thinking"]
    assert [model.pop("capabilities") for model in listed] == [found, found]
    assert running.items() >= listed[0].items()
    for body in ({"model": "fake"}, {"name": "other", "verbose": True}):
        shown = ask(body, path="/api/show", on=made).json
        assert shown["template"] == TEMPLATE
        assert shown["model_info"]["llama.context_length"] == 2048
        assert shown["capabilities"] == ["embedding", "completion", "tools", "thinking"]
    assert ask({"model": "none"}, path="/api/show").status == 404
    assert ask({"name": "none"}, path="/api/show").status == 404
    assert "model is missing" in refusal({}, path="/api/show")


@pytest.mark.parametrize(
    ("card", "capabilities"),
    [
        ({"pooling": None}, ["completion", "tools", "thinking"]),
        ({"generates": False}, ["embedding"]),
    ],
)
def test_capabilities_are_those_of_the_model(card: Any, capabilities: list[str]) -> None:
    shown = ask({"model": "fake"}, path="/api/show", on=engine(**card)).json
    assert shown["capabilities"] == capabilities


def test_clients_of_other_languages_send_empty_fields() -> None:
    empty = {"model": "fake:latest", "name": "", "system": "", "template": "", "options": None}
    assert ask(empty, path="/api/show").json["details"]["format"] == "safetensors"
    assert ask({**empty, "options": {}}, path="/api/show").status == 200
    for name, value in (("system", "a"), ("template", "a"), ("options", {"seed": 1})):
        assert f"{name} is" in refusal({**empty, name: value}, path="/api/show")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, ""),
        (999, "999"),
        (260_032, "260K"),
        (134_515_008, "134.52M"),
        (7_000_000, "7M"),
        (8_030_261_248, "8.0B"),
    ],
)
def test_the_number_of_parameters_is_in_the_details(number: int, text: str) -> None:
    shown = ask({"model": "fake"}, path="/api/show", on=engine(num_parameters=number)).json
    assert shown["details"]["parameter_size"] == text
    assert shown["model_info"].get("general.parameter_count", 0) == number


def test_the_architecture_of_a_gguf_file_is_in_its_metadata(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, {"general.architecture": "qwen2"}, {})
    listed = ask(None, path="/api/tags", method="GET", on=engine(path=str(file))).json["models"]
    assert listed[0]["details"]["family"] == "qwen2"
    file.write_bytes(b"GGUF but not really")
    shown = ask({"model": "fake"}, path="/api/show", on=engine(path=str(file))).json
    assert shown["details"]["family"] == "unknown"


def test_a_loaded_model_says_where_it_is_and_until_when(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    sizes = []
    for recipe in ("avx2", "torch-cuda-sm90-2.6-triton3-exact"):
        made = engine(path=str(tmp_path), recipe=recipe)
        (running,) = ask(None, path="/api/ps", method="GET", on=made).json["models"]
        sizes.append(running["size_vram"])
    assert sizes == [0, 100]
    left = datetime.fromisoformat(running["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=36_000) < left < timedelta(days=37_000)


@pytest.mark.parametrize("path", [CHAT, GENERATE, "/api/embed", "/api/embeddings"])
def test_the_tag_latest_is_part_of_each_name(path: str) -> None:
    sent = {CHAT: {"messages": SAID}, "/api/embed": {"input": "a"}}.get(path, {"prompt": "a"})
    made = engine(aliases=("own:latest",))
    for name in ("fake", "fake:latest", "own:latest", "own:latest:latest"):
        assert ask({**sent, "model": name}, path=path, on=made).status == 200
    for name in ("own", "fake:other", ":latest", "fake:latest:latest"):
        assert ask({**sent, "model": name}, path=path, on=made).status == 404
    chat = {"messages": SAID, "model": "fake:latest"}
    assert ask(chat, path=OPENAI).status == 404


@pytest.mark.parametrize("sent", [{"input": ""}, {"input": []}])
def test_without_texts_there_are_no_vectors(sent: dict[str, Any]) -> None:
    made = engine()
    assert ask(sent, path="/api/embed", on=made).json == {
        "model": "fake",
        "embeddings": [],
        "total_duration": 0,
        "load_duration": 0,
        "prompt_eval_count": 0,
    }
    assert ask({"prompt": ""}, path="/api/embeddings", on=made).json == {"embedding": []}
    assert made.asked == []
    assert "dimensions is 3" in refusal({**sent, "dimensions": 3}, path="/api/embed")
    assert "input is missing" in refusal({}, path="/api/embed")
    assert ask(sent, path="/api/embed", on=engine(pooling=None)).status == 400


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model_type": 3}'])
def test_a_configuration_that_names_no_architecture_is_no_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    shown = ask({"model": "fake"}, path="/api/show", on=engine(path=str(tmp_path))).json
    assert shown["details"]["family"] == "unknown"


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "delete", "blobs/sha256:ab"])
def test_routes_of_a_store_of_models_are_refused_by_name(path: str) -> None:
    reply = ask({}, path=f"/api/{path}")
    assert reply.status == 404
    assert f'"/api/{path}"' in reply.json["error"]
    assert "model" in reply.json["error"]
