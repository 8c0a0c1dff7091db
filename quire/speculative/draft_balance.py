"""DraftBalance: whether drafts gained more time lately than they cost, as it was measured.

Probabilities and prices can be wrong, and drafts that are tried to learn them cost time. So what
drafts gained and lost is added up, in steps without drafts, and where the sum is not positive, none
are made for a while: a small share of the steps without drafts is what may be lost by trying. That
share is larger after drafts that paid, since what ended them may be over soon, and halves with each
trial that fails; not where a trial means to compute texts first. What a draft model computes to
know a text is an investment: its time is counted over the steps that follow, and what is left of it
when drafts end is earned by the steps without. While little is known of the acceptance, no more is
invested than there is. Knows no clock: times are arguments. Always holds: drafts lose little more
than LOSS_SHARE of the time in the long run, and for each time that they stop paying, what they
gained last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]
# Of the steps without drafts, what may be lost by trying drafts again: in the long run, after
# drafts that paid, and where the requests are others than before.
LOSS_SHARE, FIRST_SHARE, CHANGED_SHARE = 0.0075, 0.06, 0.015
# Drafts paid if they gained so many steps since they were tried last.
PAID_STEPS = 1.0
# Once in so many steps without drafts other requests are a reason to try sooner, and so are steps
# so many times as long or short; then so much is to be earned at most.
CHANGE_EVERY_STEPS, CHANGED_TIMES, CHANGED_STEPS = 128, 1.5, 0.5
# Gains and losses are remembered up to so many steps. A step counts as a loss of so many at most,
# and so do the passes for its drafts: something else may have held them up.
MAX_STEPS, MAX_LOST_STEPS, MAX_COMPUTED_STEPS = 16.0, 2.0, 8.0
# So many steps count as gained at first.
FIRST_STEPS = 12.0
# Of the time that known tokens took, a step counts so much of what is not counted yet. Steps
# without drafts are counted so many at once.
PAID_PER_STEP = 1 / 64
NOTED_STEPS = 8
# Of how far a step's time is from the mean of those before, the mean follows so much.
MEAN_SHARE = 1 / 8


class DraftBalance:
    """Begins as if some steps had been gained, so that several are tried.

    allows_drafts: whether they gained more than they lost. is_settled: no step without drafts
    changes anything. retry_steps: so many steps must be earned before drafts are tried again; more
    where a first draft takes some steps to prepare.
    """

    def __init__(self) -> None:
        self.allows_drafts = self.is_settled = True
        self.retry_steps = 0.0
        self._steps, self._unpaid_ms = FIRST_STEPS, 0.0
        self._needed_ms = 0.0  # to be earned before drafts are tried again, if more
        self._was_tried = False
        self._share = FIRST_SHARE
        self._tried_from = FIRST_STEPS  # steps when drafts were allowed last
        self._until_change = 0  # steps until a change is a reason to try
        self._step_ms = self._mean_ms = 1e-9  # of a step when it changed last, and lately
        self._plain_ms, self._num_plain = 0.0, 0  # not counted yet

    @property
    def has_gained(self) -> bool:
        """Return whether drafts gained more than they cost, so far."""
        return self._steps > FIRST_STEPS

    @property
    def steps_to_earn(self) -> int:
        """Return about how many steps without drafts earn the next trial."""
        missing = max(self.retry_steps, self._needed_ms / self._mean_ms) - self._steps
        return max(int((missing + self._unpaid_ms / self._mean_ms) / self._earned_share), 0)

    @property
    def _earned_share(self) -> float:
        """Return which share of the steps without drafts counts as gained."""
        return LOSS_SHARE if self.retry_steps or self._needed_ms else self._share

    def drafted(self, gained_ms: float, step_ms: float, computed_ms: float = 0.0) -> None:
        """Note a step with drafts, which would have taken `step_ms` without. A loss is negative.

        computed_ms: what computing the drafts took, which is no part of gained_ms.
        """
        self._was_tried = True
        gained_ms = max(gained_ms, -MAX_LOST_STEPS * step_ms)
        self._add(gained_ms - min(computed_ms, MAX_COMPUTED_STEPS * step_ms), step_ms)

    def plain(self, step_ms: float, num_steps: int = 1) -> None:
        """Note steps without drafts, which took `step_ms` in the mean."""
        if self.is_settled:
            return
        self._plain_ms += num_steps * step_ms
        self._num_plain += num_steps
        if self._num_plain >= NOTED_STEPS:
            num, self._num_plain = self._num_plain, 0
            plain_ms, self._plain_ms = self._plain_ms, 0.0
            self._until_change = max(self._until_change - num, 0)
            self._add(self._earned_share * plain_ms, plain_ms / num, num)

    def caught_up(self, ms: float) -> None:
        """Note that known tokens were computed for so long, stalls excluded, which drafts of later
        steps need."""
        self._unpaid_ms += ms
        self.is_settled = False

    def affords(self, behind_ms: Float64s, step_ms: float) -> Bools:
        """Return for which requests known tokens may be computed: those that lack the fewest, for
        as long as there is time that was gained. The first request of all is always tried.

        behind_ms: how long the known tokens of each request take. Where none can be afforded,
        drafts end until the cheapest one can be.
        """
        left_ms = step_ms * self._steps
        order = np.argsort(behind_ms, kind="stable")
        affordable = np.zeros(len(behind_ms), np.bool_)
        total_ms = np.add.accumulate(behind_ms[order]) + self._unpaid_ms
        affordable[order] = (total_ms <= left_ms) | (behind_ms[order] <= 0.0)
        if not self._was_tried:
            affordable[order[:1]] = True
        if not np.logical_or.reduce(affordable) and len(order):
            self._needed_ms = float(total_ms[0])
            self.allows_drafts = self.is_settled = False
        return affordable

    def reconsider(self) -> None:
        """Note that another request begins, which may be cheaper to try, or have better drafts."""
        self._needed_ms = 0.0
        if not self.retry_steps:
            self._note_change()

    def _note_change(self) -> None:
        """Try drafts sooner, if they are not made now and none were tried early lately."""
        if self.allows_drafts or self._until_change:
            return
        self._until_change = CHANGE_EVERY_STEPS
        self._share = max(self._share, CHANGED_SHARE)
        self._steps = max(self._steps, -CHANGED_STEPS)

    def _add(self, gained_ms: float, step_ms: float, num_steps: int = 1) -> None:
        step_ms = max(step_ms, 1e-9)
        if not 1.0 / CHANGED_TIMES < step_ms / self._step_ms < CHANGED_TIMES:  # another batch
            self._step_ms = self._mean_ms = step_ms
            self._note_change()
        self._mean_ms += MEAN_SHARE * (step_ms - self._mean_ms)
        due_ms = num_steps * PAID_PER_STEP * self._unpaid_ms
        self._unpaid_ms = self._unpaid_ms - due_ms if due_ms > 1e-3 * num_steps * step_ms else 0.0
        needed = self._needed_ms / step_ms
        steps = self._steps + (gained_ms - due_ms) / step_ms
        self._steps = min(max(steps, -MAX_STEPS), max(MAX_STEPS, needed))
        if self.allows_drafts:
            if self._steps >= self._tried_from + PAID_STEPS:
                self._share, self._tried_from = FIRST_SHARE, self._steps
            if self._steps <= 0.0:
                self._end()
        elif self._steps > 0.0 and self._steps >= max(self.retry_steps, needed):
            self.allows_drafts = True
            self._needed_ms, self._tried_from = 0.0, self._steps
        self.is_settled = self.allows_drafts and not self._unpaid_ms

    def _end(self) -> None:
        """Make no drafts for a while; a longer one each time, until some paid."""
        self._share = max(self._share / 2.0, LOSS_SHARE)
        self.allows_drafts = self.is_settled = False
