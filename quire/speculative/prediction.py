"""PredictionProposer: the text a request predicts for its own answer (OpenAI's `prediction`).

The answer is aligned with the predicted tokens by its last tokens: the longest match wins. Before
anything is generated, the prediction is expected from its start. Always holds: it knows one
prediction per slot, and forgets it with the request.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire._native import SuffixIndex
from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.proposer import Drafts, Proposer

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class PredictionProposer(Proposer):
    """For `num_slots` slots."""

    name = "prediction"

    def __init__(self, num_slots: int) -> None:
        self._index = SuffixIndex(num_slots)
        self._texts: list[Int32s | None] = [None] * num_slots

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        assert request.speculation is not None, "a request with a prediction speculates"
        self._index.forget(slot)
        self._texts[slot] = request.speculation.prediction_ids

    def end(self, slot: int) -> None:
        """See Proposer."""
        self._index.forget(slot)
        self._texts[slot] = None

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        for row, slot in enumerate(slots.tolist()):
            text, prompt = self._texts[slot], int(tokens.prompt_lengths[slot])
            if text is None:
                continue
            answer = tokens.tokens[slot, prompt : tokens.lengths[slot]]
            found = self._index.follow(slot, text, answer, int(limits[row]))
            drafts.ids[row, : len(found)] = found
            drafts.counts[row] = len(found)
