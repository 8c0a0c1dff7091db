"""HeadProposer: what proposers over draft heads share; DraftHeadModel: what computes heads.

A head guesses from hidden states that the target left behind (HiddenStateRing). Its drafts are
sampled with the parameters and the noise of their request. Knows no executor. Always holds: a
slot's tokens are mirrored before it is drafted for. Letters: N rows, T token rows of all, W columns
of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.mirror import MirroringModel
from quire.speculative.passes import ComputingProposer
from quire.speculative.proposer import PausingProposer

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class HeadRows(NamedTuple):
    """Rows of a pass: row i computes counts[i] tokens from starts[i] on, in the head's own cache,
    and samples the token at positions[i] of its request.

    fed_back: the hidden states are those that the head returned, not the target's.
    """

    slots: Index  # [N]
    starts: Int32s  # [N]
    counts: Int32s  # [N]
    positions: Int32s  # [N]
    token_ids: Int32s  # [T]
    hidden_states: Float32s  # [T, W]
    fed_back: bool = False


class DraftHeadModel(MirroringModel, Protocol):
    """Computes draft heads (quire.runner.draft_head_runner)."""

    def compute(self, head: int, rows: HeadRows) -> tuple[Int32s, Float32s]:
        """Compute a head for `rows`; return the tokens sampled after the last one of each [N], -1
        where there is none, and their hidden states [N, H]; [N, 0] of heads that are not fed
        back."""


class HeadProposer(ComputingProposer, PausingProposer):
    """A CostlyProposer over the heads of `model`, which read the rows of `ring`.

    kept_steps: hidden states are kept again so many steps before the end of a rest.
    """

    may_begin_late = True
    kept_steps: ClassVar[int]

    def __init__(
        self,
        model: DraftHeadModel,
        ring: HiddenStateRing,
        num_slots: int,
        now_ms: Callable[[], float],
    ) -> None:
        super().__init__(model, num_slots, now_ms)
        self._model, self._ring = model, ring

    def note_rest(self, step: int, num_steps: int) -> None:
        """See PausingProposer: hidden states are kept again some steps before the end of a rest."""
        self._ring.pause(step + num_steps - self.kept_steps)

    def _pass(self, head: int, rows: HeadRows) -> tuple[Int32s, Float32s]:
        """Compute a pass and learn its time."""
        began_ms = self._now_ms()
        sampled, hidden = self._model.compute(head, rows)
        ms = self._now_ms() - began_ms
        num_needed = int(np.add.reduce(np.minimum(rows.counts, 2)))
        self._note_pass(len(rows.slots), len(rows.token_ids), num_needed, ms)
        return sampled, hidden
