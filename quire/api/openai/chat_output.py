"""Parse a chat's answer into a message: reasoning, content and tool calls.

`ChatOutputParser` creates a parser for each choice, assigns ids to calls, and counts the tokens of
reasoning. Knows OpenAI's JSON and quire/output_parsers; no HTTP. Always holds: a streamed answer
equals the whole one, and no two calls of a server have the same id.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from quire.base.records import FinishReason
from quire.engine.output.answer_parser import shown_ids
from quire.engine.output.output_stream import TextRules
from quire.output_parsers.answer_parser import AnswerParser
from quire.output_parsers.parsed_answer import AnswerPiece, joined
from quire.output_parsers.selection import ParserSelection
from quire.output_parsers.tools import Tools
from quire.text.tokenizer import Tokenizer

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class ChatOutputParser:
    """The parsing of the answers to one request. tools: None if no call may be made.

    prompt: its end shows whether the template opened the reasoning. includes_reasoning: the answer
    has the reasoning.
    """

    def __init__(
        self,
        reading: ParserSelection,
        tools: Tools | None,
        *,
        prompt: str,
        request_id: str,
        includes_reasoning: bool = True,
    ) -> None:
        self._reading = reading
        self._tools = tools
        self._prompt = prompt
        self._request_id = request_id
        self._includes_reasoning = includes_reasoning

    def text_rules(self, tokenizer: Tokenizer) -> TextRules:
        """Return what the engine must report of the text."""
        return TextRules(
            shown_ids=shown_ids(self._reading, self._tools, tokenizer),
            counts_chars=self._reading.reasoning is not None,
        )

    def choice(self, index: int) -> ChoiceOutputParser:
        """Return the parser of one choice."""
        parser = AnswerParser(self._reading, self._tools, self._prompt)
        nine = self._reading.tools is not None and self._reading.tools.ids == "nine"
        return ChoiceOutputParser(
            parser,
            key=f"{self._request_id}/{index}",
            nine=nine,
            includes_reasoning=self._includes_reasoning,
        )


class ChoiceOutputParser:
    """The parser of one choice."""

    def __init__(
        self, parser: AnswerParser, *, key: str, nine: bool, includes_reasoning: bool
    ) -> None:
        self._parser = parser
        self._key = key
        self._nine = nine
        self._includes_reasoning = includes_reasoning
        self._token_chars: list[int] = []

    def deltas(
        self, text: str, token_chars: Sequence[int] = (), *, ends: bool = False
    ) -> list[dict[str, Any]]:
        """Return the `delta` objects of more text. ends: it is the last."""
        self._token_chars += token_chars
        pieces = self._parser.push(text) if text else []
        if ends:
            pieces += self._parser.end()
        return [self._delta(piece) for piece in pieces if self._is_included(piece)]

    def message(self, text: str, token_chars: Sequence[int]) -> dict[str, Any]:
        """Return the message of a whole text; call it instead of `deltas`."""
        self._token_chars += token_chars
        pieces = self._parser.push(text) + self._parser.end()
        answer = joined(pieces)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if answer.calls and not answer.content else answer.content,
            "refusal": None,
        }
        if answer.reasoning and self._includes_reasoning:
            message |= _reasoning(answer.reasoning)
        if answer.calls:
            message["tool_calls"] = [
                self._call(index, call.name, call.arguments)
                for index, call in enumerate(answer.calls)
            ]
        return message

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the finish reason: "tool_calls" if it stopped and its calls are complete."""
        parser = self._parser
        if reason is FinishReason.STOP and parser.num_calls and parser.is_whole:
            return "tool_calls"
        return reason

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens that end within reasoning or its markers; known once it has ended."""
        ends = list(accumulate(self._token_chars))
        return sum(
            bisect_right(ends, end) - bisect_right(ends, begun)
            for begun, end in self._parser.reasoned
        )

    def _is_included(self, piece: AnswerPiece) -> bool:
        return self._includes_reasoning or piece.kind != "reasoning"

    def _delta(self, piece: AnswerPiece) -> dict[str, Any]:
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return _reasoning(piece.text)
        if piece.kind == "call":
            return {"tool_calls": [{"index": piece.call, **self._call(piece.call, piece.text)}]}
        call = {"index": piece.call, "function": {"arguments": piece.text}}
        return {"tool_calls": [call]}

    def _call(self, index: int, name: str, arguments: str = "") -> dict[str, Any]:
        return {
            "id": self._id(index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _id(self, index: int) -> str:
        digest = hashlib.sha256(f"{self._key}/{index}".encode())
        if not self._nine:
            return f"call_{digest.hexdigest()[:24]}"
        number, letters = int.from_bytes(digest.digest()[:8], "big"), ""
        for _ in range(9):
            number, at = divmod(number, len(_LETTERS))
            letters += _LETTERS[at]
        return letters


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both names that clients use."""
    return {"reasoning_content": text, "reasoning": text}
