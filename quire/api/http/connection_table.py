"""ConnectionTable: the open connections of this process, and which one yields to a new one.

Knows no protocol. Always holds: there are at most as many connections as descriptors allow, and at
most half of them are TLS handshakes; a connection with a request under way is never closed to make
room. Every operation takes constant time, however many connections there are.
"""

from __future__ import annotations

import enum
import resource
import sys
from collections.abc import Callable
from typing import Protocol

# Descriptors of this process that are no client's: the engine's sockets, the log, files being read.
_SPARE_FILES = 64


class ConnectionState(enum.Enum):
    """What a connection waits for; the order is that in which connections are evicted."""

    IDLE = enum.auto()  # for the next request of a kept-alive connection
    HANDSHAKE = enum.auto()  # for the client's part of a TLS handshake
    HEAD = enum.auto()  # for the rest of a request's head
    ACTIVE = enum.auto()  # for the answer


class Evictable(Protocol):
    """An open connection."""

    def evict(self) -> None:
        """Close it at once; it is no longer in the table."""


def max_connections() -> int:
    """Return how many connections the limit on open files leaves room for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(limit - _SPARE_FILES, 1)


class ConnectionTable:
    """Connections by state, each state's in the order in which they entered it."""

    def __init__(self, limit: Callable[[], int] = max_connections) -> None:
        self._limit = limit
        self._by_state: dict[ConnectionState, dict[Evictable, None]] = {
            state: {} for state in ConnectionState
        }
        self._states: dict[Evictable, ConnectionState] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._states)

    def add(self, connection: Evictable, state: ConnectionState) -> None:
        """Add a connection; evict others if there are too many now."""
        self._states[connection] = state
        self._by_state[state][connection] = None
        limit = self._limit()
        if len(self._by_state[ConnectionState.HANDSHAKE]) > max(limit // 2, 1):
            self._evict(ConnectionState.HANDSHAKE)
        if len(self._states) > limit:
            self._make_room()

    def move(self, connection: Evictable, state: ConnectionState) -> None:
        """Record that a connection waits for something else now; no effect once it is removed."""
        before = self._states.get(connection)
        if before is not None:
            del self._by_state[before][connection]
            self._states[connection] = state
            self._by_state[state][connection] = None

    def remove(self, connection: Evictable) -> None:
        """Forget a connection that was closed; no effect if it was evicted."""
        state = self._states.pop(connection, None)
        if state is not None:
            del self._by_state[state][connection]

    def _make_room(self) -> None:
        for state in ConnectionState:
            if state is not ConnectionState.ACTIVE and self._by_state[state]:
                self._evict(state)
                return

    def _evict(self, state: ConnectionState) -> None:
        """Close the connection that has been in `state` the longest."""
        connection = next(iter(self._by_state[state]))
        self.remove(connection)
        self.num_evicted += 1
        connection.evict()


# Descriptors are a process's, whatever number of sockets it listens at.
OPEN_CONNECTIONS = ConnectionTable()
