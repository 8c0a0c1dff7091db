"""OpenAI's JSON of parsed chat answers: messages, deltas and finish reasons.

generation/chat_output.py parses the answers; nothing here decides what is a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.generation.chat_output import ChoiceOutputParser
from quire.base.records import FinishReason
from quire.output_parsers.parsed_answer import AnswerPiece, ParsedAnswer

# Attributes of a message that clients read, whether the answer has them or not.
NOT_SAID: Mapping[str, None] = dict.fromkeys(("refusal", "reasoning_content", "reasoning"))


def echoed_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a last message of the assistant, which `echo` puts before the answer."""
    last = messages[-1]
    if last.get("role") != "assistant":
        return ""
    content = last.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())


def delta_of(piece: AnswerPiece, parser: ChoiceOutputParser) -> dict[str, Any]:
    """Return the `delta` object of a piece."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return _reasoning(piece.text)
    if piece.kind == "call":
        call = _call(parser.call_id(piece.call), piece.text)
        return {"tool_calls": [{"index": piece.call, **call}]}
    return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}


def message_of(answer: ParsedAnswer, parser: ChoiceOutputParser) -> dict[str, Any]:
    """Return the `message` object of a whole answer."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if answer.calls and not answer.content else answer.content,
        **NOT_SAID,
    }
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [
            _call(parser.call_id(index), call.name, call.arguments)
            for index, call in enumerate(answer.calls)
        ]
    return message


def finish_reason_of(reason: FinishReason | None, parser: ChoiceOutputParser) -> str | None:
    """Return the finish reason: "tool_calls" if it stopped and its calls are complete."""
    return "tool_calls" if reason is FinishReason.STOP and parser.has_complete_calls else reason


def _call(id_: str, name: str, arguments: str = "") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both names that clients use."""
    return {"reasoning_content": text, "reasoning": text}
