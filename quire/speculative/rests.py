"""DraftRests: the steps in which no drafts are asked for, because they did not pay lately, or so
that there are steps without drafts to judge them against.

Counts steps; knows no clock and no requests. Always holds: while drafts pay, one step in
STEPS_PER_PLAIN rests; while they do not, rests double up to a limit, at which asking takes
ASK_SHARE of the time, and are halved by each step in which drafts pay; at most every second rest
ends early for a request that begins, while the short ones after a lookup in vain may all do. Where
proposers know how long matches are, a long one ends a rest; they are looked for less often each
time that no draft of one pays.
"""

from __future__ import annotations

import math

# Where no draft pays, the control is asked again after 1, 2, 4, ... steps, up to as many as earn
# what asking takes, as measured, with this share of their time; within these limits. It takes a
# part of a millisecond: much of the step of a small model, and little of that of a large one.
ASK_SHARE, MIN_REST_MS, MAX_REST_MS, MIN_REST_STEPS = 0.001, 80.0, 320.0, 4
# Counts of accepted drafts fade in steps: after so many, half is left of what one trial showed.
FORGOTTEN_STEPS = 64
# Of so many steps with drafts in turn, one has none: what drafts add to a step is judged against
# steps without. It comes sooner where drafts gain little, so that such a step loses little: such a
# share of the time at most. The first comes at once.
STEPS_PER_PLAIN, MIN_STEPS_PER_PLAIN, PLAIN_SHARE = 64, 8, 0.0075
STEPS_BEFORE_PLAIN = 1
# A lookup that finds nothing is followed by a rest of such a part of the one before; after so many
# in turn, by one of so many milliseconds, in so many steps at most: it takes some microseconds,
# which is much of the step of a small model only. Once so many more found nothing it is twice as
# long, so many times at most.
MISS_PART, MANY_MISSES, MISS_MS, MAX_MISS_STEPS = 16, 32, 8.0, 31
MORE_MISSES, MAX_DOUBLINGS = 8, 2
# A rest that ended early for a new request, and in vain, is followed by one that may not; after the
# second in turn by two, and never by more.
MAX_EARLY_RESTS = 2
# During a rest, long matches are looked for after so many steps, then twice as many, up to so many
# milliseconds: drafts that follow one are right far more often than those that did not pay.
LOOK_STEPS, LOOK_MS, MAX_LOOK_STEPS = 4, 16.0, 128


class DraftRests:
    """last: how many steps the present rest was meant to have, 0 while drafts pay; left: and still
    has. looks: long matches are looked for meanwhile, in `until_look` steps next."""

    def __init__(self, *, looks: bool = False) -> None:
        self.last = self.left = 0
        self.looks = looks
        # Steps until a long match is looked for, and between two such steps, now and at most.
        self.until_look = self._look_steps = self._max_look_steps = LOOK_STEPS
        self._look_times = 1  # they come so many times as seldom, since no such draft paid
        self._found_long = False  # the last ask was made for a long match
        self._since = 1  # steps since the control was asked, with this one and those in `left`
        self._kept = 0  # what the last rest counts for still
        # Rests until one may end early, after one that did, and how many the next time.
        self._ended_early, self._until_early, self._early_rests = False, 0, 1
        self._num_misses = 0  # lookups in turn that found nothing
        self._until_plain = STEPS_BEFORE_PLAIN

    def another(self, *, looks: bool) -> DraftRests:
        """Return rests of this kind, for other drafts."""
        return type(self)(looks=looks)

    @property
    def num_steps(self) -> int:
        """Return the steps since the control was asked last."""
        return self._since - self.left

    @property
    def has_missed(self) -> bool:
        """Return whether the last lookup found nothing, or nothing could be computed."""
        return self._num_misses > 0

    @property
    def quiet(self) -> int:
        """Return how many of the steps of the rest pass before anything is looked for."""
        return min(self.left, max(self.until_look, 0)) if self.looks else self.left

    def note_look(self, *, finds: bool) -> None:
        """Note whether a long match was found in this step of a rest, which ends then."""
        if finds:
            self._end()
            self._found_long = True
            return
        self.left -= 1
        self._look_steps = min(2 * self._look_steps, self._max_look_steps)
        self.until_look = self._look_steps

    def end_early(self) -> None:
        """Ask in the next step, as the requests are others, unless that was in vain lately: where
        many short requests begin, each would be an ask. A rest after a lookup in vain may always
        end: a lookup is no ask."""
        if self._num_misses:
            self.forget_misses()
        elif self.left and not self._until_early:
            self._end()
            self._ended_early = True

    def note_success(self) -> None:
        """Note that drafts that were tried were right: ask in the next step, if that were forgotten
        at the end of the rest."""
        if self.left >= FORGOTTEN_STEPS:
            self._end()

    def takes_plain_step(self) -> bool:
        """Return whether this step has no drafts, to judge others against it; asked once a step."""
        if self._until_plain:
            return False
        self._until_plain = STEPS_PER_PLAIN
        return True

    def note_miss(self, step_ms: float) -> None:
        """Note a step in which lookups find nothing, or nothing can be computed. step_ms: what it
        takes; 0: that is unknown."""
        self._num_misses += 1
        num_steps = self._kept // MISS_PART
        if self._num_misses >= MANY_MISSES and step_ms:
            doublings = (self._num_misses - MANY_MISSES) // MORE_MISSES
            most = min(
                int(MISS_MS / max(step_ms, 1e-3)) << min(doublings, MAX_DOUBLINGS), MAX_MISS_STEPS
            )
            num_steps = max(num_steps, most)
        if self.looks:
            if self._num_misses < MANY_MISSES:
                num_steps = min(num_steps, self._look_steps)
            self.until_look = num_steps
        self.left = num_steps
        self._since += 1 + num_steps

    def forget_misses(self) -> None:
        """Look in the next step: lookups found something, or other requests began."""
        if self._num_misses:
            self._end()
            self._num_misses = 0

    def note_choice(
        self,
        *,
        pays: bool,
        step_ms: float,
        asked_ms: float,
        speedup: float = math.inf,
        are_long: bool = False,
        has_long: bool = True,
    ) -> None:
        """Rest where no draft pays, longer each time; let a step without drafts come at times.

        asked_ms: what this takes. speedup: that drafts promise. are_long: only drafts that follow
        long matches pay, which shortens no rest, as such a match ends it. has_long: there were some
        of these to choose from.
        """
        if self._until_early:
            self._until_early -= 1
        elif self._ended_early:
            self._until_early = self._early_rests
            self._early_rests = min(2 * self._early_rests, MAX_EARLY_RESTS)
        self._ended_early = False
        self._num_misses = 0
        found_long, self._found_long = self._found_long and has_long, False
        if pays:
            self._look_steps, self._look_times = LOOK_STEPS, 1
            self._until_early, self._early_rests = 0, 1
            self.last = self.left = 0
            self._since = 1
            if not are_long:
                self._kept //= 2
            steps = int((1.0 - 1.0 / max(speedup, 1.0)) / PLAIN_SHARE)
            steps = max(steps, MIN_STEPS_PER_PLAIN)
            self._until_plain = max(min(self._until_plain, steps) - 1, 0)
            return
        longest_ms = min(max(asked_ms / ASK_SHARE, MIN_REST_MS), MAX_REST_MS)
        longest = max(int(longest_ms / max(step_ms, 1e-3)), MIN_REST_STEPS)
        self._kept = min(max(2 * self._kept, 1), longest)
        self.last = self.left = self._kept
        self._since = 1 + self._kept
        self._until_plain = STEPS_PER_PLAIN
        if self.looks:
            most = max(min(int(LOOK_MS / max(step_ms, 1e-3)), MAX_LOOK_STEPS), 1)
            if found_long:  # nor do drafts of a long match pay now
                self._look_times = min(2 * self._look_times, longest)
                self._look_steps = most * self._look_times
            self._max_look_steps = min(most * self._look_times, longest)
            self.until_look = self._look_steps = min(self._look_steps, self._max_look_steps)

    def _end(self) -> None:
        self._since -= self.left
        self.left = 0


class NoRests(DraftRests):
    """Drafts are asked for in every step."""

    def takes_plain_step(self) -> bool:
        """See DraftRests."""
        return False

    def note_miss(self, step_ms: float) -> None:
        """Do nothing."""

    def note_choice(self, **_: object) -> None:
        """Do nothing."""
