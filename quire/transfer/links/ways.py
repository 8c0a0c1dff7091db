"""Ways for the bytes of blocks to travel: on the connection, or read from the other side's memory.

Each way but `tcp` is two objects: the memory of the handing side, described in one message, and a
reader that the fetching side opens from that message. Knows messages, no socket and no store.
Always holds: both sides choose the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.transfer.links.messages import Agent, AnyMessage, Identity, Segment

Bytes = NDArray[np.uint8]

INLINE = "tcp"


class OwnMemory(Protocol):
    """The memory of all places of the handing side."""

    def message(self) -> Segment | Agent:
        """Return what the other side needs to read it."""

    def close(self) -> None:
        """Share it no more."""


class Reader(Protocol):
    """Reads the memory of one handing side. ahead: blocks that it reads beside the one viewed."""

    ahead: int

    def expect(self, offset: int) -> None:
        """Begin to read the block at an offset in the other side's places, if that takes time.

        Blocks are viewed in the order in which they are expected, each before more than `ahead`
        after it are expected.
        """

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Return bytes at an offset in the other side's places, until a block is expected or viewed
        next.

        Raises OSError.
        """

    def close(self) -> None:
        """Read nothing any more."""


def _keeps_nothing() -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class Opener:
    """How the fetching side reads. message: what it is sent first. open: raises OSError.

    forget_unread: gives up what is kept for later readers and has been without one for a while;
    returns the seconds until more of it is due, None where nothing is kept.
    """

    message: type[AnyMessage]
    open: Callable[[Any], Reader]
    forget_unread: Callable[[], float | None] = _keeps_nothing


def way_of(*, handing: Identity, fetching: Identity) -> str | None:
    """Return the handing side's first way that the fetching side has too; None for none."""
    return next((way for way in handing.backends if way in fetching.backends), None)
