"""Peers: the prefill engines that a decode engine asks by itself, and which of them to ask next.

The one with the fewest open transfers is asked. One that failed is left alone for a while, longer
after each failure in a row. Knows addresses and times, no connection. Always holds: a peer is asked
again in the end, because a failure fades.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_PAUSE_MS, MAX_PAUSE_MS = 1_000.0, 60_000.0


@dataclass(slots=True, eq=False)
class Peer:
    """One prefill engine. not_before_ms: when it may be asked again."""

    host: str
    port: int
    num_open: int = 0
    num_failures: int = 0
    not_before_ms: float = 0.0


class Peers:
    """The peers of one engine."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._peers = [Peer(host, port) for host, port in addresses]

    def __len__(self) -> int:
        return len(self._peers)

    def choose(self, now_ms: float) -> Peer | None:
        """Return the peer to ask, counted as open; None where all failed recently."""
        usable = [peer for peer in self._peers if peer.not_before_ms <= now_ms]
        if not usable:
            return None
        peer = min(usable, key=lambda one: one.num_open)
        peer.num_open += 1
        return peer

    def ended(self, peer: Peer, now_ms: float, *, failed: bool) -> None:
        """Note that a transfer has ended. failed: the peer is the cause."""
        peer.num_open -= 1
        if not failed:
            peer.num_failures, peer.not_before_ms = 0, 0.0
            return
        pause_ms = min(FIRST_PAUSE_MS * 2.0**peer.num_failures, MAX_PAUSE_MS)
        peer.num_failures = min(peer.num_failures + 1, 16)
        peer.not_before_ms = now_ms + pause_ms
