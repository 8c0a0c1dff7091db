"""What proposers over draft heads share: requests by slot, the mirror of known tokens, and times.

A head guesses from hidden states that the target left behind (FeatureRing). Its drafts are sampled
with the parameters and the noise of their request, for which it needs the tokens before them: the
mirror. Knows no executor. Always holds: a slot's tokens are mirrored before it is drafted for.
Letters: N rows, T token rows of all, W columns of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.pass_times import PassTimes

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


class HeadRows(NamedTuple):
    """Rows of a pass: row i computes counts[i] tokens from starts[i] on, in the head's own cache,
    and samples the token at positions[i] of its request."""

    slots: Index  # [N]
    starts: Int32s  # [N]
    counts: Int32s  # [N]
    positions: Int32s  # [N]
    token_ids: Int32s  # [T]
    features: Float32s  # [T, W]


class HeadModel(Protocol):
    """Computes draft heads (quire.runner.head_runner). tokens: its mirror, by slot."""

    @property
    def tokens(self) -> TokenTable: ...

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        """Take over the sampling parameters of `request`; its row of `tokens` becomes empty."""

    def retire(self, slot: int) -> None:
        """Forget the request in `slot`."""

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        """Set entries of the block table of `slot`, from column `first` on."""

    def compute(self, head: int, rows: HeadRows) -> tuple[Int32s, Float32s]:
        """Compute a head for `rows`; return the tokens sampled after the last one of each [N], -1
        where there is none, and their hidden states [N, H]."""

    def close(self) -> None:
        """Free threads and memory."""


class HeadRequests:
    """The requests that a HeadModel drafts for, by slot. now_ms: times the passes."""

    def __init__(self, model: HeadModel, num_slots: int, now_ms: Callable[[], float]) -> None:
        self.model, self.now_ms = model, now_ms
        self.pass_times = PassTimes(num_slots)
        self._requests: list[Request | None] = [None] * num_slots
        self._is_admitted = np.zeros(num_slots, np.bool_)
        self.known: Int32s = np.zeros(num_slots, np.int32)  # tokens in the mirror

    def begin(self, slot: int, request: Request) -> None:
        """Note that `request` runs in `slot`."""
        self.end(slot)
        self._requests[slot] = request

    def end(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._requests[slot] = None
        self.known[slot] = 0
        if self._is_admitted[slot]:
            self._is_admitted[slot] = False
            self.model.retire(slot)

    def follow(self, tokens: TokenTable, slots: Index) -> Int32s:
        """Copy new known tokens of `slots` to the mirror; return how many each has [N]."""
        for slot in slots[~self._is_admitted[slots]].tolist():
            request = self._requests[slot]
            assert request is not None, "begin was called"
            self.model.admit(slot, request, int(tokens.prompt_lengths[slot]))
            self._is_admitted[slot] = True
        known, lengths = self.known[slots], tokens.lengths[slots]
        width = int((lengths - known).max(initial=0))
        if width > 0:
            positions = (known[:, None] + np.arange(width)).astype(np.int32)
            row, column = (positions < lengths[:, None]).nonzero()
            at, of_rows = positions[row, column], slots[row]
            self.model.tokens.put(of_rows, at, tokens.at(of_rows, at))
        self.known[slots] = lengths
        return lengths

    def compute(self, head: int, rows: HeadRows) -> tuple[Int32s, Float32s]:
        """Compute a pass and learn its time: of a draft if it has at most two tokens a row, else of
        tokens."""
        began_ms = self.now_ms()
        sampled, hidden = self.model.compute(head, rows)
        ms, num_tokens = self.now_ms() - began_ms, len(rows.token_ids)
        if num_tokens <= 2 * len(rows.slots):
            self.pass_times.note(len(rows.slots), ms)
        else:
            self.pass_times.note_tokens(num_tokens, ms)
        return sampled, hidden
