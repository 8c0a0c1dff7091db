"""Lanes: long prompts wait for each other, so that short ones find replicas that are not busy.

Each replica computes a limited number of long prompts at a time, until their first token; further
ones wait in turn. A controller may adapt the limit to a target for the first tokens of short
prompts: halved when too many are late, raised by one while they are in time. Is given times.
Always holds: of the prompts that wait, the first one gets the first place, and alone is woken for
it; the limit is at least 1.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quire.router.faults import ClientGone, Refusal
from quire.router.fleet import Fleet
from quire.router.replica import Replica
from quire.router.route_file import LanesTable

# After so many short prompts the controller decides.
WINDOW = 40
_MAX_LATE_SHARE = 0.05
_CHECK_S = 0.25


class Lanes:
    """limit: of the long prompts that a replica computes at a time, as it is now."""

    def __init__(self, table: LanesTable) -> None:
        self._table = table
        self.limit = table.max_long_per_replica
        self._num_short = 0
        self._num_late = 0
        self._waiting: deque[asyncio.Future[None]] = deque()  # each done once it is the first

    @property
    def num_waiting(self) -> int:
        """Long prompts that wait."""
        return len(self._waiting)

    def is_long(self, prompt_tokens: int) -> bool:
        """Return whether a prompt takes the lane of long ones."""
        return prompt_tokens >= self._table.long_prompt_tokens

    def began_short(self, seconds: float) -> None:
        """Note that a short prompt has its first token after so long."""
        if not self._table.ttft_ms:
            return
        self._num_short += 1
        self._num_late += seconds * 1000 > self._table.ttft_ms
        if self._num_short < WINDOW:
            return
        if self._num_late > _MAX_LATE_SHARE * WINDOW:
            self.limit = max(self.limit // 2, 1)
        else:
            self.limit = min(self.limit + 1, self._table.max_long_per_replica)
        self._num_short = self._num_late = 0

    async def place(
        self,
        fleet: Fleet,
        choose: Callable[[], Replica | None],
        is_served: Callable[[], bool],
        is_gone: Callable[[], bool],
    ) -> Replica | None:
        """Return a replica with room for a long prompt, in turn; None where none serves it at all.

        choose: returns a replica with room now. Raises Refusal and ClientGone.
        """
        if not self._waiting and (found := choose()) is not None:
            return found
        if not is_served():
            return None
        table = self._table
        if len(self._waiting) >= table.max_waiting:
            raise Refusal(
                503,
                "overloaded",
                f"{len(self._waiting)} long prompts wait and at most {table.max_waiting} may "
                "(max-waiting of [lanes]); try again later",
            )
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        until_s = loop.time() + table.max_wait_seconds
        self._waiting.append(turn)
        try:
            while (left_s := until_s - loop.time()) > 0:
                if is_gone():
                    raise ClientGone
                is_first = self._waiting[0] is turn
                if is_first and (found := choose()) is not None:
                    return found
                if not is_served():
                    return None
                if is_first:
                    await fleet.wait_for_change(min(left_s, _CHECK_S))
                else:
                    await asyncio.wait({turn}, timeout=min(left_s, _CHECK_S))
        finally:
            self._waiting.remove(turn)
            if self._waiting and not self._waiting[0].done():
                self._waiting[0].set_result(None)
        raise Refusal(
            503,
            "overloaded",
            f"the prompt is long and found no place within {table.max_wait_seconds:g} s: each "
            f"replica computes {self.limit} long prompts at a time ([lanes]); try again later",
        )
