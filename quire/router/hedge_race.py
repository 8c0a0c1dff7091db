"""Race: two attempts of one request until one of them has output.

Knows neither replicas nor budgets. Always holds: once a race is closed, at most the winner's
exchange is read; an attempt that fails does not end the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.router.attempt import Attempt
from quire.router.faults import ReplicaFault
from quire.router.hedging import Hedger
from quire.router.routed_request import RoutedRequest


class Race:
    """first: the attempt of `request` that may be late. on_sent: called once either is sent."""

    def __init__(
        self,
        hedger: Hedger,
        request: RoutedRequest,
        first: Attempt,
        on_sent: Callable[[], None],
    ) -> None:
        self.first = first
        self._request = request
        self._hedger = hedger
        self._on_sent = on_sent
        self._opening = {first: self._open(first)}

    def _open(self, attempt: Attempt) -> asyncio.Task[None]:
        return asyncio.ensure_future(attempt.open(self._request.body(), self._on_sent))

    async def is_late(self, delay_s: float | None) -> bool:
        """Wait for the first attempt as long as is usual, and once more if the budget is low then;
        return whether it needs longer. delay_s: None where it is not known."""
        if delay_s is None:
            return False
        is_late = await self._is_later(delay_s)
        if is_late and self._hedger.is_low(self._request):
            is_late = await self._is_later(delay_s)
        return is_late

    async def _is_later(self, delay_s: float) -> bool:
        opening = self._opening[self.first]
        usual = asyncio.ensure_future(self._hedger.wait(delay_s))
        try:
            await asyncio.wait({opening, usual}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            usual.cancel()
        return not opening.done()

    async def first_alone(self) -> None:
        """Wait for the first attempt, no longer for its first tokens. Raises what it raises."""
        self.first.holds = False
        await self._opening[self.first]

    async def run(
        self, second: Attempt, on_fault: Callable[[Attempt, ReplicaFault], None]
    ) -> Attempt | None:
        """Return the attempt that has a response first; None where both have failed.

        The second is sent the same request, with what is left of its times. A refusal of one that
        is full does not count while the other can still answer.
        """
        self._request.waited(asyncio.get_running_loop().time())
        self._opening[second] = self._open(second)
        refused: Attempt | None = None
        waiting = dict(self._opening)
        while waiting:
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            for attempt in [one for one, opening in waiting.items() if opening.done()]:
                try:
                    waiting.pop(attempt).result()
                except ReplicaFault as fault:
                    on_fault(attempt, fault)
                    continue
                if not self._request.form.is_overloaded(attempt.exchange.status):
                    return attempt
                refused = refused or attempt
        return refused

    async def close(self) -> None:
        """Stop waiting for either."""
        openings = list(self._opening.values())
        for opening in openings:
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)
