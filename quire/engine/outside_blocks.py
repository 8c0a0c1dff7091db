"""What both sources of KV blocks from outside an engine share: the exchange with another engine
(transfer/) and the store of several engines (kv_store/).

Knows neither of them. Always holds: each message to the engine passes the source first, and an idle
engine wakes as often as the source needs.
"""

from __future__ import annotations

from typing import Protocol

from quire.base.block_copies import CopiesEnded
from quire.base.records import NO_BOOLS, NO_INTS, Request
from quire.engine.core import Inbox
from quire.engine.process.messages import ToEngine

# Reported in a step in which no copy has ended, and blocks from outside have arrived.
NOTHING_MOVED = CopiesEnded(to_tiers=NO_INTS, to_blocks=NO_INTS, arrived=NO_BOOLS)


class BlockSource(Protocol):
    """What watches the messages of an engine."""

    def shortened(self, wait_s: float | None) -> float | None:
        """Return how long an idle engine may wait (None: for ever)."""

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Read messages that the engine handles next; return them and those of the source."""


class SourceInbox:
    """An Inbox of which a source reads the messages first."""

    def __init__(self, source: BlockSource, inbox: Inbox) -> None:
        self._source, self._inbox = source, inbox

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """See Inbox."""
        return self._source.take(self._inbox.take(self._source.shortened(wait_s)))

    def wake(self) -> None:
        """See Inbox."""
        self._inbox.wake()


def can_use_outside_blocks(request: Request) -> bool:
    """Return whether blocks from outside replace any computation of a request."""
    sampling = request.sampling
    return sampling.prompt_logprobs is None and sampling.pooling is None
