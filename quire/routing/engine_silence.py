"""EngineSilence: for how long the engine behind a server has sent nothing, by the server's reports.

An engine process with work sends something five times a second at least, however long its steps
are, so a silent one is stopped or gone although its server answers. A server that was itself late
may have unread messages of its engine: one report counts only if the one before knew of the
silence. Is given times and reads no clock.
"""

from __future__ import annotations

from collections import deque

# The longest silence that is waited for is a multiple of the longest lately, within these bounds.
MIN_SILENT_S, MAX_SILENT_S = 1.0, 2.0
_MULTIPLE = 3.0
_NUM_KNOWN, _MIN_KNOWN = 12, 4


class EngineSilence:
    """Of one server. reported_s: by its last answer."""

    def __init__(self) -> None:
        self.reported_s = 0.0
        self._before_s = 0.0
        self._ended_s: deque[float] = deque(maxlen=_NUM_KNOWN)

    def report(self, silent_s: float) -> None:
        """Note what an answer says."""
        if silent_s < self.reported_s:  # it has ended
            self._ended_s.append(self.reported_s)
        self._before_s, self.reported_s = self.reported_s, silent_s

    @property
    def known_s(self) -> float:
        """How long the engine is known to be silent; 0 where the report before knew of nothing."""
        is_known = min(self._before_s, self.reported_s) >= MIN_SILENT_S / 2
        return self.reported_s if is_known else 0.0

    @property
    def usual_s(self) -> float:
        """The longest silence that is usual."""
        if len(self._ended_s) < _MIN_KNOWN:
            return MAX_SILENT_S
        return min(max(_MULTIPLE * max(self._ended_s), MIN_SILENT_S), MAX_SILENT_S)
