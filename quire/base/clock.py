"""Clock: the only place the engine's time comes from.

Milliseconds of the machine's monotonic clock, which all processes of one machine share, so a
client's arrival time and the engine's step times can be subtracted. Deciders never hold a clock:
the owner of a loop reads it and passes `now_ms` on.
"""

from __future__ import annotations

import time


class Clock:
    """Reads the machine's monotonic clock."""

    def now_ms(self) -> float:
        """Return milliseconds since some fixed moment of this machine's past; never goes back."""
        return time.monotonic_ns() / 1e6
