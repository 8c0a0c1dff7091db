"""MovePlaces: how many requests without output may be moved again at one time.

A request that loses its replica together with others moves to another one at once: the work there
is lost, so this adds no load to what clients have asked for. Moved requests may overload the next
replica, which then fails, too. So each further attempt takes a place until it has output, and the
others wait in the order in which they came. Knows no replica and reads no clock. Always holds: a
place is given to one request at a time and comes back whatever happens; the number that waits is
bounded by the requests that the router has admitted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# As many places there are for a few open requests.
MIN_PLACES = 64


class MovePlaces:
    """A share of the open requests. num_open: returns how many there are."""

    def __init__(self, share: float, num_open: Callable[[], int]) -> None:
        self._share = share
        self._num_open = num_open
        self._num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_taken(self) -> int:
        """Places that are taken."""
        return self._num_taken

    def ask(self) -> asyncio.Future[None]:
        """Return a future that is done once there is a place; then it is taken."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._give()
        return place

    def withdraw(self, place: asyncio.Future[None]) -> None:
        """Need a place no more that was asked for, whether it was given or not."""
        if place.done():
            self.give_back()
        else:
            self._waiting.remove(place)

    def give_back(self) -> None:
        """Return a place that was taken."""
        self._num_taken -= 1
        self._give()

    def _give(self) -> None:
        num_places = max(MIN_PLACES, int(self._share * self._num_open()))
        while self._waiting and self._num_taken < num_places:
            self._num_taken += 1
            self._waiting.popleft().set_result(None)
