"""Proposers and controls of the measurement: counted, synthetic, and switched between requests.

FixedAcceptance knows the answers and is right with a fixed probability; it says what verification
costs and gains, and nothing about any proposer. SwitchControl and SwitchPrices let the sides of a
cell share one engine: the adaptive control, or always k drafts. Always holds: the adaptive side
knows what it has tried itself, and nothing of what the fixed ones did.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.scheduler.speculation.draft_prices import DraftedStep, DraftPrices
from quire.speculative.control import AdaptiveControl, StepCost
from quire.speculative.ngram import NgramProposer
from quire.speculative.proposer import Drafts
from quire.speculative.rests import DraftRests

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


class FixedAcceptance(NgramProposer):
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


class SwitchControl(AdaptiveControl):
    """The adaptive control, or as many drafts as `fixed` says; None: adaptive.

    Balance and rests are of the adaptive side; a fixed one is always allowed.
    """

    fixed: int | None = None
    made: SwitchControl | None = None  # the last one: that of the engine

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        super().__init__(num_slots, max_drafts)
        self._of_adaptive = self.balance, self.rests
        # One for all runs: new rests have a step without drafts soon, which is much of a short run.
        self._of_fixed = None, DraftRests()
        SwitchControl.made = self

    @classmethod
    def switch(cls, fixed: int | None) -> None:
        """Let the engine make `fixed` drafts; None: as many as the control chooses."""
        cls.fixed = fixed
        if cls.made is not None:
            made = cls.made
            made.balance, made.rests = made._of_adaptive if fixed is None else made._of_fixed

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """See Control."""
        if self.fixed is None:
            return super().limits(slots, limits, cost)
        return np.minimum(limits, np.int32(self.fixed))

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See Control: what a fixed side tries is no experience of the adaptive one."""
        COUNTS.add(drafted, accepted)
        if self.fixed is None:
            super().verified(slots, drafted, accepted)


class SwitchPrices(DraftPrices):
    """Prices that are learned by the adaptive side only."""

    def note(self, step: DraftedStep, ms: float) -> None:
        """See DraftPrices."""
        if SwitchControl.fixed is None:
            super().note(step, ms)

    def note_after(self, ms: float) -> None:
        """See DraftPrices."""
        if SwitchControl.fixed is None:
            super().note_after(ms)

    def fade(self) -> None:
        """See DraftPrices."""
        if SwitchControl.fixed is None:
            super().fade()
