"""Conversations of our own that templates are rendered with, and how `transformers` renders them.

    python -m tests.unit.text.template_cases FOLDER_OF_TEMPLATES

records what `transformers` makes of each conversation with each published template: a digest, as
the templates are their vendors'. A refusal is recorded by its kind, and by its own words where the
template has any.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

RECORDED = Path(__file__).parent / "recorded" / "templates.json"
NOW = datetime(2026, 1, 31, 12, 0)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PUBLISHED = (
    "HuggingFaceTB-SmolLM3-3B",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "openai-gpt-oss-120b",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation and its other template variables."""

    messages: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)


def _message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


_SYSTEM = _message("system", 'Be brief, <b>kind</b> & "exact".\n')
_ASK = _message("user", "  Hi <b> & 'x' 🦙\n")
_SAID = _message("assistant", "Hello.  ")
_MORE = _message("user", "吾輩は猫である。名前はまだ無い。")
_TOOLS = [
    _tool(
        "weather",
        "Tells the weather.\nAnywhere.",
        city={"type": "string", "description": "where"},
        unit={"type": "string", "enum": ["C", "F"], "default": "C"},
    ),
    _tool(
        "add",
        "Adds <numbers>.",
        numbers={"type": "array", "items": {"type": "number"}, "description": "what"},
        exact={"type": ["boolean", "null"]},
        how={"type": "object", "properties": {"digits": {"type": "integer"}}},
    ),
]
_WEATHER = _call(1, "weather", {"city": "東京", "unit": "C"})
_ADD = _call(2, "add", {"numbers": [1, 2.5], "exact": None, "how": {"digits": 3}})
_RESULT = _message("tool", '{"degrees": 7}', tool_call_id="call00001", name="weather")
_SUM = _message("tool", "3.5", tool_call_id="call00002", name="add")
_CALLS = [_ASK, _message("assistant", "", tool_calls=[_WEATHER]), _RESULT]
_THOUGHT = _message("assistant", "Four.", reasoning_content="Two and two.\nAdd.")
_PARTS = [{"type": "text", "text": "zebra "}, {"type": "text", "text": "umbrella"}]

TALKS: dict[str, Talk] = {
    "a plain turn": Talk(messages=[_ASK]),
    "system": Talk(messages=[_SYSTEM, _ASK]),
    "several turns": Talk(messages=[_SYSTEM, _ASK, _SAID, _MORE]),
    "several turns without system": Talk(messages=[_ASK, _SAID, _MORE]),
    "an answer at the end": Talk(messages=[_SYSTEM, _ASK, _SAID]),
    "system alone": Talk(messages=[_SYSTEM]),
    "nothing said": Talk(messages=[_message("user", "")]),
    "the same role twice": Talk(messages=[_ASK, _MORE]),
    "the model begins": Talk(messages=[_SAID, _ASK]),
    "system in the middle": Talk(messages=[_ASK, _SAID, _SYSTEM, _MORE]),
    "a role nobody has": Talk(messages=[_message("narrator", "Once.")]),
    "parts": Talk(messages=[_message("user", _PARTS), _SAID, _message("user", _PARTS[:1])]),
    "tools": Talk(messages=[_ASK], settings={"tools": _TOOLS}),
    "tools and system": Talk(messages=[_SYSTEM, _ASK, _SAID, _MORE], settings={"tools": _TOOLS}),
    "no tools": Talk(messages=[_ASK], settings={"tools": []}),
    "a call and its result": Talk(messages=_CALLS, settings={"tools": _TOOLS}),
    "a call without tools": Talk(messages=_CALLS),
    "a call under way": Talk(messages=_CALLS[:2], settings={"tools": _TOOLS}),
    "a call without content": Talk(
        messages=[_ASK, {"role": "assistant", "content": None, "tool_calls": [_WEATHER]}, _RESULT],
        settings={"tools": _TOOLS},
    ),
    "a call without the key content": Talk(
        messages=[_ASK, {"role": "assistant", "tool_calls": [_WEATHER]}, _RESULT],
        settings={"tools": _TOOLS},
    ),
    "arguments as text": Talk(
        messages=[
            _ASK,
            _message("assistant", "", tool_calls=[_call(1, "weather", '{"city": "東京"}')]),
            _RESULT,
        ],
        settings={"tools": _TOOLS},
    ),
    "two calls at once": Talk(
        messages=[
            _SYSTEM,
            _ASK,
            _message("assistant", "I look.", tool_calls=[_WEATHER, _ADD]),
            _RESULT,
            _SUM,
            _message("assistant", "Seven degrees, and 3.5."),
            _MORE,
        ],
        settings={"tools": _TOOLS},
    ),
    "calls one after the other": Talk(
        messages=[*_CALLS, _message("assistant", "", tool_calls=[_ADD]), _SUM, _SAID],
        settings={"tools": _TOOLS},
    ),
    "reasoning": Talk(messages=[_ASK, _THOUGHT, _MORE]),
    "reasoning by another name": Talk(
        messages=[_ASK, _message("assistant", "Four.", thinking="Two and two."), _MORE]
    ),
    "reasoning in the content": Talk(
        messages=[_ASK, _message("assistant", "<think>\nHm.\n</think>\n\nFour."), _MORE]
    ),
    "reasoning before a call": Talk(
        messages=[
            _ASK,
            _message("assistant", "", reasoning_content="I look.", tool_calls=[_WEATHER]),
            _RESULT,
        ],
        settings={"tools": _TOOLS},
    ),
    "thinking": Talk(
        messages=[_SYSTEM, _ASK], settings={"enable_thinking": True, "thinking": True}
    ),
    "no thinking": Talk(
        messages=[_ASK, _SAID, _MORE], settings={"enable_thinking": False, "thinking": False}
    ),
    "thinking by command": Talk(messages=[_message("system", "/no_think Be brief."), _ASK]),
    "documents": Talk(
        messages=[_ASK], settings={"documents": [{"title": "Botchan", "text": "無鉄砲"}]}
    ),
    "variables": Talk(
        messages=[_SYSTEM, _ASK],
        settings={
            "tools": _TOOLS,
            "builtin_tools": ["python", "browser", "brave_search"],
            "tools_in_user_message": False,
            "date_string": "1 Feb 2026",
            "model_identity": "You are a lamp.",
            "reasoning_effort": "high",
            "custom_instructions": "Shine.",
            "xml_tools": _TOOLS,
            "keep_past_thinking": True,
        },
    ),
    "special tokens given": Talk(messages=[_ASK], settings={"bos_token": "", "eos_token": "<>"}),
    "to be continued": Talk(
        messages=[_ASK, _message("assistant", "Once upon ")],
        settings={"continue_final_message": True},
    ),
    "to be continued after spaces": Talk(
        messages=[_SYSTEM, _ASK, _message("assistant", "\n Once upon \n")],
        settings={"continue_final_message": True},
    ),
    "parts to be continued": Talk(
        messages=[_ASK, _message("assistant", _PARTS)], settings={"continue_final_message": True}
    ),
    "a question to be continued": Talk(messages=[_ASK], settings={"continue_final_message": True}),
    "nothing to be continued": Talk(
        messages=[_ASK, {"role": "assistant", "tool_calls": [_WEATHER]}],
        settings={"continue_final_message": True},
    ),
}


def cases() -> list[tuple[str, bool | None]]:
    """Yield names of talks, with and without a begun answer (None: as in the talk)."""
    return [
        (name, begun)
        for name, talk in TALKS.items()
        for begun in ([None] if "continue_final_message" in talk.settings else [True, False])
    ]


def key_of(name: str, begun: bool | None) -> str:
    """Return the key of a case in the record."""
    return name if begun is None else f"{name}, {'begun' if begun else 'as it is'}"


def digest(text: str) -> str:
    """Return the digest of a text that may not be stored here."""
    return hashlib.sha256(text.encode()).hexdigest()


class Refused(Exception):
    """A template or `transformers` rejects the talk. `words`: the template's own message,
    if any.
    """

    def __init__(self, words: str | None) -> None:
        super().__init__(words)
        self.words = words


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


def by_transformers(source: str, talk: Talk, begun: bool | None) -> str:
    """Return the text `transformers` renders. Raises Refused."""
    import tokenizers
    import transformers
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError, TemplateRuntimeError
    from transformers.utils import chat_template_utils

    model = tokenizers.models.WordLevel({token: at for at, token in enumerate(TOKENS.values())})
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), chat_template=source, **TOKENS
    )
    settings = {**talk.settings, **({} if begun is None else {"add_generation_prompt": begun})}
    try:
        with mock.patch.object(chat_template_utils, "datetime", _Clock):
            text: str = tokenizer.apply_chat_template(talk.messages, tokenize=False, **settings)
    except (TemplateRuntimeError, SecurityError) as error:
        raise Refused(None) from error
    except TemplateError as error:
        raise Refused(str(error)) from error
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise Refused(None) from error
    return text


def expected(source: str, name: str, begun: bool | None) -> str:
    """Return the expected rendering. Parts are joined for templates that do not support them.

    Raises Refused.
    """
    talk = TALKS[name]
    if "parts" not in name:
        return by_transformers(source, talk, begun)
    try:
        text = by_transformers(source, talk, begun)
    except Refused:
        text = "'type'"
    taken = "'type'" not in text and "zebra" in text
    return text if taken else by_transformers(source, _joined(talk), begun)


def _joined(talk: Talk) -> Talk:
    messages = [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in talk.messages
    ]
    return Talk(messages=messages, settings=talk.settings)


def _record(folder: Path) -> None:
    found: dict[str, dict[str, str]] = {}
    for template in PUBLISHED:
        source = (folder / f"{template}.jinja").read_text(encoding="utf-8")
        for name, begun in cases():
            try:
                what = digest(expected(source, name, begun))
            except Refused as refusal:
                what = "refused" if refusal.words is None else f"refused {digest(refusal.words)}"
            found.setdefault(template, {})[key_of(name, begun)] = what
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
