"""Fields of vLLM and SGLang that change an answer: names of tokens, truncation, echo, grammars."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.api.fake_engine import FakeEngine, Reply, Site

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SAID = [{"role": "user", "content": "hi"}]
OPENED = [*SAID, {"role": "assistant", "content": "I am"}]
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}


def ask(body: dict[str, Any], path: str = CHAT, engine: FakeEngine | None = None) -> Reply:
    async def exchange() -> Reply:
        return await Site(engine).post(path, body)

    return asyncio.run(exchange())


def test_log_probabilities_name_tokens_by_their_ids() -> None:
    named = {"return_tokens_as_token_ids": True}
    chat = {"messages": SAID, "logprobs": True, "top_logprobs": 1}
    plain, by_id = (ask({**chat, **more}).json["choices"][0] for more in ({}, named))
    tokens = by_id["logprobs"]["content"]
    assert [token["token"] for token in tokens] == ["token_id:0", "token_id:1"]
    assert [token["bytes"] for token in tokens] == [
        token["bytes"] for token in plain["logprobs"]["content"]
    ]
    tops = [other["token"] for other in tokens[0]["top_logprobs"]]
    assert tops == ["token_id:0", "token_id:99"]
    streamed = ask({**chat, **named, "stream": True}).events[:-1]
    parts = [choice["logprobs"] for chunk in streamed for choice in chunk["choices"]]
    assert [token for part in parts if part for token in part["content"]] == tokens
    asked = {"prompt": "ab", "logprobs": 1, "echo": True, **named}
    logprobs = ask(asked, COMPLETIONS).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:0", "token_id:1"]
    assert logprobs["top_logprobs"][2] == {"token_id:0": -0.5}
    assert ask({**chat, "return_tokens_as_token_ids": 1}).error["param"] == next(iter(named))


@pytest.mark.parametrize(
    ("path", "prompt"),
    [(COMPLETIONS, {"prompt": "abcdef"}), (GENERATE, {"tokens": [*b"abcdef"]})],
)
def test_a_prompt_is_truncated_at_the_side_that_is_named(path: str, prompt: Any) -> None:
    for side, kept in (({}, b"ef"), ({"truncation_side": "left"}, b"ef"), ("right", b"ab")):
        more = {"truncation_side": side} if isinstance(side, str) else side
        engine = FakeEngine()
        assert ask({**prompt, "truncate_prompt_tokens": 2, **more}, path, engine).status == 200
        assert bytes(engine.asked[0].prompt_ids) == kept


def test_a_side_needs_a_number_of_tokens_and_a_name() -> None:
    engine = FakeEngine()
    fields = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert ask({"messages": SAID, **fields}, CHAT, engine).status == 200
    assert bytes(engine.asked[0].prompt_ids) == b"user"
    for wrong in ({"truncation_side": "right"}, {**fields, "truncation_side": "top"}):
        for path, prompt in ((CHAT, {"messages": SAID}), (COMPLETIONS, {"prompt": "a"})):
            assert ask({**prompt, **wrong}, path).error["param"] == "truncation_side"


def test_an_echo_puts_the_last_message_of_the_assistant_before_the_answer() -> None:
    asked = {"messages": OPENED, **CONTINUES, "echo": True, "n": 2}
    whole = ask(asked).json["choices"]
    assert [choice["message"]["content"] for choice in whole] == ["I amHello"] * 2
    texts = ["", ""]
    for chunk in ask({**asked, "stream": True}).events[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["I amHello"] * 2
    parts = [*SAID, {"role": "assistant", "content": [{"type": "text", "text": "I"}]}]
    for messages, text in ((SAID, "Hello"), (parts, "IHello")):
        (choice,) = ask({"messages": messages, "echo": True}).json["choices"]
        assert choice["message"]["content"] == text
    assert ask({"messages": SAID, "echo": "yes"}).error["param"] == "echo"
    both = {"messages": OPENED, "echo": True, "truncate_prompt_tokens": 3}
    assert ask(both).error["param"] == "truncate_prompt_tokens"


def test_grammars_of_sglang_are_those_of_structured_outputs() -> None:
    texts = []
    for fields in (
        {"ebnf": 'root ::= "a"'},
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"regex": "[ab]+"},
        {"structured_outputs": {"regex": "[ab]+"}},
    ):
        engine = FakeEngine()
        assert ask({"prompt": "a", **fields}, COMPLETIONS, engine).status == 200
        grammar = engine.asked[0].sampling.structured_outputs
        assert grammar is not None
        texts.append((grammar.kind, grammar.text))
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert ask({"prompt": "a", "ebnf": ""}, COMPLETIONS).status == 200


def test_stop_patterns_of_sglang_are_one_or_a_list() -> None:
    for given, wanted in (("[0-9]+", ("[0-9]+",)), (["a", "b"], ("a", "b")), ([], ())):
        engine = FakeEngine()
        assert ask({"prompt": "a", "stop_regex": given}, COMPLETIONS, engine).status == 200
        assert engine.asked[0].sampling.stop_regex == wanted
    for wrong in ("", 5, "a" * 257, ["a"] * 5):
        refused = ask({"prompt": "a", "stop_regex": wrong}, COMPLETIONS).error
        assert refused["param"] == "stop_regex", wrong


def test_listed_ids_replace_the_most_probable_ones() -> None:
    for path, fields in (
        (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 5}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 5}),
    ):
        for ids, num_top in (([7, 8], 0), ([], 5)):
            engine = FakeEngine()
            assert ask({**fields, "logprob_token_ids": ids}, path, engine).status == 200
            sampling = engine.asked[0].sampling
            assert (sampling.logprob_token_ids, sampling.logprobs) == (tuple(ids), num_top)
    wrong = {"prompt": "a", "logprobs": 99, "logprob_token_ids": [7]}
    assert ask(wrong, COMPLETIONS).error["param"] == "logprobs"


def test_attributes_that_clients_read_are_null_unless_requested() -> None:
    chat = ask({"messages": SAID}).json
    assert chat["prompt_logprobs"] is None
    assert chat["choices"][0]["message"]["reasoning_content"] is None
    (choice,) = ask({"prompt": "ab"}, COMPLETIONS).json["choices"]
    assert choice["prompt_logprobs"] is None
    scored = ask({"prompt": "ab", "prompt_logprobs": 0}, COMPLETIONS).json["choices"][0]
    assert scored["prompt_logprobs"][0] is None
    chat = ask({"messages": SAID, "prompt_logprobs": 0}).json
    assert len(chat["prompt_logprobs"]) == len(b"user:hi;")
