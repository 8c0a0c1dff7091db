"""TokenIndex: the tokens of a vocabulary by what they can do within arrays of JSON.

Built once for a vocabulary, with the first grammar that has uniqueItems (unique_tracker.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_ENTERS = re.compile(rb"\[.*,", re.DOTALL)
_DIGITS = re.compile(rb"[1-9][0-9]*")
_ENDS_ONLY = re.compile(rb'"[ \t\r\n,\]}]*\Z')


class TokenIndex:
    """The tokens of a vocabulary by what they can do to items."""

    def __init__(self, token_bytes: Sequence[bytes], textless: Collection[int]) -> None:
        """textless: ids without text, such as end tokens."""
        self.bytes = [b"" if id_ in textless else raw for id_, raw in enumerate(token_bytes)]
        self.by_bytes: dict[bytes, list[int]] = defaultdict(list)
        # By the part before the first quote, if that has no escapes.
        self.by_rest: dict[bytes, list[int]] = defaultdict(list)
        self.longest = max(map(len, self.bytes), default=0)
        for id_, token in enumerate(self.bytes):
            self.by_bytes[token].append(id_)
            rest, quote, _ = token.partition(b'"')
            if quote and b"\\" not in rest:
                self.by_rest[rest].append(id_)
        # In a string: end an item and begin another, or need an item after this one.
        self.enters = self._where(lambda token: _ENTERS.search(token) is not None)
        self.commas = self._where(lambda token: b"," in token)
        self.ends_and_commas = self._where(lambda token: b'"' in token and b"," in token)
        self.begins_next = self._where(_begins_next)
        self.digits = self._where(lambda token: _DIGITS.fullmatch(token) is not None)
        self.escapes = self._where(lambda token: b"\\" in token)

    def _where(self, holds: Callable[[bytes], bool]) -> Ids:
        return np.array([id_ for id_, token in enumerate(self.bytes) if holds(token)], np.int64)


def _begins_next(token: bytes) -> bool:
    """Return whether a token, in a string, may end it and go on beyond the comma after it."""
    if b'"' not in token or b"," not in token:
        return False
    rest, _, _ = token.partition(b'"')
    return b"\\" in rest or _ENDS_ONLY.match(token, len(rest)) is None
