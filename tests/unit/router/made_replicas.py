"""Replicas, open requests and keys for tests of routing policies."""

from __future__ import annotations

from quire.base.server_url import server_url
from quire.router.replica import Load, Replica
from quire.routing.policy import RouteKey
from quire.routing.prefix_history import block_names


def made_replicas(count: int) -> list[Replica]:
    return [Replica(server_url(f"http://127.0.0.1:{9000 + at}"), at) for at in range(count)]


def open_load(replica: Replica, tokens: int) -> Load:
    """Return an open request of a replica."""
    load = Load(
        tokens=tokens,
        cut=lambda fault: None,
        began_s=0.0,
        last_s=lambda: 0.0,
        is_paused=lambda: False,
    )
    replica.begin(load)
    return load


def key_of(prompt: str, session: str = "") -> RouteKey:
    return RouteKey(blocks=block_names("box", prompt.encode()), session=session, tokens=10)
