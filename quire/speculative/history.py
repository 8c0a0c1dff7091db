"""HistoryProposer: prompt lookup that also looks into answers that ended lately.

Answers repeat earlier ones: forms, boilerplate, corrections of the same text. The outputs of each
tenant and cache salt are in a ring of their own (native/src/token_history.cc); prompts are not
kept. Always holds: a request is proposed tokens of its own text, and of outputs with its tenant and
its cache salt; there are at most MAX_HISTORIES rings, of which a running request keeps its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire._native import TokenHistory
from quire.base.records import Request
from quire.speculative.ngram import NgramProposer
from quire.speculative.proposer import LearningProposer

Int32s = NDArray[np.int32]
# Tenants and salts with outputs that are kept; those that a request had last.
MAX_HISTORIES = 16


def history_bytes(max_tokens: int) -> int:
    """Return the memory of the histories of all tenants, each of `max_tokens` tokens."""
    return MAX_HISTORIES * TokenHistory.num_bytes(max_tokens) if max_tokens else 0


class HistoryProposer(NgramProposer, LearningProposer):
    """max_tokens: that are kept of the outputs of each tenant and salt."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__(num_slots)
        self._max_tokens = max_tokens
        self._histories: dict[tuple[str, str], TokenHistory] = {}  # the longest unused comes first
        self._keys: list[tuple[str, str] | None] = [None] * num_slots

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        super().begin(slot, request)
        key = request.tenant, request.cache_salt
        history = self._histories.pop(key, None)
        if history is None:
            history = self._new_history()
        self._keys[slot] = None
        if history is not None:
            self._keys[slot] = key
            self._histories[key] = history
            self._index.share(slot, history)

    def end(self, slot: int) -> None:
        """See Proposer."""
        super().end(slot)
        self._keys[slot] = None

    def learn(self, slot: int, output: Int32s) -> None:
        """See LearningProposer."""
        key = self._keys[slot]
        if key is not None:
            self._histories[key].add(output)

    def _new_history(self) -> TokenHistory | None:
        """Return an empty history, in place of the longest unused one where there are too many;
        None where running requests use all."""
        if len(self._histories) >= MAX_HISTORIES:
            unused = next((key for key in self._histories if key not in self._keys), None)
            if unused is None:
                return None
            del self._histories[unused]
        return TokenHistory(self._max_tokens)
