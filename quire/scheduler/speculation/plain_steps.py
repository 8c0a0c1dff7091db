"""PlainSteps: steps without drafts that are made to be timed, and what drafts cost beside them.

Drafts are judged against steps without, of about as many rows: some are made where none was timed,
and where the source of drafts says that one is due. The first after drafts is slower than those
that follow it; what these took longer is part of the price of drafts. Knows the numbers of rows,
positions and milliseconds; no requests, no proposers and no clock. Always holds: where none was
timed, of FIRST_RUN_EVERY steps of some rows MAX_PLAIN_STEPS + TIMED_STEPS are made for that at
most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.records import StepPlan
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.interfaces import DraftCost
from quire.scheduler.speculation.draft_prices import DraftedStep, DraftPrices
from quire.scheduler.speculation.step_curve import bucket_of

Int32s = NDArray[np.int32]
# Steps without drafts in turn until one can be timed, to judge drafts against, and one more where
# plans overlap: the first after drafts is slower than those that follow it, and does not overlap.
# Short steps are slower until about so many milliseconds have passed; so many steps at most count.
PLAIN_STEPS, SETTLING_MS, MAX_PLAIN_STEPS = 2, 3.0, 8
# So many are timed after these.
TIMED_STEPS = 2
# Where no step of about as many rows was timed, steps without drafts are made once in so many
# steps: prompts may come between them, so that none is timed.
FIRST_RUN_EVERY = 128


class PlainSteps:
    """Of one scheduler. left: so many further steps have no drafts, to be timed. num_untimed: so
    many steps without drafts are timed still. prompts_ms: what prompts add to the step for which
    the cost was asked last."""

    def __init__(self, speed: SpeedEstimate, *, overlaps: bool) -> None:
        self.prices = DraftPrices()
        self.left, self.num_untimed, self.prompts_ms = 0, TIMED_STEPS, 0.0
        self._speed, self._overlaps = speed, overlaps
        self._plain_steps = PLAIN_STEPS + overlaps  # in turn until one can be timed
        self._due = self._plain_steps - 1
        self._num_plain = 0  # since drafts were asked for
        # What the steps since one with drafts took longer than they do without; None: that is over.
        self._after_ms: float | None = None
        self._asked_step = 0  # the last for which drafts were asked for
        self._known_rows = 0  # steps of so many without drafts were timed
        self._first_runs: dict[int, int] = {}  # when some were made to be timed, by bucket of rows

    def note(self, plan: StepPlan, ms: float, *, follows: bool) -> None:
        """Learn from a step without drafts, of one position a row. follows: see DraftRows.took."""
        num_rows = len(plan.slots)
        self._num_plain += 1
        if plan.step == self._asked_step:  # in vain
            self._end_after()
            if not plan.admissions:
                self.prices.note_asked(num_rows, ms)
        elif follows or self._num_plain >= self._plain_steps:
            self._end_after()
            self.num_untimed -= 1
            self.prices.note_plain(num_rows, ms)
            self._known_rows = 0
        elif self._after_ms is not None:
            self._after_ms += self.prices.excess_ms(num_rows, ms)

    def note_drafted(self, predicted: DraftedStep, ms: float) -> None:
        """Learn from a step with drafts."""
        self._num_plain = 0
        self.prices.note(predicted, ms)
        if self._after_ms is not None:
            self.prices.note_after(self._after_ms)
        self._after_ms = 0.0

    def note_ask(self, step: int) -> None:
        """Note that drafts are asked for."""
        self._num_plain, self._asked_step = 0, step

    def _end_after(self) -> None:
        """Let the price of a step with drafts have what later ones took longer for it."""
        if self._after_ms is not None:
            self.prices.note_after(self._after_ms)
            self._after_ms = None

    def begin_if_due(self, counts: Int32s, ends: Int32s, step: int, *, is_due: bool) -> bool:
        """Begin a run of steps without drafts with `step`, so that some can be timed, where as many
        are due or none of so many rows was timed; return whether it has begun. is_due: a further
        one is."""
        self._due += is_due
        num_steps = self._plain_steps
        if self._due < num_steps:
            num_rows = len(counts)  # 0: layers of a prompt only
            if num_rows in (0, self._known_rows) or int(np.add.reduce(counts)) > num_rows:
                return False
            step_ms = self.prices.known_plain_ms(num_rows)
            self._known_rows = num_rows * (step_ms > 0.0)
            settling_steps = 0  # where plans overlap, the first that follows another is timed
            if not self._overlaps:
                settling_steps = int(SETTLING_MS / max(step_ms or self._one_each_ms(ends), 1e-3))
            self._plain_steps = min(PLAIN_STEPS + settling_steps, MAX_PLAIN_STEPS) + self._overlaps
            bucket = bucket_of(num_rows)
            if step_ms or step < self._first_runs.get(bucket, -FIRST_RUN_EVERY) + FIRST_RUN_EVERY:
                return False
            self._first_runs[bucket] = step
            num_steps = self._plain_steps + TIMED_STEPS - 1
        self._due, self.left = 0, num_steps - 1
        return True

    def cost(
        self, starts: Int32s, counts: Int32s, ends: Int32s, able_ends: Int32s, num_drafts: int
    ) -> DraftCost:
        """Return what up to `num_drafts` drafts cost in a step of such rows, of which those that
        may have drafts end at `able_ends`."""
        price, prices, num_rows = self._speed.latest, self.prices, len(counts)
        depth = float(np.add.reduce(able_ends)) / len(able_ends)
        slope_ms = price.token_ms + price.score_ms + price.position_ms * depth
        num_positions, self.prompts_ms = int(np.add.reduce(counts)), 0.0
        plain_ms = step_ms = prices.plain_ms(num_rows, slope_ms)
        if not plain_ms:
            step_ms = self._one_each_ms(ends)
        if num_positions > num_rows:  # the tokens of drafts would come from steps without prompts
            rows_ms = float(np.add.reduce(price.rows_ms(starts, counts)))
            one_ms = float(np.add.reduce(price.rows_ms(ends, np.ones_like(ends))))
            plain_ms, self.prompts_ms = 0.0, max(rows_ms - one_ms, 1e-9)
        return DraftCost(
            step_ms=step_ms,
            step_tokens=num_rows,
            added_ms=prices.added_ms(num_positions, num_drafts, plain_ms, slope_ms),
            row_ms=prices.row_ms,
            asked_ms=max(prices.asked_ms, 0.0),
        )

    def _one_each_ms(self, starts: Int32s) -> float:
        """Return what a step of rows with one token each is predicted to take by the cost model."""
        price = self._speed.latest
        rows_ms = price.rows_ms(starts, np.ones_like(starts))
        return price.fixed_ms + float(np.add.reduce(rows_ms)) + len(starts) * price.score_ms
