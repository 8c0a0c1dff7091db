"""Hedger: when a request without a first token is sent to a second replica as well.

That is when the first token is later than nearly all for such prompts: of the same replica, or of
the median of some others where that is less; and after twice that time if the budget is low then.
Both replicas give the same bytes, so the one that begins first is passed on and the other is
cancelled. Knows no request. Always holds: the prompt tokens that hedges compute again are at most
the given share of the tokens of all requests so far: those of prompts, and of whole answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from quire.router.replica import Replica
from quire.router.routed_request import RoutedRequest

# Unused work adds up to this, so that a burst of hedges cannot double the load.
_MAX_SAVED_TOKENS = 262_144
# So many hedges of the budget are kept for requests that take twice as long as is usual, but half
# of the largest budget at most: it holds fewer hedges of long prompts. Of requests at replicas that
# are not slow, 5 % are later than the 95th percentile: these alone would take more than a share of
# 3 %, and leave nothing for those of a slow replica.
_RESERVED_HEDGES, _MAX_RESERVED_TOKENS = 16, _MAX_SAVED_TOKENS / 2
# So many others are compared with: enough for a median, in little time.
_MAX_OTHERS = 5


class HedgeBudget:
    """share: of the tokens of all requests that hedges may compute again."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._free_tokens = 0.0

    def requested(self, tokens: int) -> None:
        """Count a request."""
        self._free_tokens = min(self._free_tokens + self._share * tokens, _MAX_SAVED_TOKENS)

    def has(self, tokens: float) -> bool:
        """Return whether so much is left."""
        return self._free_tokens >= tokens

    def take(self, tokens: int) -> bool:
        """Take what a hedge computes; False where that is not left."""
        if not self.has(tokens):
            return False
        self._free_tokens -= tokens
        return True


class Hedger:
    """whole_answers: hedge those too. wait: returns after so many seconds; tests replace it."""

    def __init__(
        self,
        share: float,
        percentile: float,
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
        *,
        whole_answers: bool = False,
    ) -> None:
        self.budget = HedgeBudget(share)
        self._percentile = percentile
        self._whole_answers = whole_answers
        self.wait = wait

    def hedges(self, request: RoutedRequest) -> bool:
        """Return whether a request may be sent twice: what it computes leaves nothing behind."""
        if request.route.stores:
            return False
        if request.is_stream:
            return not request.why_not
        return self._whole_answers and request.route.generates and bool(request.fields)

    def cost_tokens(self, request: RoutedRequest) -> int:
        """Return what a hedge computes again before it is decided, at most."""
        return request.prompt_tokens + request.whole_tokens

    def delay_s(
        self, replica: Replica, request: RoutedRequest, others: Iterable[Replica] = ()
    ) -> float | None:
        """Return after how long a request is late; None: that is unknown, and it is not hedged.

        others: that may answer it as well. A replica that is always slow is late where the median
        of these would be.
        """
        own_s = self._predicted_s(replica, request)
        if own_s is None:
            return None
        predicted = (self._predicted_s(one, request) for one in islice(others, _MAX_OTHERS))
        known = sorted(one for one in predicted if one is not None)
        return min(own_s, known[(len(known) - 1) // 2]) if known else own_s

    def is_low(self, request: RoutedRequest) -> bool:
        """Return whether only what is reserved is left: a late request then waits as long again."""
        reserved = _RESERVED_HEDGES * self.cost_tokens(request)
        return not self.budget.has(min(reserved, _MAX_RESERVED_TOKENS))

    def _predicted_s(self, replica: Replica, request: RoutedRequest) -> float | None:
        return replica.first_token_times.predicted_s(
            request.prompt_tokens, self._percentile, request.whole_tokens
        )
