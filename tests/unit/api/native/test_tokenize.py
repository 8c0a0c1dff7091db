"""/tokenize, /detokenize, /apply_template, and the fields beside the messages of a chat."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from quire.api.server_state import NUM_THREADS
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, CHAT_TEMPLATES, ByteTokenizer, FakeEngine, Reply, Site

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1]}'}}


def ask(
    path: str, engine: FakeEngine | None = None, /, *, settings: Any = None, **body: Any
) -> Reply:
    async def exchange() -> Reply:
        return await Site(engine, **(settings or {})).post(path, body)

    return asyncio.run(exchange())


def refused(reply: Reply, param: str | None, *words: str, status: int = 400) -> None:
    assert (reply.status, reply.error["param"]) == (status, param), reply.body
    for word in words:
        assert word in reply.error["message"]


def test_a_prompt_is_tokenized_like_a_completions() -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=1)
    assert ask("/tokenize", engine, prompt="ab").json == {
        "count": 3,
        "max_model_len": CARD.max_model_len,
        "tokens": [1, 97, 98],
    }
    bare = ask("/tokenize", engine, prompt="ab", add_special_tokens=False, return_token_strs=True)
    assert bare.json["tokens"] == [97, 98]
    assert bare.json["token_strs"] == ["a", "b"]
    ask("/v1/completions", engine, prompt="ab")
    assert engine.asked[0].prompt_ids == [1, 97, 98]


def test_messages_are_tokenized_like_a_chats() -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=1)
    fields = {
        "messages": SAID,
        "documents": [{"text": "d"}],
        "chat_template_kwargs": {"mood": "glad"},
        "continue_final_message": True,
    }
    found = ask("/tokenize", engine, **fields).json
    assert bytes(found["tokens"]) == b"(d)user:Hi;assistant:So "
    assert ask("/v1/chat/completions", engine, **fields).status == 200
    assert engine.asked[0].prompt_ids == found["tokens"]
    special = ask("/tokenize", engine, messages=SAID, add_special_tokens=True).json
    assert special["tokens"][0] == 1
    assert ask("/apply_template", engine, **fields).json == {"prompt": "(d)user:Hi;assistant:So "}
    assert ask("/apply-template", engine, **fields).status == 200


def test_a_text_beyond_the_context_is_counted_and_not_rejected() -> None:
    found = ask("/tokenize", prompt="x" * 10_000).json
    assert (found["count"], found["max_model_len"]) == (10_000, CARD.max_model_len)


def test_ids_become_text_with_special_tokens_unless_skipped() -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=1)

    def text(tokens: list[int], **fields: bool) -> str:
        answer = ask("/detokenize", engine, tokens=tokens, **fields).json
        assert answer["content"] == answer["prompt"]  # llama.cpp's name of it
        found: str = answer["prompt"]
        return found

    assert text([1, 97]) == "\x01a"
    assert text([1, 97], skip_special_tokens=True) == "a"
    assert text([]) == ""
    assert text(list("é".encode())) == "é"


@each_case("tokens", [None, "ab", [256], [-1], [True], [1.0], ["a"], [[1]], 3])
def test_a_list_of_invalid_ids_is_rejected(tokens: Any) -> None:
    refused(ask("/detokenize", tokens=tokens), "tokens", "tokens")


@each_case(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": SAID}, "messages"),
        ("/tokenize", {"prompt": "a", "tools": TOOLS}, "tools"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/tokenize", {"prompt": "a", "promt": 1}, "promt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt"),
        ("/apply_template", {}, "messages"),
        ("/apply_template", {"messages": SAID, "prompt": "a"}, "prompt"),
        ("/apply_template", {"messages": SAID, "add_special_tokens": True}, "add_special_tokens"),
        ("/apply_template", {"messages": SAID, "tools": "x"}, "tools"),
        ("/apply_template", {"messages": SAID, "tools": [1]}, "tools"),
        ("/apply_template", {"messages": SAID, "documents": {"a": 1}}, "documents"),
        ("/apply_template", {"messages": SAID, "documents": ["text"]}, "documents"),
        ("/apply_template", {"messages": SAID, "chat_template": 3}, "chat_template"),
        ("/apply_template", {"messages": SAID, "chat_template_kwargs": []}, "chat_template_kwargs"),
        ("/apply_template", {"messages": SAID, "model": 3}, "model"),
    ],
)
def test_an_invalid_field_is_rejected_by_name(path: str, body: dict[str, Any], param: str) -> None:
    refused(ask(path, **body), param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply_template"])
def test_these_routes_follow_the_rules_of_all_routes(path: str) -> None:
    async def exchange() -> None:
        site = Site(api_key=("key",), max_body_bytes=2000)
        assert (await site.post(path, {})).status == 401
        key = {"Authorization": "Bearer key"}
        assert (await site.post(path, {"model": "other"}, headers=key)).status == 404
        assert (await site.post(path, b"[]", headers=key)).status == 400
        assert (await site.post(path, {"model": "x" * 4000}, headers=key)).status == 413
        found = await site.call("GET", path, b"", headers=key)
        assert (found.status, found.headers["allow"]) == (405, "POST")
        assert site.metric(f'quire_http_responses_total{{route="{path}",status="404"}}') == 1
        site.server_state.lifecycle.drain()
        assert (await site.post(path, {}, headers=key)).status == 503

    asyncio.run(exchange())


def test_in_warn_mode_unknown_fields_are_ignored_and_listed() -> None:
    settings = {"unknown_fields": "warn"}
    reply = ask(
        "/apply_template",
        settings=settings,
        messages=SAID,
        frobnicate=1,
        chat_template_kwargs={"moood": 1, "mood": "glad"},
    )
    assert reply.json["prompt"].endswith(">glad")
    assert reply.headers["x-quire-ignored-fields"] == "frobnicate, chat_template_kwargs.moood"
    chat = ask(
        "/v1/chat/completions", settings=settings, messages=SAID, chat_template_kwargs={"x": 1}
    )
    assert chat.headers["x-quire-ignored-fields"] == "chat_template_kwargs.x"


def test_an_unread_template_variable_is_listed_and_reserved_ones_are_rejected() -> None:
    reply = ask("/v1/chat/completions", messages=SAID, chat_template_kwargs={"moood": 1})
    assert reply.headers["x-quire-ignored-fields"] == "chat_template_kwargs.moood"
    for own in ("messages", "tools", "add_generation_prompt", "chat_template"):
        reply = ask("/apply_template", messages=SAID, chat_template_kwargs={own: 1})
        refused(reply, "chat_template_kwargs", own)


def test_an_answer_is_begun_or_continued_but_not_both() -> None:
    fields: dict[str, Any] = {"messages": SAID, "chat_template_kwargs": {"mood": "!"}}
    begun = "user:Hi;assistant:So ;"
    assert ask("/apply_template", **fields).json["prompt"] == begun + ">!"
    shut = ask("/apply_template", **fields, add_generation_prompt=False)
    assert shut.json["prompt"] == begun + "!"
    continued = ask(
        "/apply_template", **fields, add_generation_prompt=False, continue_final_message=True
    )
    assert continued.json["prompt"] == "user:Hi;assistant:So "
    both = {"add_generation_prompt": True, "continue_final_message": True}
    refused(ask("/v1/chat/completions", **fields, **both), "continue_final_message")


def test_a_template_that_changes_the_last_message_cannot_be_continued() -> None:
    reply = ask(
        "/v1/chat/completions", messages=SAID, chat_template="loud", continue_final_message=True
    )
    refused(reply, "continue_final_message", "'loud'", "cannot be cut")


def test_one_of_the_models_templates_is_selected_by_name() -> None:
    engine = FakeEngine()
    assert ask("/v1/chat/completions", engine, messages=SAID, chat_template="loud").status == 200
    assert bytes(engine.asked[0].prompt_ids) == b"HI!SO !"
    reply = ask("/v1/chat/completions", messages=SAID, chat_template="quiet")
    refused(reply, "chat_template", "'quiet'", "broken, default, endless, loud")


def test_template_text_is_rejected_unless_the_server_trusts_its_clients() -> None:
    own = {"messages": SAID, "chat_template": "{% for m in messages %}[{{ m.role }}]{% endfor %}"}
    refused(ask("/v1/chat/completions", **own), "chat_template", "--trust-request-chat-template")
    settings = {"trust_request_chat_template": True}
    trusted = ask("/apply_template", settings=settings, **own)
    assert trusted.json["prompt"] == "[user][assistant]"
    engine = FakeEngine()
    engine.template = None
    assert ask("/v1/chat/completions", engine, settings=settings, **own).status == 200
    for source, words in (
        ("a\n{% if", "line 2"),
        ("{{ ''.__class__.x }}", "must not"),
        (CHAT_TEMPLATES["endless"], "exceeds a limit"),
        ("{{ 1 }}" * 10_000, "at most"),
    ):
        reply = ask("/apply_template", settings=settings, messages=SAID, chat_template=source)
        refused(reply, "chat_template", words)


def test_a_broken_or_endless_template_is_the_models_error_and_others_continue() -> None:
    async def exchange() -> None:
        site = Site()
        for name, words in (("broken", "line 1"), ("endless", "exceeds a limit")):
            fields = {"messages": SAID, "chat_template": name}
            reply = await site.post("/v1/chat/completions", fields)
            assert (reply.status, reply.error["code"]) == (500, "model_error")
            assert f"chat template '{name}'" in reply.error["message"]
            assert words in reply.error["message"]
        assert (await site.post("/v1/chat/completions", {"messages": SAID})).status == 200
        assert (await site.post("/v1/completions", {"prompt": "a"})).status == 200

    asyncio.run(exchange())


def test_a_model_with_only_a_broken_template_still_completes() -> None:
    engine = FakeEngine()
    engine.template = ChatTemplate({"default": "a\n{% for %}"}, variables={})
    reply = ask("/v1/chat/completions", engine, messages=SAID)
    refused(reply, None, "'default', line 2", "--chat-template", status=500)
    assert ask("/v1/completions", engine, prompt="a").status == 200
    assert ask("/tokenize", engine, prompt="a").status == 200


def test_tools_are_rendered_and_a_chat_takes_them() -> None:
    assert ask("/apply_template", messages=SAID, tools=TOOLS).json["prompt"].startswith("[look]")
    assert bytes(ask("/tokenize", messages=SAID, tools=TOOLS).json["tokens"]).startswith(b"[look]")
    assert ask("/v1/chat/completions", messages=SAID, tools=TOOLS).status == 200
    told_of_none = {"messages": SAID, "tools": TOOLS, "tool_choice": "none"}
    assert not ask("/apply_template", **told_of_none).json["prompt"].startswith("[look]")
    assert ask("/v1/chat/completions", messages=SAID, tools=[], tool_choice="auto").status == 200


def test_fields_unused_by_the_template_are_rejected_or_listed() -> None:
    given = {"documents": [{"text": "a"}], "tools": TOOLS}
    for name, value in given.items():
        fields = {"messages": SAID, "chat_template": "loud", name: value}
        reply = ask("/apply_template", **fields)
        refused(reply, name, f"'loud' does not use {name}")
        assert ask("/apply_template", **{**fields, name: []}).json["prompt"] == "HI!SO !"
    fields = {"messages": SAID, "chat_template": "loud", **given}
    reply = ask("/apply_template", settings={"unknown_fields": "warn"}, **fields)
    assert reply.json["prompt"] == "HI!SO !"
    assert reply.headers["x-quire-ignored-fields"] == "tools, documents"
    chat = ask("/v1/chat/completions", **{**fields, "tools": []})
    refused(chat, "documents", "does not use")


def test_arguments_of_earlier_calls_are_parsed_to_objects() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    found = ask("/apply_template", messages=messages).json["prompt"]
    assert found == 'user:Hi;assistant:{"at": [1]};tool:42;'
    texts = FakeEngine()
    texts.template = ChatTemplate(
        {"default": "{% for m in messages %}{% for c in m.tool_calls or [] %}"
         "{{ 'f' + c.function.arguments }}{% endfor %}{% endfor %}"},
        variables={},
    )  # fmt: skip
    assert ask("/apply_template", texts, messages=messages).json["prompt"] == 'f{"at": [1]}'
    entries = FakeEngine()
    entries.template = ChatTemplate(
        {"default": "{% for m in messages %}{% for c in m.tool_calls or [] %}"
         "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
         "{% endfor %}"},
        variables={},
    )  # fmt: skip
    assert ask("/apply_template", entries, messages=messages).json["prompt"] == "at=[1]"
    for wrong in ("{", "[1]", '{"a": "\\ud800"}'):
        call = {**CALL, "function": {"name": "look", "arguments": wrong}}
        messages[1] = {"role": "assistant", "content": None, "tool_calls": [call]}
        shown = ask("/apply_template", messages=messages).json["prompt"]
        assert shown == f"user:Hi;assistant:{json.dumps(wrong)};tool:42;"
        assert ask("/apply_template", texts, messages=messages).json["prompt"] == f"f{wrong}"
        reply = ask("/apply_template", entries, messages=messages)
        refused(reply, "messages", "messages[1].tool_calls[0].function.arguments")


def test_a_client_that_fills_the_slow_lane_delays_only_itself() -> None:
    async def exchange() -> None:
        site = Site(max_body_bytes=1 << 20, trust_request_chat_template=True)
        going = threading.Event()
        held = [site.server_state.thread_pools.run(True, going.wait) for _ in range(NUM_THREADS)]
        holding = asyncio.gather(*held)
        own = {"messages": SAID, "chat_template": "{{ messages }}"}
        large = {"messages": [{"role": "user", "content": "a" * 200_000}]}
        asked = [
            ("/apply_template", own),
            ("/apply_template", large),
            ("/tokenize", {"prompt": "a" * 200_000}),
            ("/detokenize", {"tokens": [1] * 100_000}),
        ]
        slow = [asyncio.ensure_future(site.post(path, body)) for path, body in asked]
        for path, body in (
            ("/apply_template", {"messages": SAID}),
            ("/v1/chat/completions", {"messages": SAID}),
            ("/tokenize", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a", "user": "b" * 200_000}),
        ):
            assert (await site.post(path, body)).status == 200
        assert not any(one.done() for one in slow)
        slow[0].cancel()
        going.set()
        await holding
        assert [(await one).status for one in slow[1:]] == [200] * 3
        site.server_state.thread_pools.close()

    asyncio.run(exchange())


def test_a_long_text_is_tokenized_while_others_are_answered() -> None:
    class Waiting(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            if text == "slow":
                asyncio.run_coroutine_threadsafe(going.wait(), loop).result()
            return super().encode(text, add_special_tokens=add_special_tokens)

    async def exchange() -> None:
        nonlocal going, loop
        going, loop = asyncio.Event(), asyncio.get_running_loop()
        engine = FakeEngine(card=replace(CARD, max_model_len=100))
        engine.tokenizer = Waiting()
        site = Site(engine)
        slow = asyncio.ensure_future(site.post("/tokenize", {"prompt": "slow"}))
        assert (await site.post("/tokenize", {"prompt": "fast"})).status == 200
        assert not slow.done()
        going.set()
        assert (await slow).status == 200

    going: asyncio.Event
    loop: asyncio.AbstractEventLoop
    asyncio.run(exchange())


def test_tokenizer_info_has_the_tokens_by_their_texts() -> None:
    async def exchange(engine: FakeEngine) -> Any:
        return (await Site(engine).get("/tokenizer_info")).json

    engine = FakeEngine()
    told = asyncio.run(exchange(engine))
    assert told == {
        "bos_token": None,
        "eos_token": "\0",  # unset in its configuration; the text of the model's first end token
        "model_max_length": CARD.max_model_len,
        "chat_template": CHAT_TEMPLATES["default"],
    }
    engine.tokenizer.special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
    for template in (None, ChatTemplate({"default": CHAT_TEMPLATES["broken"]}, variables={})):
        engine.template = template
        told = asyncio.run(exchange(engine))
        assert told["chat_template"] is None
        assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
        assert told["pad_token"] == "<p>"
