"""BeatGaps: for how long a process that works may send no beat, by the longest gaps lately.

Of the beats that a router reads from a server, and of those that API processes of one server write
for each other. Is given times and reads no clock. Always holds: the limit is at least MIN_SILENT_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

# The limit is a multiple of the longest gap lately, within bounds. The lower one leaves time for a
# packet that is lost and sent again twice.
MIN_SILENT_S = 0.6
_MULTIPLE = 3.0
# A process that works is not silent for longer: it was stopped, which says nothing of its gaps.
_MAX_GAP_S = 3.0
# Gaps are kept as the longest of each second, for so many seconds.
_NUM_SECONDS, _MIN_SECONDS = 30, 2
# With fewer beats it is not known that they come regularly: the first one may be written otherwise.
_MIN_BEATS = 4
# Each turn of an event loop reads what has come, so a short one delays a beat by less than the
# limit allows for.
_SHORT_TURN_S = 0.1


class BeatGaps:
    """Of one process. last_s: the time of its newest beat; 0 where none has come."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self._longest_s: deque[float] = deque(maxlen=_NUM_SECONDS)
        self._second = self._num_beats = 0

    def note(self, now_s: float) -> None:
        """Note a beat."""
        gap_s = now_s - self.last_s if self.last_s else 0.0
        gap_s = gap_s if gap_s <= _MAX_GAP_S else 0.0
        if int(now_s) != self._second or not self._longest_s:
            self._second = int(now_s)
            self._longest_s.append(gap_s)
        else:
            self._longest_s[-1] = max(self._longest_s[-1], gap_s)
        self.last_s = now_s
        self._num_beats += 1

    def has_stopped(self) -> None:
        """Note that it was stopped: the time until its next beat is no gap of one that works."""
        self.last_s = 0.0

    def clear(self) -> None:
        """Forget all beats."""
        self.last_s = 0.0
        self._num_beats = 0
        self._longest_s.clear()

    @property
    def has_history(self) -> bool:
        """Whether enough of its gaps are known."""
        return len(self._longest_s) >= _MIN_SECONDS

    def limit_s(self, at_most_s: float, others: Iterable[BeatGaps] = ()) -> float:
        """Return for how long it may send no beat. others: of other processes; their limits count
        while its own history is short."""
        min_s = 0.0
        if not self.has_history:
            limits_s = [one.limit_s(at_most_s) for one in others if one.has_history]
            if not limits_s or self._num_beats < _MIN_BEATS:
                return at_most_s
            min_s = max(limits_s)
        own_s = max(_MULTIPLE * max(self._longest_s), MIN_SILENT_S, min_s)
        return min(own_s, at_most_s)


class AwakeTime:
    """Time in which the reader of beats could notice one: not while its own event loop was busy.

    A router that takes over a thousand streams reads all beats late; that is no gap of a server,
    and no silence. `tick` is called at times that were planned.
    """

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._planned_s = self._late_s = 0.0  # of the newest tick

    def tick(self, planned_s: float, now_s: float) -> None:
        """Note that what was planned for a time happens now."""
        late_s = now_s - planned_s
        self._planned_s, self._late_s = planned_s, late_s if late_s > _SHORT_TURN_S else 0.0
        self._lost_s += self._late_s

    def of(self, at_s: float) -> float:
        """Return a time, now or since the tick before the newest one, without what was lost until
        then: a beat that came in a long turn of the event loop is read after the tick behind it."""
        lost_later_s = self._planned_s + self._late_s - at_s
        return at_s - self._lost_s + min(max(lost_later_s, 0.0), self._late_s)
