"""DraftRests: the steps in which no drafts are asked for, because they did not pay lately, or so
that there are steps without drafts to judge them against.

Counts steps; knows no clock and no requests. Always holds: while drafts pay, one step in
STEPS_PER_PLAIN rests; while they do not, rests double up to a limit, and are halved by each step
in which drafts pay; of two rests in turn at most one ends early.
"""

from __future__ import annotations

import math

# Where no draft pays, the control is asked again after 1, 2, 4, ... steps, up to about so many
# milliseconds and within these numbers of steps: being asked takes a part of a millisecond, which
# is much of the step of a small model and little of that of a large one.
MAX_REST_MS, MIN_REST_STEPS, MAX_REST_STEPS = 80.0, 4, 192
# Of so many steps with drafts in turn, one has none: what drafts add to a step is judged against
# steps without. It comes sooner where drafts gain little, so that such a step loses little: such a
# share of the time at most. The first comes at once.
STEPS_PER_PLAIN, MIN_STEPS_PER_PLAIN, PLAIN_SHARE = 64, 8, 0.0075
STEPS_BEFORE_PLAIN = 1


class DraftRests:
    """last: how many steps the present rest was meant to have, 0 while drafts pay; left: and still
    has."""

    def __init__(self) -> None:
        self.last = self.left = 0
        self._whole = 0  # steps of the present rest, less those that were cut off
        self._kept = 0  # what the last rest counts for still
        self._may_end, self._ended_early = True, False
        self._until_plain = STEPS_BEFORE_PLAIN

    @property
    def num_steps(self) -> int:
        """Return the steps since the control was asked last."""
        return 1 + self._whole - self.left

    def end_early(self) -> None:
        """Ask in the next step, as the requests are others; not after each of two rests in turn:
        where many short requests begin, each would be an ask."""
        if self.left and self._may_end:
            self._whole -= self.left
            self.left, self._ended_early = 0, True

    def takes_plain_step(self) -> bool:
        """Return whether this step has no drafts, to judge others against it; asked once a step."""
        if self._until_plain:
            return False
        self._until_plain = STEPS_PER_PLAIN
        return True

    def note_choice(self, *, pays: bool, step_ms: float, speedup: float = math.inf) -> None:
        """Rest where no draft pays, longer each time; let a step without drafts come at times.

        speedup: that drafts promise.
        """
        self._may_end, self._ended_early = pays or not self._ended_early, False
        if pays:
            self.last = self.left = self._whole = 0
            self._kept //= 2
            steps = int((1.0 - 1.0 / max(speedup, 1.0)) / PLAIN_SHARE)
            steps = max(steps, MIN_STEPS_PER_PLAIN)
            self._until_plain = max(min(self._until_plain, steps) - 1, 0)
            return
        steps = int(MAX_REST_MS / max(step_ms, 1e-3))
        longest = min(max(steps, MIN_REST_STEPS), MAX_REST_STEPS)
        self._kept = min(max(2 * self._kept, 1), longest)
        self.last = self.left = self._whole = self._kept
        self._until_plain = STEPS_PER_PLAIN
