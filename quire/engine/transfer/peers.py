"""Peers: the prefill engines that a decode engine asks by itself, and which of them to ask next.

A prompt goes where it is predicted to be computed soonest; peers that hardly differ take turns, so
that several decode engines do not all ask the same one. Each peer sends its load when a connection
to it opens; from then on its queue shrinks with time and grows with what this engine asks of it,
and after a while its load counts as unknown, so that it is learned again. One that failed is left
alone for a while, longer after each failure in a row. Knows addresses and times, no connection.
Always holds: a peer is asked again in the end, because a failure, a queue and a load fade.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.base.prefill_load import PrefillLoad

FIRST_PAUSE_MS, MAX_PAUSE_MS = 1_000.0, 60_000.0
# How long a load is believed.
KNOWN_MS = 60_000.0
# Delays up to so many times the shortest are alike: by estimates that differ by a little, all
# decode engines would ask the same one of several idle peers.
ALIKE = 1.1


@dataclass(slots=True, eq=False)
class Peer:
    """One prefill engine. not_before_ms: when it may be asked again.

    load: as it was sent last, at known_ms; free_ms: when its queue is predicted to be empty;
    last_ms: when it was asked last.
    """

    host: str
    port: int
    num_open: int = 0
    num_failures: int = 0
    not_before_ms: float = 0.0
    load: PrefillLoad | None = None
    known_ms: float = 0.0
    free_ms: float = 0.0
    last_ms: float = -math.inf

    def load_at(self, now_ms: float) -> PrefillLoad | None:
        """Return its predicted load; None where it is not known, or no longer."""
        if self.load is None or now_ms - self.known_ms > KNOWN_MS:
            return None
        return replace(self.load, queue_ms=max(self.free_ms - now_ms, 0.0))

    def note_load(self, load: PrefillLoad, asked_ms: float, now_ms: float) -> None:
        """Take in a load. asked_ms: of this engine's prompts that the load does not contain."""
        self.load, self.known_ms = load, now_ms
        self.free_ms = now_ms + load.queue_ms + asked_ms

    def note_asked(self, start: int, end: int, now_ms: float) -> None:
        """Note that a transfer begins, for which it computes positions start .. end - 1."""
        self.num_open += 1
        self.last_ms = now_ms
        if self.load is not None:
            self.free_ms = max(self.free_ms, now_ms) + self.load.prompt_ms(start, end)


class Peers:
    """The peers of one engine."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._peers = [Peer(host, port) for host, port in addresses]

    def __len__(self) -> int:
        return len(self._peers)

    def best(
        self, now_ms: float, delay_ms: Callable[[Peer, PrefillLoad | None], float]
    ) -> Peer | None:
        """Return the peer with the shortest delay, by its load; None where all failed recently.

        Of those with a delay that is hardly longer, the one with the fewest open transfers, then
        the one that was asked least recently.
        """
        usable = [peer for peer in self._peers if peer.not_before_ms <= now_ms]
        if not usable:
            return None
        delays_ms = {peer: delay_ms(peer, peer.load_at(now_ms)) for peer in usable}
        limit_ms = ALIKE * min(delays_ms.values())
        alike = [peer for peer in usable if delays_ms[peer] <= limit_ms]
        return min(alike, key=lambda one: (one.num_open, one.last_ms))

    def ended(self, peer: Peer, now_ms: float, *, failed: bool) -> None:
        """Note that a transfer has ended. failed: the peer is the cause."""
        peer.num_open -= 1
        if not failed:
            peer.num_failures, peer.not_before_ms = 0, 0.0
            return
        pause_ms = min(FIRST_PAUSE_MS * 2.0**peer.num_failures, MAX_PAUSE_MS)
        peer.num_failures = min(peer.num_failures + 1, 16)
        peer.not_before_ms = now_ms + pause_ms
        peer.load = None  # another process may be there next
