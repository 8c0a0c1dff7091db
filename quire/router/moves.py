"""MovePlaces: how many requests without output may be moved again at one time.

A request that loses its replica together with others moves to another one at once: the work there
is lost, so this adds no load to what clients have asked for. Moved requests may overload the next
replica, which then fails, too. So each further attempt takes a place until it has output, and the
others wait by turn numbers, which are given in the order in which they came. A request that had a
place and no replica to use it at keeps its number. Knows no replica and reads no clock. Always
holds: a place is given to one request at a time and comes back whatever happens; the number that
waits is bounded by the requests that the router has admitted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

# As many places there are for a few open requests, whatever the share.
MIN_PLACES = 64


class MovePlaces:
    """A share of the open requests. num_open: returns how many there are. num_taken: places that
    are taken."""

    def __init__(self, share: float, num_open: Callable[[], int]) -> None:
        self._share = share
        self._num_open = num_open
        self.num_taken = 0
        self._turns = count()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._is_giving = False

    def turn(self) -> int:
        """Return a number behind those of all other requests."""
        return next(self._turns)

    def ask(self, turn: int) -> asyncio.Future[None]:
        """Return a future that is done once there is a place; then it is taken. Of requests that
        ask in one turn of the event loop the lowest numbers have the first places."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (turn, place))
        if not self._is_giving:
            self._is_giving = True
            loop.call_soon(self._give)
        return place

    def withdraw(self, place: asyncio.Future[None]) -> None:
        """Need a place no more that was asked for, whether it was given or not."""
        if place.done():
            self.give_back()
        else:
            self._waiting = [one for one in self._waiting if one[1] is not place]
            heapq.heapify(self._waiting)

    def give_back(self) -> None:
        """Return a place that was taken."""
        self.num_taken -= 1
        self._give()

    def _give(self) -> None:
        self._is_giving = False
        num_places = max(MIN_PLACES, int(self._share * self._num_open()))
        while self._waiting and self.num_taken < num_places:
            self.num_taken += 1
            heapq.heappop(self._waiting)[1].set_result(None)
