"""NgramProposer: what followed the last tokens where they occurred before in the same request.

Prompt lookup: answers repeat names, code and quotations of their prompt, and themselves. The index
is native (native/src/suffix_index.cc) and follows the known tokens as they grow: chains of places
by pairs of tokens, no suffix tree or automaton, and so no suffix decoding, which counts what
followed in a tree of texts. Always holds: it reads the request's own tokens only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire._native import SuffixIndex
from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.proposer import LONG_MATCH, Drafts, LookupProposer

# Of the index, by token of a text: the place of the one before it, and two buckets at most.
INDEX_TOKEN_BYTES = 12
Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class NgramProposer(LookupProposer):
    """For `num_slots` slots."""

    name = "ngram"
    knows_matches = True

    def __init__(self, num_slots: int) -> None:
        self._index = SuffixIndex(num_slots)
        self._begun: set[int] = set()
        self._slots: Index | None = None  # these, as the index takes them

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        self._index.forget(slot)
        self._begun.add(slot)
        self._slots = None

    def end(self, slot: int) -> None:
        """See Proposer."""
        self._index.forget(slot)
        self._begun.discard(slot)
        self._slots = None

    def may_find(self, tokens: TokenTable) -> bool:
        """See LookupProposer: whether the last tokens of any request occurred before."""
        return self._index.finds_any(tokens.tokens, self._all_slots(), tokens.lengths, 0)

    def finds_long(self, tokens: TokenTable, slots: Index | None) -> bool:
        """See LookupProposer."""
        slots = self._all_slots() if slots is None else slots
        return self._index.finds_any(tokens.tokens, slots, tokens.lengths, LONG_MATCH)

    def _all_slots(self) -> Index:
        if self._slots is None:
            self._slots = np.array(sorted(self._begun), np.intp)
        return self._slots

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        lengths = tokens.lengths[slots]
        self._index.propose(tokens.tokens, slots, lengths, limits, *drafts)
