"""Session affinity, `session-affinity`: requests with one session key go to one replica.

By rendezvous hashing: when a replica leaves, only its sessions move. Requests without a key go
where the fewest tokens are. Several routers choose alike, since the hash is the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quire.routing.least_tokens import LeastTokens
from quire.routing.policy import AnyReplica, PlainPolicy, RouteKey


class SessionAffinity(PlainPolicy):
    """The session is `prompt_cache_key`, or the header `x-session-id`."""

    def __init__(self) -> None:
        self._others = LeastTokens()

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return the replica of the session."""
        if not key.session:
            return self._others.choose(replicas, key)
        return max(replicas, key=lambda one: _weight(key.session, one.name))


def _weight(session: str, name: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{name}".encode("utf-8", "surrogatepass")).digest()
