"""The sources of KV blocks from outside an engine, as the engine sees them: the exchange with other
engines (transfer/), the store of several engines (kv_store/), or both over one memory.

With both a request asks the store first, and another engine for the rest: Link and Levels are what
each of the two sees of the other. Knows neither of them. Always holds: each message to the engine
and from it passes all sources; an idle engine wakes as often as one of them needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.base.block_copies import CopiesEnded
from quire.base.records import NO_BOOLS, NO_INTS, Request
from quire.engine.core import Inbox
from quire.engine.process.messages import FromEngine, Outputs, ToEngine
from quire.runner.tier_mover import BlockMover
from quire.scheduler.scheduler import Scheduler

# Reported in a step in which no copy has ended, and blocks from outside have arrived.
NOTHING_MOVED = CopiesEnded(to_tiers=NO_INTS, to_blocks=NO_INTS, arrived=NO_BOOLS)


class BlockSource(Protocol):
    """A source of blocks. wake: called in a thread of its own when there is something to take in;
    all methods in the engine's thread."""

    wake: Callable[[], None]

    @property
    def has_unreported(self) -> bool:
        """Whether its counters have changed since they were reported."""

    def shortened(self, wait_s: float | None) -> float | None:
        """Return how long an idle engine may wait (None: for ever)."""

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Read messages that the engine handles next; return them and those of the source."""

    def seen(self, message: FromEngine) -> FromEngine | None:
        """Notice what became of requests; return what is passed on, None: nothing."""

    def take_news(self) -> bool:
        """Return, once, whether a request may begin because of what has arrived."""

    def clear(self) -> None:
        """Give out nothing any more that is here or on its way here now."""

    def close(self) -> None:
        """End all threads and connections."""


class Link(Protocol):
    """Another engine that can send blocks of one request.

    block_ms: what a block takes that it has; infinite where it has none yet.
    """

    @property
    def block_ms(self) -> float: ...

    def begin(self, num_elsewhere: int) -> int:
        """Fetch the lacking blocks after so many, which come from elsewhere; return how many of
        these are on their way, from the first on."""


class Levels(Protocol):
    """A store that is asked before other engines are."""

    def begin(self, request: Request, link: Link) -> None:
        """Look for the lacking blocks of a request that the engine takes next, then ask `link`."""

    def look_again(self, request_id: str) -> None:
        """Look for blocks that the link of a request was to bring, and did not."""


class OutsideBlocks:
    """A TierEnd, and what watches an engine's messages. sources: messages to the engine pass them
    in this order, those from it in the other."""

    def __init__(
        self, scheduler: Scheduler, mover: BlockMover, sources: Sequence[BlockSource]
    ) -> None:
        self._scheduler, self._mover, self._sources = scheduler, mover, sources
        self._wake: Callable[[], None] = lambda: None
        self._emit: Callable[[FromEngine], None] = lambda message: None

    # ---- TierEnd: what the core asks once a step

    @property
    def wake(self) -> Callable[[], None]:
        """Called in a thread of its own when there is something to take in."""
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._wake = self._mover.wake = wake
        for source in self._sources:
            source.wake = wake

    def ended(self) -> CopiesEnded | None:
        """See TierEnd; blocks that arrived from outside are in the map already."""
        has_news = False
        for source in self._sources:
            has_news |= source.take_news()
        copies = self._mover.ended()
        if copies is not None and copies.broken:  # the map forgets all places, as after a flush
            for source in self._sources:
                source.clear()
        return NOTHING_MOVED if copies is None and has_news else copies

    def clear(self) -> None:
        """See TierEnd."""
        self._mover.clear()
        for source in self._sources:
            source.clear()

    # ---- messages of the engine

    def watched(self, inbox: Inbox) -> Inbox:
        """Return an inbox of which the sources read the messages first."""
        return _WatchedInbox(self, inbox)

    def watch(self, emit: Callable[[FromEngine], None]) -> Callable[[FromEngine], None]:
        """Return an `emit` that lets the sources notice what became of requests."""

        def watched(message: FromEngine) -> None:
            passed: FromEngine | None = message
            for source in reversed(self._sources):
                if passed is not None:
                    passed = source.seen(passed)
            if passed is not None:
                emit(passed)

        self._emit = watched
        return watched

    def shortened(self, wait_s: float | None) -> float | None:
        """See BlockSource."""
        for source in self._sources:
            wait_s = source.shortened(wait_s)
        return wait_s

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """See BlockSource; an engine with nothing to do reports what has changed."""
        for source in self._sources:
            messages = source.take(messages)
        is_idle = not messages and not self._scheduler.has_work
        if is_idle and any(source.has_unreported for source in self._sources):
            self._emit(Outputs(outputs=None, stats=self._scheduler.stats()))
        return messages

    def close(self) -> None:
        """Close all sources."""
        for source in reversed(self._sources):
            source.close()


class _WatchedInbox:
    """An Inbox of which sources read the messages first."""

    def __init__(self, outside: OutsideBlocks, inbox: Inbox) -> None:
        self._outside, self._inbox = outside, inbox

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """See Inbox."""
        return self._outside.take(self._inbox.take(self._outside.shortened(wait_s)))

    def wake(self) -> None:
        """See Inbox."""
        self._inbox.wake()


def can_use_outside_blocks(request: Request) -> bool:
    """Return whether blocks from outside replace any computation of a request."""
    sampling = request.sampling
    return sampling.prompt_logprobs is None and sampling.pooling is None
