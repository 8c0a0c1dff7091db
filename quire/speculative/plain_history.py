"""The last tokens of texts that have ended, and what followed them there: plain twin of the native
TokenHistory.

A ring of tokens with a mark between two texts. The place where the last match goes on is compared
first, as in a SuffixIndex, then occurrences of a text's last two tokens backwards, the latest
first; matches of fewer than MIN_HISTORY_MATCH tokens are none, since two texts have short sequences
in common by chance. Adding a token takes constant time,
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
        self._num_left = 0  # tokens that made room

    def add(self, tokens: Int32s) -> None:
        """Add a text; its last tokens if there are too many. The oldest make room."""
        kept = tokens[-self.max_tokens :].tolist()
        if kept:
            self._num_left += max(len(self._tokens) + 1 + len(kept) - self.max_tokens, 0)
            self._tokens = [*self._tokens, BETWEEN, *kept][-self.max_tokens :]

    def longest_match(self, tail: list[int], following: int = 0) -> Match:
        """Return the longest match of the last tokens of `tail` that something follows.

        following: a place that is compared first, where the last match goes on; 0: none.
        """
        best, num = Match(0, 0), 0
        if len(tail) < MIN_HISTORY_MATCH:
            return best
        places = [following - self._num_left, *range(len(self._tokens) - 1, 1, -1)]
        for number, end in enumerate(places):
            length = self._match_length(end, tail)
            if length < MIN_HISTORY_MATCH:
                continue
            if length > best.length:
                best = Match(end + self._num_left, length)
            num += number > 0
            if num == MAX_CANDIDATES or best.length == MAX_MATCH:
                break
        return best

    def _match_length(self, end: int, tail: list[int]) -> int:
        """Return how many tokens before the place `end` of those kept are the last of `tail`; 0
        where nothing follows."""
        tokens, length = self._tokens, 0
        if not 0 < end < len(tokens) or tokens[end] == BETWEEN:
            return 0
        most = min(MAX_MATCH, end, len(tail))
        while length < most and tokens[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def continuation(self, match: Match, limit: int) -> list[int]:
        """Return what follows a match, at most to the end of its text."""
        begin = match.end - self._num_left
        following = self._tokens[begin : begin + limit]
        return following[: following.index(BETWEEN)] if BETWEEN in following else following
