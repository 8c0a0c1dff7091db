"""Parse a chat's answer: reasoning, content and tool calls, in no API's form.

`ChatOutputParser` creates a parser for each choice, which assigns ids to calls and counts the
tokens of reasoning; a dialect writes the pieces. Always holds: the pieces of a streamed answer make
the whole one, and no two calls of a server have the same id.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from quire.engine.output.answer_parser import shown_ids
from quire.engine.output.output_stream import TextRules
from quire.output_parsers.answer_parser import AnswerParser
from quire.output_parsers.parsed_answer import AnswerPiece, ParsedAnswer, joined
from quire.output_parsers.selection import ParserSelection
from quire.output_parsers.tools import Tools
from quire.text.tokenizer import Tokenizer

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A rendered conversation. template: its source. shows_tools: the text has the tools."""

    text: str
    template: str
    shows_tools: bool


class ChatOutputParser:
    """The parsing of the answers to one request. tools: None if no call may be made.

    prompt: its end shows whether the template opened the reasoning. includes_reasoning: the answer
    has the reasoning. call_prefix: of the ids of calls, unless the template needs nine letters.
    """

    def __init__(
        self,
        reading: ParserSelection,
        tools: Tools | None,
        *,
        prompt: str,
        request_id: str,
        includes_reasoning: bool = True,
        call_prefix: str = "call_",
    ) -> None:
        self._call_prefix = call_prefix
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
            id_prefix="" if nine else self._call_prefix,
            includes_reasoning=self._includes_reasoning,
        )


class ChoiceOutputParser:
    """The parser of one choice. id_prefix: of the ids of calls; "": they have nine letters."""

    def __init__(
        self, parser: AnswerParser, *, key: str, id_prefix: str, includes_reasoning: bool
    ) -> None:
        self._parser = parser
        self._key = key
        self._id_prefix = id_prefix
        self._includes_reasoning = includes_reasoning
        self._token_chars: list[int] = []

    def pieces(
        self, text: str, token_chars: Sequence[int] = (), *, ends: bool = False
    ) -> list[AnswerPiece]:
        """Return the pieces of more text. ends: it is the last."""
        self._token_chars += token_chars
        pieces = self._parser.push(text) if text else []
        if ends:
            pieces += self._parser.end()
        return [piece for piece in pieces if self._includes_reasoning or piece.kind != "reasoning"]

    def whole(self, text: str, token_chars: Sequence[int]) -> ParsedAnswer:
        """Return the parts of a whole text; call it instead of `pieces`."""
        return joined(self.pieces(text, token_chars, ends=True))

    @property
    def has_complete_calls(self) -> bool:
        """Whether the answer has calls and all of them are complete."""
        return bool(self._parser.num_calls) and self._parser.is_whole

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens that end within reasoning or its markers; known once it has ended."""
        ends = list(accumulate(self._token_chars))
        return sum(
            bisect_right(ends, end) - bisect_right(ends, begun)
            for begun, end in self._parser.reasoned
        )

    def call_id(self, index: int) -> str:
        """Return the id of a call, in the form that the model's template needs."""
        digest = hashlib.sha256(f"{self._key}/{index}".encode())
        if self._id_prefix:
            return f"{self._id_prefix}{digest.hexdigest()[:24]}"
        number, letters = int.from_bytes(digest.digest()[:8], "big"), ""
        for _ in range(9):
            number, at = divmod(number, len(_LETTERS))
            letters += _LETTERS[at]
        return letters
