"""Breaker: no calls to a store that failed, for a pause that doubles with each failure in a row.

While it is open the store counts as empty, so that no request waits for one that does not answer.
After the pause one call is tried: if it succeeds, all calls are allowed again. Knows no store; time
is an argument. Always holds: at most one call tries a store that failed; in the end one does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.base.kv_store import BreakerState

FIRST_PAUSE_MS, MAX_PAUSE_MS = 1_000.0, 60_000.0
_MAX_DOUBLINGS = 16


class Breaker:
    """now_ms: a clock. Any thread may call."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._num_failures = 0  # in a row
        self._until_ms = 0.0

    @property
    def state(self) -> BreakerState:
        """The state now."""
        with self._lock:
            return self._state

    def allows(self) -> bool:
        """Return whether a call may be made; the caller then reports how it went."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            if self._state is BreakerState.OPEN and self._now_ms() >= self._until_ms:
                self._state = BreakerState.HALF_OPEN
                # If the trial never reports its end, another one follows.
                self._until_ms = self._now_ms() + MAX_PAUSE_MS
                return True
            if self._state is BreakerState.HALF_OPEN and self._now_ms() >= self._until_ms:
                self._until_ms = self._now_ms() + MAX_PAUSE_MS
                return True
            return False

    @property
    def may_allow(self) -> bool:
        """Whether `allows` would return True, without letting a trial through."""
        with self._lock:
            return self._state is BreakerState.CLOSED or self._now_ms() >= self._until_ms

    def succeeded(self) -> None:
        """Note a call that went well."""
        with self._lock:
            self._state, self._num_failures = BreakerState.CLOSED, 0

    def undecided(self) -> None:
        """Note that a store is not ready: a trial is made again, after a pause."""
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                self._state = BreakerState.OPEN
                self._until_ms = self._now_ms() + FIRST_PAUSE_MS

    def failed(self) -> bool:
        """Note a call that failed; return whether this opened the breaker."""
        with self._lock:
            if self._state is BreakerState.OPEN:  # of calls that began before
                return False
            was_closed = self._state is BreakerState.CLOSED
            pause_ms = min(FIRST_PAUSE_MS * 2.0**self._num_failures, MAX_PAUSE_MS)
            self._num_failures = min(self._num_failures + 1, _MAX_DOUBLINGS)
            self._state, self._until_ms = BreakerState.OPEN, self._now_ms() + pause_ms
            return was_closed
