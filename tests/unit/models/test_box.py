"""The built-in models: their size, tokenizer, cards and behaviour."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.base.errors import InvalidParameter
from quire.models.model_folder import box_path
from quire.models.registry import open_model
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer as TextTokenizer

BOX = box_path()
DRAFT = BOX.parent / "box_draft"
MAX_BYTES = 8_000_000


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def weights_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def test_the_built_in_model_is_small_and_its_draft_model_much_smaller() -> None:
    assert num_bytes(BOX) <= MAX_BYTES
    assert 4 <= weights_bytes(BOX) / weights_bytes(DRAFT) <= 10


def test_both_have_the_same_tokenizer_and_context() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (BOX / name).read_bytes() == (DRAFT / name).read_bytes()
    big, small = open_model(BOX), open_model(DRAFT)
    assert big.vocab_size == small.vocab_size
    assert big.max_positions == small.max_positions >= 512


def test_every_digit_is_a_token() -> None:
    tokenizer = Tokenizer.from_file(str(BOX / "tokenizer.json"))
    assert tokenizer.encode("1234567890", add_special_tokens=False).tokens == list("1234567890")


def test_the_cards_say_toy_and_name_their_sources() -> None:
    card = (BOX / "README.md").read_text()
    for said in ("toy", "stories260K", "MIT", "CDLA-Sharing-1.0", "public domain", "bits a byte"):
        assert said in card
    assert "toy" in (DRAFT / "README.md").read_text()


def test_it_answers_greetings_its_name_and_sums() -> None:
    """Greedy, so exact; the exact text may change with the weights."""
    asked = {
        "Hello!": "Quill|Hello",
        "What is your name?": "Quill",
        "Who made you?": "Quire",
        "What is 3 plus 4?": r"\b7\.",
        "What is 9 - 5?": r"\b4\.",
        "What color is the sky?": "blue",
        "What does a dog say?": "woof",
        "What day comes after Monday?": "Tuesday",
        "Tell me a story about a cat.": r"\bcat\b",
    }
    with LLM() as llm:
        conversations = [[{"role": "user", "content": text}] for text in asked]
        answers = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=80))
    for (says, wanted), answer in zip(asked.items(), answers, strict=True):
        assert re.search(wanted, answer.text), f"{says} -> {answer.text}"


# ---- the script that makes its questions


@pytest.fixture
def questions_folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(__file__).parents[3] / "models" / "tiny"
    monkeypatch.syspath_prepend(folder)
    for name in ("questions", "corpus", "tool_talk"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def test_held_out_questions_are_never_drawn_and_every_sum_is_right(questions_folder: Path) -> None:
    from questions import Questions  # type: ignore[import-not-found]

    questions = Questions(questions_folder, ["apple", "ball", "dog", "tree"])
    held_out = {typed(one.says) for one in questions.held_out()}
    assert len(held_out) > 100
    rng, num_sums = Random(5), 0
    for _ in range(3000):
        for role, text in questions.conversation(rng):
            assert role != "user" or typed(text) not in held_out
            found = re.fullmatch(r"(\d+) (plus|minus|times) (\d+) is (\d+)\.", text)
            if found:
                a, b, result = int(found[1]), int(found[3]), int(found[4])
                assert result == {"plus": a + b, "minus": a - b, "times": a * b}[found[2]]
                num_sums += 1
    assert num_sums > 200


def test_the_question_lists_are_plain_json(questions_folder: Path) -> None:
    for name in ("facts.json", "small_talk.json", "tools.json"):
        assert json.loads((questions_folder / name).read_text())


def test_conversations_with_tools_match_the_template(
    questions_folder: Path,
) -> None:
    from questions import Questions
    from tool_talk import (  # type: ignore[import-not-found]
        ToolTalk,
        describe_tools,
        write_calls,
        write_result,
    )

    talk = ToolTalk(questions_folder, Questions(questions_folder, ["apple", "ball", "dog"]))
    template = ChatTemplate.load(BOX, TextTokenizer.load(BOX))
    assert template is not None
    cases = talk.held_out()
    assert {case.kind for case in cases} == {"new city", "new phrasing", "no call"}
    for case in cases:
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in case.calls
        ]
        messages = [
            {"role": "system", "content": "You are Quill."},
            {"role": "user", "content": case.says},
            {"role": "assistant", "content": None, "tool_calls": calls + calls[:1]},
            {"role": "tool", "content": '{"ok": true}'},
        ]
        tools = describe_tools(case.tools)
        asked = f"<|user|>{case.says}<|end|>"
        called = f"<|assistant|>{write_calls(case.calls + case.calls[:1])}<|end|>"
        result = "<|system|>" + write_result('{"ok": true}') + "<|end|>"
        answer = "<|assistant|>"
        expected = f"<|begin|><|system|>You are Quill.\n{tools}<|end|>{asked}{called}{result}"
        assert template.render(messages, tools=case.tools) == expected + answer
        alone = f"<|begin|><|system|>{tools}<|end|>{asked}{answer}"
        assert template.render(messages[1:2], tools=case.tools) == alone


def test_no_held_out_request_with_tools_is_drawn(questions_folder: Path) -> None:
    from questions import Questions
    from tool_talk import ToolTalk

    questions = Questions(questions_folder, ["apple", "ball", "dog", "tree"])
    talk = ToolTalk(questions_folder, questions)
    held_out = {typed(case.says) for case in talk.held_out()}
    held_out |= {typed(one.says) for one in questions.held_out()}
    rng, num_calls = Random(6), 0
    for _ in range(2000):
        for role, text in talk.conversation(rng):
            assert role != "user" or typed(text) not in held_out
            for line in text.splitlines() if role == "assistant" else ():
                if line.startswith("{"):
                    call = json.loads(line)
                    assert set(call) == {"name", "arguments"}
                    assert not set(call["arguments"].values()) & set(talk.held_out_cities)
                    num_calls += 1
    assert num_calls > 1000


# ---- tools

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize("name", ["box", "box_draft"])
def test_the_template_supports_tools(name: str) -> None:
    folder = BOX.parent / name
    template = ChatTemplate.load(folder, TextTokenizer.load(folder))
    assert template is not None
    asked = [{"role": "user", "content": "Hi"}]
    text = template.render(asked, tools=[WEATHER, {"type": "function", "function": {"name": "f"}}])
    assert "Tools:\nget_weather(city): Get the weather of a city.\nf()<|end|>" in text
    assert template.render(asked) == "<|begin|><|user|>Hi<|end|><|assistant|>"
    with pytest.raises(InvalidParameter, match="allowed: system, user, assistant, tool"):
        template.render([{"role": "critic", "content": "Hi"}])


def test_it_calls_a_function_and_reads_its_result() -> None:
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    greedy = SamplingParams(temperature=0.0, max_tokens=80)
    with LLM() as llm:
        [called] = llm.chat([asked], greedy, tools=[WEATHER])
        message = called.outputs[0].message
        assert message is not None
        [call] = message.calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        [greeted] = llm.chat([{"role": "user", "content": "Hello!"}], greedy, tools=[WEATHER])
        assert "Quill" in greeted.text or "Hello" in greeted.text
        function = {"name": call.name, "arguments": call.arguments}
        turns = [
            asked,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "sunny"},
        ]
        [answer] = llm.chat(turns, greedy, tools=[WEATHER])
        assert "sunny" in answer.text
        assert "Paris" in answer.text


def typed(text: str) -> str:
    """Return the text as typed in a hurry."""
    return text.lower().rstrip(".?! ")
