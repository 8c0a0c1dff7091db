"""Hedger: when a request without a first token is sent to a second replica as well.

That is when the first token is later than nearly all of the same replica for such prompts. Both
replicas give the same bytes, so the one that begins first is passed on and the other is cancelled.
Knows no request. Always holds: the prompt tokens that hedges compute again are at most the given
share of the prompt tokens of all requests so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.router.replica import Replica

# Unused work adds up to this, so that a burst of hedges cannot double the load.
_MAX_SAVED_TOKENS = 262_144


class HedgeBudget:
    """share: of the prompt tokens of all requests."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._free_tokens = 0.0

    def requested(self, tokens: int) -> None:
        """Count a request."""
        self._free_tokens = min(self._free_tokens + self._share * tokens, _MAX_SAVED_TOKENS)

    def take(self, tokens: int) -> bool:
        """Take what a hedge computes; False where that is not left."""
        if self._free_tokens < tokens:
            return False
        self._free_tokens -= tokens
        return True


class Hedger:
    """wait: returns after so many seconds; tests replace it."""

    def __init__(
        self,
        share: float,
        percentile: float,
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.budget = HedgeBudget(share)
        self._percentile = percentile
        self.wait = wait

    def delay_s(self, replica: Replica, prompt_tokens: int) -> float | None:
        """Return after how long a request is hedged; None: never."""
        return replica.first_token_times.predicted_s(prompt_tokens, self._percentile)
