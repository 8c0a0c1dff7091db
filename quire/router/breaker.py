"""CircuitBreaker: stop sending to a replica that fails; RetryBudget: a bound on repeated work.

Both count events and are given the time. Health probes fence replicas that are down; the breaker is
for those that answer probes and fail requests.
"""

from __future__ import annotations

_FAILURES = 3
_FIRST_S, _LONGEST_S = 1.0, 30.0
# Retries that are always allowed, so that a small service can retry at all.
_FREE_RETRIES = 10.0


class CircuitBreaker:
    """Opens after three failures in a row; then lets one request try after 1, 2, 4, ... 30 s.

    Once that request has output, others may be sent too; after its end the times begin anew.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._open_s = 0.0
        self._until_s = 0.0
        self._is_trying = False

    def allows(self, now_s: float) -> bool:
        """Return whether a request may be sent."""
        if self._num_failures < _FAILURES:
            return True
        return now_s >= self._until_s and not self._is_trying

    def began(self) -> None:
        """Note that a request is sent; through an open breaker, one at a time."""
        self._is_trying = self._num_failures >= _FAILURES

    def gave_output(self) -> bool:
        """Let others in beside the request that tries; return whether the breaker was open."""
        if self._num_failures < _FAILURES:
            return False
        self._num_failures = _FAILURES - 1  # the next failure opens it again, for longer
        self._is_trying = False
        return True

    def returned(self) -> None:
        """Let a request try at once: the replica was away and is checked."""
        self._open_s = self._until_s = 0.0
        self._is_trying = False

    def succeeded(self) -> None:
        """Close the breaker."""
        self._num_failures = 0
        self._open_s = 0.0
        self._is_trying = False

    def failed(self, now_s: float) -> None:
        """Count a failure; those of requests that were open when it opened are no further ones."""
        if self._num_failures >= _FAILURES and now_s < self._until_s:
            return
        self._num_failures += 1
        self._is_trying = False
        if self._num_failures >= _FAILURES:
            self._open(now_s)

    def stalled(self, now_s: float) -> None:
        """Open at once, each time for longer: what is sent there may wait in vain."""
        self._num_failures = _FAILURES
        self._is_trying = False
        self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._open_s = min(max(2 * self._open_s, _FIRST_S), _LONGEST_S)
        self._until_s = now_s + self._open_s

    def gave_up(self) -> None:
        """Note that a request ended without a verdict, such as by its client."""
        self._is_trying = False


class RetryBudget:
    """Allow so many retries as a share of the requests; unused ones add up to a limit."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._free = _FREE_RETRIES

    def requested(self) -> None:
        """Count a request."""
        self._free = min(self._free + self._share, 10 * _FREE_RETRIES)

    def take(self) -> bool:
        """Take one retry; False where none is left."""
        if self._free < 1.0:
            return False
        self._free -= 1.0
        return True
