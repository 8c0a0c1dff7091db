"""The last tokens of texts that have ended, and what followed them there: plain twin of the native
TokenHistory.

A ring of tokens with a mark between two texts. Occurrences of a text's last two tokens are compared
backwards, the latest first, as in a SuffixIndex; matches of fewer than MIN_HISTORY_MATCH tokens are
none, since two texts have short sequences in common by chance. Adding a token takes constant time,
and a token that has left the ring is found no more. Always holds: a match and what follows it lie
in one text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

MIN_HISTORY_MATCH = 4
MAX_MATCH = 32
MAX_CANDIDATES = 32
BETWEEN = -1  # two texts; no token id


class Match(NamedTuple):
    """end: of the match, in all tokens so far; 0: there is none."""

    end: int
    length: int


class PlainTokenHistory:
    """At most `max_tokens` tokens, the marks between texts included."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tokens: list[int] = []

    def add(self, tokens: Int32s) -> None:
        """Add a text; its last tokens if there are too many. The oldest make room."""
        kept = tokens[-self.max_tokens :].tolist()
        if kept:
            self._tokens = [*self._tokens, BETWEEN, *kept][-self.max_tokens :]

    def longest_match(self, tail: list[int]) -> Match:
        """Return the longest match of the last tokens of `tail` that something follows."""
        best, tokens, num = Match(0, 0), self._tokens, 0
        if len(tail) < MIN_HISTORY_MATCH:
            return best
        for end in range(len(tokens) - 1, 1, -1):
            if tokens[end - 2 : end] != tail[-2:] or tokens[end] == BETWEEN:
                continue
            length = 0
            while length < min(MAX_MATCH, end, len(tail)) and (
                tokens[end - 1 - length] == tail[-1 - length]
            ):
                length += 1
            if length < MIN_HISTORY_MATCH:
                continue
            if length > best.length:
                best = Match(end, length)
            num += 1
            if num == MAX_CANDIDATES:
                break
        return best

    def continuation(self, match: Match, limit: int) -> list[int]:
        """Return what follows a match, at most to the end of its text."""
        following = self._tokens[match.end : match.end + limit]
        return following[: following.index(BETWEEN)] if BETWEEN in following else following
