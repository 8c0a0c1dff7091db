"""Restarts: whether an engine that died is started again, and after which delay.

The first restart comes at once, the next after 1, 2, 4, ... 30 seconds. An engine that has served
for half a minute ends the row. Counts and durations only: knows no process and reads no clock.
"""

from __future__ import annotations

_FIRST_S, _LONGEST_S = 1.0, 30.0
SETTLED_S = 30.0


class Restarts:
    """limit: how many restarts in a row are allowed. num_total: restarts so far."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_total = 0
        self._in_a_row = 0
        self._served_s: float | None = None

    def served(self, now_s: float) -> None:
        """Note that an engine began to serve."""
        self._served_s = now_s

    def next_delay_s(self, now_s: float) -> float | None:
        """Count a restart and return the delay before it; None where the limit is reached."""
        if self._served_s is not None and now_s - self._served_s >= SETTLED_S:
            self._in_a_row = 0
        self._served_s = None
        if self._in_a_row >= self.limit:
            return None
        self._in_a_row += 1
        self.num_total += 1
        if self._in_a_row == 1:
            return 0.0
        return min(_FIRST_S * 2.0 ** (self._in_a_row - 2), _LONGEST_S)

    def given_up(self) -> str:
        """Return the message of a server that ends because the limit is reached.

        Clients read it, so the causes, which may name files, are in the log only.
        """
        return (
            f"the engine has failed {self._in_a_row + 1} times in a row, and --restart-limit "
            f"{self.limit} allows no further restart; the log has the causes"
        )
