"""FallbackRun: a run of SentencePiece's byte-fallback tokens, which is decoded as a whole.

One bound: after RUN_LIMIT bytes, complete characters are returned without waiting for the end of
the run.
"""

from __future__ import annotations

import codecs
from copy import copy

Span = tuple[str, int]
"""Some text, and the index in the stream of the token that completed it."""

RUN_LIMIT = 32
UTF8 = codecs.getincrementaldecoder("utf-8")
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class FallbackRun:
    """Byte-fallback tokens: a run is its text if all of it is valid, else one U+FFFD a byte."""

    def __init__(self) -> None:
        self.held_from: int | None = None
        self.broken = False
        self._decoder = UTF8("strict")
        self._characters: list[Span] = []
        self._indexes: list[int] = []  # the token of each byte of the run

    def push(self, piece: bytes, index: int) -> list[Span]:
        if self.broken:
            return [(_BROKEN, index)]
        if self.held_from is None:
            self.held_from = index
        self._indexes.append(index)
        try:
            text = self._decoder.decode(piece)
        except UnicodeDecodeError:
            spans = self._give_up()
            self.broken = True
            return spans
        if not text:
            return []
        self._characters.append((text, index))
        return self._settle() if len(self._indexes) >= RUN_LIMIT else []

    def close(self) -> list[Span]:
        incomplete = bool(self._decoder.getstate()[0])
        spans = self._give_up() if incomplete else self._settle()
        self.broken = False
        return spans

    def copy(self) -> FallbackRun:
        twin = copy(self)
        twin._decoder = decoder_like(self._decoder, "strict")
        twin._characters, twin._indexes = self._characters.copy(), self._indexes.copy()
        return twin

    def _settle(self) -> list[Span]:
        spans = self._characters
        self._start_anew()
        return spans

    def _give_up(self) -> list[Span]:
        spans = [(_BROKEN, index) for index in self._indexes]
        self._start_anew()
        return spans

    def _start_anew(self) -> None:
        self._decoder.reset()
        self._characters = []
        self._indexes = []
        self.held_from = None


def decoder_like(
    decoder: codecs.BufferedIncrementalDecoder, errors: str
) -> codecs.BufferedIncrementalDecoder:
    """Return a decoder in the same state."""
    twin = UTF8(errors)
    twin.setstate(decoder.getstate())
    return twin
