"""PredictionProposer: the text a request predicts for its own answer (OpenAI's `prediction`).

The answer is aligned with the predicted tokens by its last tokens: the longest match wins, and of
equal ones that where the last match goes on. At first, as much of the prediction is expected to be
over as the answer is long: before anything is generated, nothing. Always holds: it knows one
prediction per slot, and forgets it with the request.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire._native import SuffixIndex
from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.proposer import LONG_MATCH, Drafts, LookupProposer

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class PredictionProposer(LookupProposer):
    """For `num_slots` slots."""

    name = "prediction"

    def __init__(self, num_slots: int) -> None:
        self._index = SuffixIndex(num_slots)
        self._texts: dict[int, Int32s] = {}  # by slot

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        assert request.speculation is not None, "a request with a prediction speculates"
        self._index.forget(slot)
        self._texts[slot] = request.speculation.prediction_ids

    def end(self, slot: int) -> None:
        """See Proposer."""
        self._index.forget(slot)
        self._texts.pop(slot, None)

    def may_find(self, tokens: TokenTable) -> bool:
        """See LookupProposer."""
        return any(self._aligns(tokens, slot, 0) for slot in self._texts)

    def finds_long(self, tokens: TokenTable, slots: Index | None) -> bool:
        """See LookupProposer; the whole of a short answer is a long match as well."""
        of_slots = self._texts if slots is None else slots.tolist()
        return any(self._aligns(tokens, slot, LONG_MATCH) for slot in of_slots)

    def _aligns(self, tokens: TokenTable, slot: int, least: int) -> bool:
        answer = tokens.tokens[slot, tokens.prompt_lengths[slot] : tokens.lengths[slot]]
        return self._index.aligns(slot, self._texts[slot], answer, least)

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        for row, slot in enumerate(slots.tolist()):
            answer = tokens.tokens[slot, tokens.prompt_lengths[slot] : tokens.lengths[slot]]
            found = self._index.follow(slot, self._texts[slot], answer, int(limits[row]))
            drafts.ids[row, : len(found)] = found
            drafts.counts[row] = len(found)
