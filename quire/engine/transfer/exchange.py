"""KVExchange: KV blocks that this engine hands over or fetches, as the engine's loop sees it.

Notices transfers as requests pass the inbox, follows them in the outputs, and passes both on to the
side that they concern (handing.py, fetching.py). Knows messages and both sides; no block. Always
holds: requests of other engines are not shown to clients; all of both sides but the PrefillDesk is
called in the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from quire.base.kv_transfer import Failure, TransferStats
from quire.engine.process.message_routing import id_prefix
from quire.engine.process.messages import (
    Abort,
    FromEngine,
    Leave,
    Outputs,
    Refused,
    Submit,
    ToEngine,
)
from quire.engine.transfer.fetching import Fetching
from quire.engine.transfer.handing import OWN_PREFIX, Handing
from quire.transfer.links.block_server import BlockServer

# How often an idle engine looks for leases that have ended.
_LOOK_EVERY_S = 0.5


class Shared(Protocol):
    """What other engines read, and what reads theirs: closed at the end."""

    def close(self) -> None:
        """Share or read nothing any more."""


class KVExchange:
    """A BlockSource. server: of connections, where blocks are handed over; shared: closed with the
    exchange, after all connections."""

    def __init__(
        self,
        *,
        handing: Handing,
        fetching: Fetching,
        block_bytes: int,
        shared: Sequence[Shared] = (),
    ) -> None:
        self.handing, self.fetching = handing, fetching
        self._block_bytes = block_bytes
        self._shared = shared
        self.server: BlockServer | None = None
        self._wake: Callable[[], None] = lambda: None
        self._has_news = False
        self._reported = TransferStats()

    # ---- BlockSource

    @property
    def wake(self) -> Callable[[], None]:
        """Called in a thread of its own when there is something to take in."""
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._wake = self.handing.wake = wake

    @property
    def has_unreported(self) -> bool:
        """See BlockSource."""
        return self.stats() != self._reported

    def take_news(self) -> bool:
        """See BlockSource."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def clear(self) -> None:
        """See BlockSource."""
        self.handing.clear()
        self.fetching.clear()
        self._has_news = True  # what waited for a job may begin

    def seen(self, message: FromEngine) -> FromEngine | None:
        """See BlockSource; what became of requests of other engines is not passed on."""
        if isinstance(message, Refused):
            for request_id in message.request_ids:
                self._refused(request_id, message.fault.message)
            if message.request_ids[0].startswith(OWN_PREFIX):
                return None
        elif isinstance(message, Outputs):
            message.stats.transfer = self._reported = self.stats()
            if self.server is not None:
                self.handing.note_step()
            return self._seen(message)
        return message

    def shortened(self, wait_s: float | None) -> float | None:
        """See BlockSource: leases end by time."""
        if not self.handing.num_leases:
            return wait_s
        return _LOOK_EVERY_S if wait_s is None else min(wait_s, _LOOK_EVERY_S)

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Notice transfers in messages that the engine handles next; return them and own ones."""
        messages += self.handing.ordered()
        for message in messages:
            if isinstance(message, Submit):
                self._begin(message)
            elif isinstance(message, Abort):
                self.fetching.drop(message.request_ids)
            elif isinstance(message, Leave):
                prefix = id_prefix(message.client)
                for request_id in [*self.fetching.request_ids, *self.handing.request_ids]:
                    if request_id.startswith(prefix):  # no output says that it has ended
                        self._refused(request_id, "its client is gone")
        self._has_news |= self.fetching.take_in()
        self.handing.take_in()
        return messages

    def stats(self) -> TransferStats:
        """Return counters and gauges."""
        sent = self.server.counts if self.server is not None else None
        fetching = self.fetching
        return TransferStats(
            leases=self.handing.num_leases,
            fetching=fetching.num_jobs,
            sent_blocks_total=sent.blocks_total if sent is not None else 0,
            sent_bytes_total=sent.bytes_total if sent is not None else 0,
            overlapped_bytes_total=self.handing.num_overlapped * self._block_bytes,
            early_blocks_total=fetching.num_early,
            received_blocks_total=fetching.num_received,
            received_bytes_total=fetching.num_received * self._block_bytes,
            receive_ms_total=fetching.receive_ms,
            transfers_total=fetching.num_transfers,
            failures_total=tuple((one.value, fetching.failures[one]) for one in Failure),
        )

    def close(self) -> None:
        """End all connections and threads."""
        if self.server is not None:
            self.server.close()
        if self.fetching.client is not None:
            self.fetching.client.close()
        for one in self._shared:
            one.close()

    # ---- requests

    def _begin(self, message: Submit) -> None:
        """Notice the transfer of a request; its streams have one prompt."""
        request = message.requests[0]
        wish = request.transfer
        if wish is None:
            self.fetching.ask_peer(request)
        elif wish.hand_over:
            self.handing.begin(request, bytes.fromhex(wish.transfer_id))
        else:
            self.fetching.begin(request, wish)

    def _refused(self, request_id: str, why: str) -> None:
        """Note that the engine did not take a request, or gave it up."""
        self.fetching.drop((request_id,))
        self.handing.refused(request_id, why)

    def _seen(self, message: Outputs) -> Outputs:
        """Take note of a step's events; return them without those of own requests."""
        outputs = message.outputs
        if outputs is None or not (self.fetching.has_requests or self.handing.has_requests):
            return message
        has_own = False
        for event in outputs.events:
            has_own |= event.request_id.startswith(OWN_PREFIX)
            self.fetching.note_event(event)
            self.handing.note_event(event)
        if not has_own:
            return message
        events = tuple(one for one in outputs.events if not one.request_id.startswith(OWN_PREFIX))
        return replace(message, outputs=replace(outputs, events=events))
