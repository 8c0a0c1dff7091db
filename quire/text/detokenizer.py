"""Detokenizer: incremental conversion of token ids to text for one stream.

Returned text never changes and never ends within a character: text that may still change is held
until later ids, or `flush`, determine it. The joined pieces equal the whole decode for any ids,
however they were split. Each piece of text has the index of the token that completed it, so that a
caller that cuts the text knows which tokens were used. Nothing is decoded twice: the state is a few
bytes, and PieceTable keeps the text of each token. Joined by the rules of decoder_chain.py, pieces
equal what the `tokenizers` library decodes; tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.text.byte_alphabet import stand_ins
from quire.text.byte_fallback import UTF8, FallbackRun, Span, decoder_like

Piece = str | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRules:
    """How pieces are joined to text.

    byte_level: bytes are decoded as one UTF-8 stream. Otherwise each run of byte pieces is decoded
    as a whole: to its text if it is valid UTF-8, else to one U+FFFD per byte. strip: a character,
    and how many of it are dropped from the start of the whole text.
    """

    byte_level: bool = False
    strip: tuple[str, int] = ("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderChain:
    """A compiled decoder: `first` and `later` map a token's string to its piece."""

    rules: JoinRules
    first: Callable[[str], Piece]
    later: Callable[[str], Piece]


def byte_level_piece() -> Callable[[str], Piece]:
    """Return the map of byte-level tokens to bytes, or text where they are whole characters."""
    byte_of = {character: byte for byte, character in enumerate(stand_ins())}

    def piece(token: str) -> Piece:
        try:
            raw = bytes(byte_of[character] for character in token)
        except KeyError:  # an added token with characters outside of the alphabet is literal text
            return token
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    return piece


class PieceTable:
    """Pieces by id. num_ids: the largest id plus one.

    An id without a token has the piece b"" and no effect on its neighbours.
    """

    def __init__(
        self, token_of_id: Callable[[int], str | None], *, num_ids: int, chain: DecoderChain
    ) -> None:
        self.rules = chain.rules
        self.num_ids = num_ids
        self._token_of_id = token_of_id
        self._chain = chain
        self._later: dict[int, Piece] = {}

    def piece(self, token_id: int) -> Piece:
        """Return the piece of a token that is not first. Raises InvalidParameter out of range."""
        piece = self._later.get(token_id)
        if piece is None:
            piece = self._later[int(token_id)] = self._made(token_id, self._chain.later)
        return piece

    def first_piece(self, token_id: int) -> Piece:
        """Return the piece of a token that opens the text."""
        return self._made(token_id, self._chain.first)

    def _made(self, token_id: int, piece_of: Callable[[str], Piece]) -> Piece:
        if not 0 <= token_id < self.num_ids:
            raise InvalidParameter(
                f"token id {token_id} is out of range; ids from 0 to {self.num_ids - 1} exist",
                param="token_ids",
            )
        token = self._token_of_id(int(token_id))
        return b"" if token is None else piece_of(token)


class Vocabulary(Protocol):
    """The part of a tokenizer that a stream needs."""

    @property
    def pieces(self) -> PieceTable: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class Detokenizer:
    """State of one stream.

    skip_special_tokens: special tokens have no text, except those in shown_ids. continues: the
    stream continues other text, so its leading space is kept (at the start of a text it is not).
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        skip_special_tokens: bool = True,
        *,
        continues: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        pieces = tokenizer.pieces
        self._pieces = pieces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown_ids:
            self._skipped -= shown_ids
        self._run: _Run = _Utf8Run() if pieces.rules.byte_level else FallbackRun()
        self._opens = not continues
        strip_character, num_strip = pieces.rules.strip
        self._strip_character = strip_character
        self._num_strip = 0 if continues else num_strip
        self.num_tokens = 0

    def copy(self) -> Detokenizer:
        """Return an independent copy."""
        twin = copy(self)
        twin._run = self._run.copy()
        return twin

    @property
    def num_settled_tokens(self) -> int:
        """Return the number of leading tokens with completely returned text."""
        held = self._run.held_from
        return self.num_tokens if held is None else held

    def push(self, token_ids: Iterable[int]) -> str:
        """Add ids; return the text that is now final. Raises InvalidParameter for unknown ids."""
        return "".join(text for text, _ in self.spans(token_ids))

    def flush(self) -> str:
        """End the stream and return the text held back, as it is."""
        return "".join(text for text, _ in self.flush_spans())

    def spans(self, token_ids: Iterable[int]) -> list[Span]:
        """Like `push`, with the token that completed each piece of text."""
        spans: list[Span] = []
        skipped, piece_of, run = self._skipped, self._pieces.piece, self._run
        index = self.num_tokens
        for token_id in token_ids:
            if token_id not in skipped:
                piece: Piece
                if self._opens:
                    piece = self._pieces.first_piece(token_id)
                    self._opens = piece == b""  # an id without a token opens nothing
                else:
                    piece = piece_of(token_id)
                if isinstance(piece, bytes):
                    if piece:
                        spans += run.push(piece, index)
                else:
                    if run.held_from is not None or run.broken:
                        spans += run.close()
                    if piece:
                        spans.append((piece, index))
            index += 1
            self.num_tokens = index
        return self._without_opening(spans) if self._num_strip else spans

    def flush_spans(self) -> list[Span]:
        """Like `flush`, with the token that completed each piece of text."""
        spans = self._run.close()
        return self._without_opening(spans) if self._num_strip else spans

    def _without_opening(self, spans: list[Span]) -> list[Span]:
        kept: list[Span] = []
        for text, index in spans:
            while self._num_strip and text:
                if text[0] != self._strip_character:
                    self._num_strip = 0
                    break
                text = text[1:]
                self._num_strip -= 1
            if text:
                kept.append((text, index))
        return kept


class _Run(Protocol):
    """Bytes since the last text piece. held_from: the first token with text not yet returned."""

    held_from: int | None
    broken: bool

    def push(self, piece: bytes, index: int) -> list[Span]: ...

    def close(self) -> list[Span]: ...

    def copy(self) -> _Run: ...


class _Utf8Run:
    """Byte-level tokens: one UTF-8 stream; an ill-formed part is one U+FFFD, as Unicode advises."""

    def __init__(self) -> None:
        self.held_from: int | None = None
        self.broken = False
        self._decoder = UTF8("replace")
        self._last = 0

    def push(self, piece: bytes, index: int) -> list[Span]:
        text = self._decoder.decode(piece)
        num_held = len(self._decoder.getstate()[0])
        if num_held == 0:
            self.held_from = None
        elif self.held_from is None or num_held <= len(piece):
            self.held_from = index
        self._last = index
        return [(text, index)] if text else []

    def close(self) -> list[Span]:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self.held_from = None
        return [(text, self._last)] if text else []

    def copy(self) -> _Utf8Run:
        twin = copy(self)
        twin._decoder = decoder_like(self._decoder, "replace")
        return twin


def answer_detokenizer(
    tokenizer: Vocabulary,
    sampling: SamplingParams,
    prompt_ids: NDArray[np.int32],
    shown_ids: frozenset[int],
) -> Detokenizer:
    """Return the detokenizer of an answer: of its stream, and of the engine where text ends beams.

    shown_ids: special tokens that are text.
    """
    continues = len(prompt_ids) > 0 and int(prompt_ids[-1]) not in tokenizer.special_ids
    return Detokenizer(
        tokenizer, sampling.skip_special_tokens, continues=continues, shown_ids=shown_ids
    )
