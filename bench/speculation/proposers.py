"""Proposers and controls of the measurement: counted, synthetic, and switched between requests.

FixedAcceptance knows the answers and is right with a fixed probability; it says what verification
costs and gains, and nothing about any proposer. SwitchControl lets the sides of a cell share one
engine: the adaptive control, or always k drafts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.control import AdaptiveControl, StepCost
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.draft_model import ModelProposer
from quire.speculative.history import HistoryProposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.proposer import Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class Counts:
    """Drafts verified and accepted since `clear`, and the rows that had some."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.rows = self.drafted = self.accepted = 0

    def add(self, drafted: Int32s, accepted: Int32s) -> None:
        """Add rows of a step."""
        self.rows += len(drafted)
        self.drafted += int(drafted.sum())
        self.accepted += int(accepted.sum())


COUNTS = Counts()  # of all proposers of this process


class CountedNgrams(NgramProposer):
    """Prompt lookup that counts what became of its drafts."""

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        COUNTS.add(drafted, accepted)


class CountedModel(ModelProposer):
    """A draft model, with counts of what became of its drafts."""

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        COUNTS.add(drafted, accepted)


class CountedHistory(HistoryProposer):
    """Prompt lookup with earlier answers, with counts of what became of its drafts."""

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        COUNTS.add(drafted, accepted)


class FixedAcceptance(CountedNgrams):
    """Proposes the known answer of each prompt; each token is right with probability `rate`."""

    rate = 0.7
    answers: dict[bytes, tuple[int, ...]] = {}  # noqa: RUF012  set by the measurement

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._drafts: dict[int, Int32s] = {}

    def begin(self, slot: int, request: Request) -> None:
        answer = np.array(self.answers.get(request.prompt_ids.tobytes(), ()), np.int32)
        rng = np.random.default_rng(len(answer) + int(request.prompt_ids.sum()))
        wrong = rng.random(len(answer)) >= self.rate
        self._drafts[slot] = np.where(wrong, (answer + 1) % 1000, answer).astype(np.int32)

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


class SwitchBalance(DraftBalance):
    """A balance of the adaptive side only; fixed ones are always allowed."""

    def drafted(self, gained_ms: float, step_ms: float, computed_ms: float = 0.0) -> None:
        if SwitchControl.fixed is None:
            super().drafted(gained_ms, step_ms, computed_ms)

    def plain(self, step_ms: float) -> None:
        if SwitchControl.fixed is None:
            super().plain(step_ms)

    def caught_up(self, ms: float) -> None:
        if SwitchControl.fixed is None:
            super().caught_up(ms)

    @property
    def allows_drafts(self) -> bool:  # type: ignore[override]
        return SwitchControl.fixed is not None or self._allows

    @allows_drafts.setter
    def allows_drafts(self, allows: bool) -> None:
        self._allows = allows


class SwitchControl(AdaptiveControl):
    """The adaptive control, or as many drafts as `fixed` says; None: adaptive."""

    fixed: int | None = None

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        super().__init__(num_slots, max_drafts)
        self.balance = SwitchBalance()

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """See Control."""
        if self.fixed is None:
            return super().limits(slots, limits, cost)
        return np.minimum(limits, np.int32(self.fixed))

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See Control: what a fixed side tries is no experience of the adaptive one."""
        if self.fixed is None:
            super().verified(slots, drafted, accepted)
