"""DraftRests: the steps in which no drafts are asked for, because they did not pay lately, or so
that there are steps without drafts to judge them against.

Counts steps; knows no clock and no requests. Always holds: while drafts pay, one step in
STEPS_PER_PLAIN rests; while they do not, rests double up to a limit.
"""

from __future__ import annotations

# Where no draft pays, the control is asked again after 1, 2, 4, ... steps, up to about so many
# milliseconds and within these numbers of steps: being asked takes a part of a millisecond, which
# is much of the step of a small model and little of that of a large one.
MAX_REST_MS, MIN_REST_STEPS, MAX_REST_STEPS = 25.0, 4, 64
# When another request begins beside others, it is asked after such a share of the longest rest at
# most. When one begins alone, it is asked at once, and rests such a share of the last one after it.
SHARE_BESIDE, SHARE_ALONE = 8, 4
# Of so many steps with drafts in turn, one has none: what drafts add to a step is judged against
# steps without. The first comes sooner.
STEPS_PER_PLAIN = 64
STEPS_BEFORE_PLAIN = 1


class DraftRests:
    """last: how many steps the present rest has in all, 0 while drafts pay; left: and still."""

    def __init__(self) -> None:
        self.last = self.left = 0
        self._longest = MIN_REST_STEPS
        self._until_plain = STEPS_BEFORE_PLAIN

    def begin(self, *, is_alone: bool) -> None:
        """Note that another request begins."""
        if is_alone:
            self.last, self.left = self.last // SHARE_ALONE, 0
        else:
            self.left = min(self.left, max(self._longest // SHARE_BESIDE, 1))

    def takes_plain_step(self) -> bool:
        """Return whether this step has no drafts, to judge others against it; asked once a step."""
        if self._until_plain:
            return False
        self._until_plain = STEPS_PER_PLAIN
        return True

    def note_choice(self, *, pays: bool, step_ms: float) -> None:
        """Rest where no draft pays, longer each time; let a step without drafts come at times."""
        if pays:
            self.last = self.left = 0
            self._until_plain -= 1
            return
        steps = int(MAX_REST_MS / max(step_ms, 1e-3))
        self._longest = min(max(steps, MIN_REST_STEPS), MAX_REST_STEPS)
        self.last = self.left = min(max(2 * self.last, 1), self._longest)
        self._until_plain = STEPS_PER_PLAIN
