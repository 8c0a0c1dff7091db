"""Control: how many drafts a request gets in a step.

Drafts are worth verifying if the tokens expected from them cost less than tokens cost without
them: if P / ms exceeds step_tokens / step_ms, where P is the probability that a draft and all
before it are accepted (counts: DraftCounts), and ms what it adds to the step, with the time to
compute it where a draft model does. What a number of drafts adds is no multiple of one, so the
numbers are compared. Drafts of predictions, and those that follow a long match, are counted apart,
also those of one request. Where drafts lost time lately, as it was measured, none are made for a
while. Where none pays, one is tried at times, sooner after drafts that gained much, and so is one
of a request that has none beside others, so that a better regime is noticed soon. A function of
counts and times that are given: no clock.
Always holds: no choice changes an answer; what is tried against the prices takes, as predicted, at
most FIRST_PROBE_STEPS and NEW_PROBE_SHARE of the time, and some steps each time that drafts stop
paying.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire._native import DraftCounts, draft_lengths
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.plain_counts import (
    FADE,
    LONG_MATCHES,
    MAX_TRIALS,
    NUM_KINDS,
    OF_TEXT,
    PREDICTED,
    added_by,
)
from quire.speculative.rests import DraftRests

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]

# From so many drafts on, tried lately, their acceptance is known.
INFORMED_TRIALS = 16.0
# A draft must promise this much more than it costs.
MARGIN = 1.1
# Drafts must gain such a share of a step: so well it is known how long one without takes.
UNSURE_SHARE = 0.015
# Of the time in which no draft pays, what drafts may take that are tried nevertheless, and single
# ones of new requests; for how many steps at once, if one takes no longer; and for how many at
# first, if one does.
PROBE_SHARE, NEW_PROBE_SHARE, MAX_PROBE_STEPS, FIRST_PROBE_STEPS = 0.0025, 0.0075, 0.5, 4.0
# After drafts that paid, such a part of the share of the time that they gained, over about so many
# steps, since what ended them may be over soon; each trial halves that.
PAID_PROBE_SHARE, PAID_PROBE_STEPS = 0.2, 8.0
# Drafts that are looked up are tried as long as that takes so many times as long as single ones.
LONGER_TIMES = 3.0
# A request is new until so many drafts were tried for it.
NEW_TRIALS = 4
# After so many rows of which the first draft was wrong, no further one is likelier than the first:
# what is known of further ones is of a text before, as none was tried since. One that is right
# halves that number, which is this at most.
MANY_FAILURES, MAX_FAILURES = 5, 16
NOTHING_ADDED: Float64s = np.zeros(2)


class Passes(NamedTuple):
    """Passes of a draft model: each drafts a token for some requests, so these share its time.

    ms: of a pass for 0, 1, ... requests, up to all of `rows`. rows: requests that are drafted so.
    """

    ms: Float64s
    rows: NDArray[np.bool_]


class StepCost(NamedTuple):
    """Predicted milliseconds of a step without drafts, the tokens it yields, and what each draft
    takes by its request, such as a share of the time to know its text. added_ms: what 0, 1, 2 ...
    drafts in all add to the step; further ones as the last. passes: what making the drafts takes
    besides; None: nothing. num_steps: steps since the control was asked last. once_ms, row_ms: what
    a step with drafts takes longer however many they are, and each of its rows with drafts."""

    step_ms: float
    step_tokens: int
    draft_ms: Float64s
    passes: Passes | None = None
    num_steps: int = 1
    once_ms: float = 0.0
    row_ms: float = 0.0
    added_ms: Float64s = NOTHING_ADDED

    def probe_ms(self, num_requests: int, length: int = 1) -> float:
        """Return what drafts of so many requests add, if their texts are known, each of `length`
        tokens if they are looked up."""
        num_drafts = num_requests * length
        ms = self.once_ms + num_requests * self.row_ms + added_by(self.added_ms, num_drafts)
        if self.passes is not None:
            ms += float(self.passes.ms[min(num_requests, len(self.passes.ms) - 1)])
        return ms

    def with_passes(self) -> Float64s:
        """Return what each draft takes by its request, with its share of a pass for all."""
        if self.passes is None:
            return self.draft_ms
        ms, rows = self.passes
        num = int(np.add.reduce(rows))
        share_ms: Float64s = rows * (ms[num] / max(num, 1))
        return self.draft_ms + share_ms


class Control(Protocol):
    """Chooses lengths of drafts, by slot.

    balance: what they gained; None: it does not matter. rests: steps in which it is not asked.
    is_informed: enough drafts of the engine's proposer were tried lately to know how many are
    accepted. probes: the last choice was made to learn, and pays for itself. tried_slot: has its
    draft of the last choice to learn, beside others that pay; -1: none has. speedup: that it
    promises.
    """

    balance: DraftBalance | None
    rests: DraftRests
    probes: bool
    tried_slot: int
    speedup: float

    @property
    def is_informed(self) -> bool: ...

    def begin(self, slot: int, *, predicts: bool) -> None:
        """Note that another request runs in `slot`; predicts: it brings a prediction."""

    def limits(
        self, slots: Index, limits: Int32s, cost: StepCost | None, kinds: Index | None = None
    ) -> Int32s:
        """Return how many drafts each of `slots` should get, at most limits[i].

        cost: None where it is not known: about as in the last step. kinds: of their drafts, as in
        plain_counts; None: all are of texts.
        """

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Note that of drafted[i] drafts the first accepted[i] were right."""


class FixedControl:
    """As many drafts as allowed, at most `num_drafts`. rests: as those of the adaptive control;
    NoRests: in every step."""

    balance: DraftBalance | None = None
    is_informed, probes, tried_slot, speedup = True, False, -1, math.inf

    def __init__(self, num_drafts: int, rests: DraftRests | None = None) -> None:
        self.rests = rests or DraftRests()
        self._num_drafts = np.int32(num_drafts)

    def begin(self, slot: int, *, predicts: bool) -> None:
        """Do nothing."""

    def limits(
        self, slots: Index, limits: Int32s, cost: StepCost | None, kinds: Index | None = None
    ) -> Int32s:
        """See Control."""
        return np.minimum(limits, self._num_drafts)

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Do nothing."""


class AdaptiveControl:
    """For requests in `num_slots` slots, with at most `max_drafts` drafts a step."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._max_drafts, self._num_slots = max_drafts, num_slots
        # What is known of a slot's drafts has a line for each kind of them: its number is that of
        # the slot, after those of all slots for each kind before. _lines: of the last drafts.
        self._counts = DraftCounts(NUM_KINDS * num_slots, max_drafts)
        self._lines: Index = np.arange(num_slots, dtype=np.intp)
        self._has_predicted = False  # a request brought a prediction
        self._last_cost: StepCost | None = None
        self._num_tried = 0.0  # rows with drafts of the engine's proposer; fades as the counts do
        self.probes, self.tried_slot, self.speedup = False, -1, 1.0
        self._probe_steps = FIRST_PROBE_STEPS  # so many may be lost by drafts that do not pay
        self._probe_share = PROBE_SHARE  # and so many are added by a step
        self._trials: Int32s = np.zeros(num_slots, np.int32)  # rows with drafts, by slot
        self._failures: Int32s = np.zeros(NUM_KINDS * num_slots, np.int32)  # of first ones, by line
        self._has_new = True  # a request may be new
        self.balance: DraftBalance | None = DraftBalance()
        self.rests = DraftRests()

    @property
    def is_informed(self) -> bool:
        """See Control."""
        return self._num_tried >= INFORMED_TRIALS

    def begin(self, slot: int, *, predicts: bool) -> None:
        """See Control."""
        for kind in (OF_TEXT, LONG_MATCHES, PREDICTED)[: 2 + predicts]:
            line = slot + self._num_slots * kind
            self._counts.begin(line, kind)
            self._failures[line] = 0
        self._trials[slot] = 0
        self._lines[slot] = slot
        self._has_predicted |= predicts
        self._has_new = True

    def limits(
        self, slots: Index, limits: Int32s, cost: StepCost | None, kinds: Index | None = None
    ) -> Int32s:
        """See Control."""
        if cost is not None:
            self._last_cost = cost
        elif self._last_cost is None:
            return limits
        else:
            draft_ms = float(np.mean(self._last_cost.with_passes()))
            cost = self._last_cost._replace(
                draft_ms=np.full(len(slots), draft_ms), passes=None, num_steps=0
            )
        self._num_tried *= FADE**cost.num_steps
        chances = np.empty((len(slots), self._max_drafts))
        lines = slots if kinds is None else slots + self._num_slots * kinds
        self._counts.chances(lines, cost.num_steps, chances)
        failing = self._failures[lines] >= MANY_FAILURES
        if np.logical_or.reduce(failing):
            powers = chances[failing, :1] ** np.arange(1, self._max_drafts + 1)
            chances[failing] = np.minimum(chances[failing], powers)
        lengths, self.speedup = best_lengths(chances, limits, cost)
        if cost.num_steps:  # not for the question whether there would be drafts
            self._lines[slots] = lines
            self.probes, self.tried_slot = False, -1
            if not np.logical_or.reduce(lengths):
                self._probe(slots, lengths, limits, cost)
            else:
                if self.balance is None or self.balance.has_gained:
                    share = PAID_PROBE_SHARE * (1.0 - 1.0 / self.speedup)
                    self._probe_share += (share - self._probe_share) / PAID_PROBE_STEPS
                if cost.passes is None:
                    self._probe_others(slots, lengths, limits, cost)
        return lengths

    def _probe_others(self, slots: Index, lengths: Int32s, limits: Int32s, cost: StepCost) -> None:
        """Let the least tried request that has no draft beside others have one, as soon as the
        steps so far pay for it: next to theirs it costs little, and without it nothing is learned
        of the request's drafts."""
        step_ms, num_drafts = max(cost.step_ms, 1e-9), int(np.add.reduce(lengths))
        self._probe_steps += PROBE_SHARE * cost.num_steps
        can = ((limits > 0) & (lengths == 0)).nonzero()[0]
        if not len(can):
            self._probe_steps = min(self._probe_steps, MAX_PROBE_STEPS)
            return
        one_ms = added_by(cost.added_ms, num_drafts + 1) - added_by(cost.added_ms, num_drafts)
        one_ms += cost.row_ms
        if one_ms <= self._probe_steps * step_ms:
            chosen = can[np.argmin(self._trials[slots[can]])]
            lengths[chosen], self.tried_slot = 1, int(slots[chosen])
            self._probe_steps -= one_ms / step_ms

    def _probe(self, slots: Index, lengths: Int32s, limits: Int32s, cost: StepCost) -> None:
        """Let the least tried requests have one draft, as many as the steps so far pay for; if
        their text is known to what drafts. Where the host's work for one takes much of a step, a
        single one may never pay: drafts that are looked up are longer then, if that costs little.
        """
        share = NEW_PROBE_SHARE if self._has_new else PROBE_SHARE
        step_ms, most, length = max(cost.step_ms, 1e-9), MAX_PROBE_STEPS, 1
        one_ms = cost.probe_ms(1)
        if one_ms > most * step_ms:
            share = PROBE_SHARE
            longest = 1 if cost.passes is not None else self._max_drafts
            while length < longest and cost.probe_ms(1, length + 1) <= LONGER_TIMES * one_ms:
                length += 1
            most = max(self._probe_steps, 1.01 * cost.probe_ms(1, length) / step_ms)
        share = max(share, self._probe_share)
        self._probe_steps = min(self._probe_steps + share * cost.num_steps, most)
        left_ms = self._probe_steps * step_ms
        if cost.probe_ms(1, length) > left_ms:
            return
        can = ((limits > 0) & (cost.draft_ms == 0.0)).nonzero()[0]
        num = len(can)
        while num and cost.probe_ms(num, length) > left_ms:
            num -= 1
        if num:
            trials = self._trials[slots[can]]
            self._has_new = int(np.minimum.reduce(trials)) < NEW_TRIALS
            chosen = can[np.argsort(trials, kind="stable")[:num]]
            lengths[chosen] = np.minimum(limits[chosen], np.int32(length))
            self._probe_steps -= cost.probe_ms(num, length) / step_ms
            self._probe_share = max(self._probe_share / 2.0, PROBE_SHARE)
            self.probes = True

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See Control."""
        self._trials[slots] += 1
        lines = self._lines[slots]
        failures = self._failures[lines]
        more = np.minimum(failures + 1, MAX_FAILURES)
        self._failures[lines] = np.where(accepted > 0, failures // 2, more)
        num_tried = len(slots)
        if self._has_predicted:  # they say nothing of what the engine's proposer drafts
            num_tried -= int(np.count_nonzero(lines // self._num_slots == PREDICTED))
        self._num_tried = min(self._num_tried + num_tried, MAX_TRIALS)
        self._counts.verified(lines, drafted, accepted)


def best_lengths(chances: Float64s, limits: Int32s, cost: StepCost) -> tuple[Int32s, float]:
    """Return the lengths of drafts [B] that yield most tokens per millisecond, and by how many
    times these rise.

    chances [B, K]: the probability that a draft and all before it are accepted; falls along a row.
    """
    lengths, draft_ms = np.empty(len(limits), np.int32), cost.with_passes()
    once_ms = cost.once_ms + UNSURE_SHARE * cost.step_ms
    times = (cost.step_ms, cost.step_tokens, once_ms, cost.row_ms, MARGIN)
    speedup = draft_lengths(chances, limits, draft_ms, cost.added_ms, *times, lengths)
    if cost.passes is None or not np.logical_or.reduce(lengths):
        return lengths, speedup
    rate = cost.step_tokens / max(cost.step_ms, 1e-9)
    return _without_poor_passes(lengths, chances, cost, rate), speedup


def _without_poor_passes(lengths: Int32s, chances: Float64s, cost: StepCost, rate: float) -> Int32s:
    """Return `lengths` without the last passes that too few requests share to pay for them."""
    assert cost.passes is not None, "drafts are computed"
    ms, rows = cost.passes
    num_drafts = int(np.add.reduce(lengths))
    for place in range(int(lengths[rows].max(initial=0)) - 1, -1, -1):
        drafted = rows & (lengths > place)
        num = int(np.count_nonzero(drafted))
        pass_ms = ms[num] + float(np.add.reduce(cost.draft_ms[drafted]))
        pass_ms += added_by(cost.added_ms, num_drafts) - added_by(cost.added_ms, num_drafts - num)
        if float(np.add.reduce(chances[drafted, place])) > MARGIN * rate * pass_ms:
            break
        lengths[drafted] = place
        num_drafts -= num
    return lengths
