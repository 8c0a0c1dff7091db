"""Mirror: the requests that a model or heads draft for, by slot, and a copy of their known tokens.

What computes drafts samples them with the parameters and the noise of their request, for which it
needs the request's tokens and its own drafts behind them: a TokenTable beside the target's. Knows
no executor. Always holds: the first `known[slot]` tokens of a slot are those of its request, if no
draft was put over them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class MirroringModel(Protocol):
    """What a DraftModel and a DraftHeadModel have in common.

    tokens: its mirror of the known tokens and of drafts, by slot.
    """

    @property
    def tokens(self) -> TokenTable: ...

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        """Take over the sampling parameters of `request`; its row of `tokens` becomes empty."""

    def retire(self, slot: int) -> None:
        """Forget the request in `slot`."""

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        """Set entries of the block table of `slot`, from column `first` on."""

    def close(self) -> None:
        """Free threads and memory."""


class Mirror:
    """Of requests in `num_slots` slots. known: how many tokens were copied, by slot."""

    def __init__(self, model: MirroringModel, num_slots: int) -> None:
        self._model = model
        self._requests: list[Request | None] = [None] * num_slots
        self._is_admitted = np.zeros(num_slots, np.bool_)
        self.known: Int32s = np.zeros(num_slots, np.int32)

    def begin(self, slot: int, request: Request) -> None:
        """Note that `request` runs in `slot`, which has ended."""
        self._requests[slot] = request

    def end(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._requests[slot] = None
        self.known[slot] = 0
        if self._is_admitted[slot]:
            self._is_admitted[slot] = False
            self._model.retire(slot)

    def follow(self, tokens: TokenTable, slots: Index, differs: Int32s | None = None) -> Int32s:
        """Copy new known tokens of `slots`, as many as there is room for; return how many each has
        now [B].

        differs [B]: lowered to the first position at which the mirror had another token, a draft
        that was not accepted. None: nothing is compared.
        """
        for slot in slots[~self._is_admitted[slots]].tolist():
            request = self._requests[slot]
            assert request is not None, "begin was called"
            self._model.admit(slot, request, int(tokens.prompt_lengths[slot]))
            self._is_admitted[slot] = True
        mirror, known = self._model.tokens, self.known[slots]
        lengths: Int32s = np.minimum(tokens.lengths[slots], mirror.tokens.shape[1])
        width = int((lengths - known).max(initial=0))
        if width > 0:
            positions = (known[:, None] + np.arange(width)).astype(np.int32)
            row, column = (positions < lengths[:, None]).nonzero()
            at, of_rows = positions[row, column], slots[row]
            new = tokens.at(of_rows, at)
            if differs is not None:
                wrong = mirror.at(of_rows, at) != new
                np.minimum.at(differs, row[wrong], at[wrong])
            mirror.put(of_rows, at, new)
        self.known[slots] = lengths
        return lengths
