"""A synthetic proposer of the measurement: right with a fixed probability.

FixedAcceptance knows the answers; it says what verification costs and gains, and nothing about any
proposer. Always holds: of each answer exactly `rate` of the drafts are right, at places drawn by
its prompt, so that a short measurement has the acceptance that it is named for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.ngram import NgramProposer
from quire.speculative.proposer import Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class FixedAcceptance(NgramProposer):
    """Proposes the known answer of each prompt, with the wrong token in a share 1 - `rate`."""

    knows_matches = False
    rate = 0.7
    answers: dict[bytes, tuple[int, ...]] = {}  # noqa: RUF012  set by the measurement

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._drafts: dict[int, Int32s] = {}

    def begin(self, slot: int, request: Request) -> None:
        answer = np.array(self.answers.get(request.prompt_ids.tobytes(), ()), np.int32)
        rng = np.random.default_rng(len(answer) + int(request.prompt_ids.sum()))
        is_right = np.arange(len(answer)) < round(self.rate * len(answer))
        is_right = rng.permutation(is_right)
        self._drafts[slot] = np.where(is_right, answer, (answer + 1) % 1000).astype(np.int32)

    def end(self, slot: int) -> None:
        self._drafts.pop(slot, None)

    def may_find(self, tokens: TokenTable) -> bool:
        return True

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        done = tokens.lengths[slots] - tokens.prompt_lengths[slots]
        for row, slot in enumerate(slots.tolist()):
            following = self._drafts[slot][done[row] : done[row] + limits[row]]
            drafts.ids[row, : len(following)] = following
            drafts.counts[row] = len(following)
