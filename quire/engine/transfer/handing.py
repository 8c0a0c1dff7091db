"""Handing: prompts that have their KV blocks handed over to other engines.

What is handed over is saved to the exchange's store as the scheduler computes it, and kept there
under a lease until the other engine has it or does not come. Other engines order prompts through
the PrefillDesk, in threads of their connections; everything else is called in the engine's thread.
Knows leases, the map of places and requests; sockets are in quire/transfer/links. Always holds: a
place that a lease holds is given up exactly once, when the lease has ended.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

import numpy as np

from quire.base.kv_transfer import KVTransfer
from quire.base.prefill_load import PrefillLoad
from quire.base.records import FinishReason, Request, RequestOutput
from quire.base.report import Report
from quire.base.sampling_params import SamplingParams
from quire.cache.exchange_map import ExchangeMap
from quire.engine.process.message_routing import STARTER
from quire.engine.process.messages import Abort, Submit
from quire.engine.transfer.own_load import OwnLoad
from quire.engine.transfer.sent_load import SentLoad
from quire.scheduler.prefill.hand_over import HandOvers
from quire.transfer.links.leases import LeaseBook
from quire.transfer.links.messages import MessageError

OWN_PREFIX = f"{STARTER}/kv/"  # of the ids of requests that other engines order


class Handing:
    """A PrefillDesk (see quire/transfer/links/block_server.py), and its leases in the engine."""

    def __init__(
        self,
        *,
        hand_overs: HandOvers,
        tier: ExchangeMap,
        leases: LeaseBook,
        own: OwnLoad,
        vocab_size: int,
        now_ms: Callable[[], float],
        report: Report,
    ) -> None:
        self._hand_overs, self._tier, self._leases = hand_overs, tier, leases
        self._sent = SentLoad(own)
        self._vocab_size = vocab_size
        self._now_ms, self._report = now_ms, report
        self.wake: Callable[[], None] = lambda: None
        self._orders: queue.SimpleQueue[Submit | Abort] = queue.SimpleQueue()
        self._transfers: dict[str, bytes] = {}  # transfer ids of live requests, by request id
        tier.listeners.append(self._landed)

    @property
    def has_requests(self) -> bool:
        """Whether a live request is handed over."""
        return bool(self._transfers)

    @property
    def request_ids(self) -> list[str]:
        """The live requests that are handed over."""
        return [*self._transfers]

    @property
    def num_leases(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    @property
    def num_overlapped(self) -> int:
        """Blocks that other engines had before their prompt was computed."""
        return self._leases.overlapped_blocks_total

    @property
    def num_kept(self) -> int:
        """Places of the store that a lease or a waiting request keeps as they are."""
        return self._tier.num_kept

    # ---- PrefillDesk: called in threads of connections

    def prefill(self, transfer_id: bytes, salt: str, token_ids: bytes) -> None:
        """See PrefillDesk. Raises MessageError for ids that the model does not have."""
        prompt = np.frombuffer(token_ids, "<i4").astype(np.int32)
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            raise MessageError(f"token ids are 0 to {self._vocab_size - 1}")
        request_id = _own_id(transfer_id)
        request = Request(
            request_id=request_id,
            group_id=request_id,
            stream=0,
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0).resolve(),
            stop_ids=(),
            max_total_tokens=len(prompt) + 1,
            arrival_ms=self._now_ms(),
            cache_salt=salt,
            transfer=KVTransfer(transfer_id=transfer_id.hex(), hand_over=True),
        )
        self._sent.order(request_id, len(prompt))
        self._orders.put(Submit(requests=(request,)))
        self.wake()

    def cancel(self, transfer_id: bytes) -> None:
        """See PrefillDesk."""
        self._orders.put(Abort(request_ids=(_own_id(transfer_id),)))
        self.wake()

    def settle(self) -> None:
        """See PrefillDesk."""
        self.wake()

    def load(self) -> PrefillLoad:
        """See PrefillDesk."""
        return self._sent.now()

    # ---- the engine's thread

    def note_step(self) -> None:
        """Note the load, after a step or an abort."""
        self._sent.note()

    def ordered(self) -> list[Submit | Abort]:
        """Return what other engines have ordered since this was called last."""
        orders = []
        while not self._orders.empty():
            order = self._orders.get()
            orders.append(order)
            if isinstance(order, Abort):  # its connection has ended
                self._leases.give_up(bytes.fromhex(order.request_ids[0].removeprefix(OWN_PREFIX)))
        return orders

    def begin(self, request: Request, transfer_id: bytes) -> None:
        """Keep the blocks of a request's prompt under a lease, as they are computed."""
        chain = self._hand_overs.chain(request, request.prompt_ids)
        keys, end = chain.keys, len(request.prompt_ids)
        if not keys:
            self._sent.drop(request.request_id)
            return  # shorter than a block
        num_found = len(keys) - len(self._hand_overs.lacking(chain))
        self._sent.take(request.request_id, end * num_found // len(keys), end)
        if self._leases.open(transfer_id, keys) is None:
            self._report("KV transfer: too many leases are open; a prompt is not kept")
            return
        self._tier.want(keys)
        for key in keys:
            for place in self._tier.run((key,)):
                self._landed(key, place)
        self._hand_overs.begin(request.request_id, chain)
        self._transfers[request.request_id] = transfer_id

    def refused(self, request_id: str, why: str) -> None:
        """Note that the engine did not take a request, or gave it up."""
        self._sent.drop(request_id)
        transfer_id = self._transfers.pop(request_id, None)
        if transfer_id is not None:
            self._hand_overs.end(request_id)
            self._leases.fail(transfer_id, why)

    def note_event(self, event: RequestOutput) -> None:
        """Note that a request has ended: all blocks of its prompt were computed, or will not be."""
        reason = event.finish_reason
        transfer_id = self._transfers.pop(event.request_id, None) if reason is not None else None
        if transfer_id is None:
            return
        self._sent.drop(event.request_id)
        self._hand_overs.end(event.request_id)
        self._leases.completed(transfer_id)
        if reason is FinishReason.ERROR:
            self._leases.fail(transfer_id, event.error or "the prompt could not be computed")

    def take_in(self) -> None:
        """Find out what will not be saved any more, and give up what ended leases held."""
        if len(self._leases) and not self._hand_overs.num_to_save:
            for lease in self._leases.complete():
                gone = {key for key in lease.pending if not self._tier.knows(key)}
                if gone:
                    self._leases.lost(lease, gone)
        for lease in self._leases.take_ended():
            self._tier.want_no_more(lease.keys)
            for place in lease.places.values():
                self._tier.end_fetch(place)

    def clear(self) -> None:
        """End all leases: the store has forgotten what it held."""
        self._leases.end_all()

    def _landed(self, key: bytes, place: int) -> None:
        """Keep a block that is in the store now for the leases that it is of."""
        self._tier.hold(place for _ in self._leases.landed(key, place))


def _own_id(transfer_id: bytes) -> str:
    return f"{OWN_PREFIX}{transfer_id.hex()}"
