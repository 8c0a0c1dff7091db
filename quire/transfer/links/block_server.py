"""BlockServer: the handing side of transfers: accepts connections and sends blocks of leases.

A thread accepts, and one thread a connection sends blocks in the order asked for, each as soon as
it is saved, so that a transfer runs beside the prefill. The other side says how many it has, by
which the share that the prefill covers is counted. Knows leases, places and bytes; no scheduler.
Always holds: at most MAX_CONNECTIONS are open; nothing is sent before the handshake; a connection
without a sign of life for LOST_S ends, and its lease with it; a checksum is sent only if the lease
was valid after the bytes were summed.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.prefill_load import PrefillLoad
from quire.base.report import Report
from quire.transfer.links import checksum
from quire.transfer.links.channel import Channel, LinkClosed, LinkTimeout
from quire.transfer.links.handshake import LinkRefused, greet_as_server
from quire.transfer.links.leases import Lease, LeaseBook
from quire.transfer.links.messages import (
    Beat,
    Block,
    Done,
    End,
    Fetch,
    Identity,
    Landed,
    Load,
    MessageError,
    Prefill,
    Refusal,
    Release,
)
from quire.transfer.links.security import LinkSecurity
from quire.transfer.links.ways import OwnMemory, way_of

Bytes = NDArray[np.uint8]

MAX_CONNECTIONS = 64
# Signs of life are sent so often while there is nothing else to send, and missed after so long.
BEAT_S = 0.5
LOST_S = 10.0
# While the other side has not reported that it has all that was sent, it is listened to so often.
LISTEN_S = 0.02
# A fetching side has so long to ask for blocks, and a lease to be opened by the engine.
ASK_S = 10.0
_CLOSE_S = 2.0


class PrefillDesk(Protocol):
    """Takes prompts to compute for other engines."""

    def prefill(self, transfer_id: bytes, salt: str, token_ids: bytes) -> None:
        """Have a prompt (int32 bytes) computed and its blocks kept under `transfer_id`."""

    def cancel(self, transfer_id: bytes) -> None:
        """Note that the prompt is not needed any more."""

    def settle(self) -> None:
        """Have the engine look at its leases soon."""

    def load(self) -> PrefillLoad:
        """Return how long prompts take here, and how many come first."""


@dataclass(slots=True)
class SentCounts:
    """Counters of one server; connections add to them under its lock."""

    blocks_total: int = 0
    bytes_total: int = 0


class BlockServer:
    """Serves the store of one engine at `listening`, which it closes.

    room: returns the memory of a place. shared: the memory of all places, in their order, by the
    name of the backend that reads it from elsewhere.
    """

    def __init__(
        self,
        listening: socket.socket,
        *,
        security: LinkSecurity,
        identity: Identity,
        leases: LeaseBook,
        room: Callable[[int], Bytes],
        desk: PrefillDesk,
        shared: Mapping[str, OwnMemory],
        report: Report,
    ) -> None:
        self._listening = listening
        self._security, self._identity = security, identity
        self._leases, self._room, self._desk = leases, room, desk
        self._shared, self._report = shared, report
        self.counts = SentCounts()
        self._lock = threading.Lock()
        self._open: dict[Channel, threading.Thread] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._accept, name="quire-kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and their threads."""
        with self._lock:
            self._is_closing = True
            threads = dict(self._open)
        # A connection of our own ends the wait for the next one.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for channel in threads:
            channel.stop()
        for thread in (self._thread, *threads.values()):
            thread.join(_CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                self._begin(Channel(self._listening.accept()[0]))
            except (OSError, RuntimeError) as error:
                if self._is_closing:
                    return
                self._report("KV transfer: a connection was not accepted", error=str(error))
                time.sleep(BEAT_S)  # descriptors or threads are short: others may end

    def _begin(self, channel: Channel) -> None:
        """Serve a connection in a thread. Raises RuntimeError where none can be started."""
        thread = threading.Thread(
            target=self._serve, args=(channel,), name="quire-kv-send", daemon=True
        )
        with self._lock:
            if self._is_closing or len(self._open) >= MAX_CONNECTIONS:
                channel.close()
                return
            try:
                thread.start()
            except RuntimeError:
                channel.close()
                raise
            self._open[channel] = thread  # before its end, which needs the lock

    def _serve(self, channel: Channel) -> None:
        try:
            self._answer(channel)
        except (LinkRefused, ssl.SSLError) as error:
            self._report("KV transfer: a connection was refused", reason=str(error))
        except (OSError, MessageError):
            pass  # the other side is gone or of another kind; its lease has ended
        except Exception as error:  # noqa: BLE001  a connection's thread: others go on
            self._report("KV transfer: a connection failed", error=repr(error))
        finally:
            channel.close()
            with self._lock:
                self._open.pop(channel, None)

    def _answer(self, channel: Channel) -> None:
        """Serve one request of one connection."""
        channel.secure(self._security.served)
        other = greet_as_server(channel, self._security.key, self._identity)
        way = way_of(handing=self._identity, fetching=other)
        if way is None:
            why = (
                f"the fetching engine takes {', '.join(other.backends)} and this one gives "
                f"{', '.join(self._identity.backends)}; set --kv-transfer-backend auto on both"
            )
            channel.send(Refusal(why), within_s=LOST_S)
            raise LinkRefused(why)
        channel.send(Load(self._desk.load()), within_s=LOST_S)
        if way in self._shared:
            channel.send(self._shared[way].message(), within_s=LOST_S)
        asked = channel.receive(Prefill, Fetch, Release, within_s=ASK_S)
        if isinstance(asked, Release):
            self._leases.give_up(asked.transfer_id)
            self._desk.settle()
            return
        is_prefill = isinstance(asked, Prefill)
        if isinstance(asked, Prefill):
            self._desk.prefill(asked.transfer_id, asked.salt, asked.token_ids)
            transfer_id = asked.transfer_id
        try:
            if is_prefill:
                asked = channel.receive(Fetch, within_s=ASK_S)
            assert isinstance(asked, Fetch)
            if is_prefill and asked.transfer_id != transfer_id:
                raise MessageError("the blocks of another transfer than the prefill's are fetched")
            self._send_lease(channel, asked, ASK_S if is_prefill else 0.0)
        finally:
            if is_prefill:
                self._desk.cancel(transfer_id)

    def _send_lease(self, channel: Channel, asked: Fetch, wait_s: float) -> None:
        lease = self._claimed(channel, asked.transfer_id, wait_s)
        if lease is None:
            channel.send(End("expired"), within_s=LOST_S)
            return
        is_over = False
        try:
            life = _SignsOfLife(channel, lambda count: self._leases.note_there(lease, count))
            reason = self._send_blocks(life, lease, asked)
            channel.send(End(reason), within_s=LOST_S)
            life.wait_for_end()
            is_over = True
        except (OSError, MessageError):
            is_over = True  # the other side computes by itself, or will never come back
            raise
        finally:
            self._leases.let_go(asked.transfer_id, lease, is_over=is_over)
            self._desk.settle()

    def _claimed(self, channel: Channel, transfer_id: bytes, wait_s: float) -> Lease | None:
        """Return the lease, once the engine has opened it; it may be in a long step."""
        deadline_s = time.monotonic() + wait_s
        while (lease := self._leases.claim(transfer_id, min(wait_s, BEAT_S))) is None:
            if time.monotonic() >= deadline_s:
                return None
            channel.send(Beat(), within_s=LOST_S)
        return lease

    def _send_blocks(self, life: _SignsOfLife, lease: Lease, asked: Fetch) -> str:
        """Send the blocks that come; return "", or why they are fewer than asked for."""
        for index, digest in enumerate(asked.digests):
            while True:
                try:
                    place = self._leases.place(lease, digest, life.wait_s)
                except KeyError:
                    # What comes after a gap is of no use: a prefix is read up to it.
                    return lease.failure or ("missing" if lease.valid else "expired")
                if place is not None:
                    break
                if life.beat():
                    self._desk.settle()
                if life.is_done:
                    return "done"
            raw = self._room(place)
            summed = checksum.checksum_of(raw)
            if not self._leases.is_valid(lease):
                return "expired"
            offset, inline = place * len(raw), raw[:0].data
            if asked.is_inline:
                offset, inline = Block.INLINE, raw.data
            elif not self._shared:
                raise MessageError("blocks in memory are asked for, and none is shared")
            life.send(Block(index, summed, offset), inline)
            with self._lock:
                self.counts.blocks_total += 1
                self.counts.bytes_total += len(raw)
            life.read()
            if life.is_done:
                return "done"
        return ""


class _SignsOfLife:
    """Both directions of a connection while blocks are sent.

    is_done: the other side needs nothing more. note_landed: called with how many blocks it has.
    """

    def __init__(self, channel: Channel, note_landed: Callable[[int], None]) -> None:
        self._channel, self._note_landed = channel, note_landed
        self.is_done = False
        self._heard_s = self._sent_s = time.monotonic()
        self._num_sent = self._num_landed = 0

    @property
    def wait_s(self) -> float:
        """How long to wait for a block before the other side is listened to."""
        return BEAT_S if self._num_landed == self._num_sent else LISTEN_S

    def send(self, block: Block, inline: memoryview) -> None:
        """Send a block."""
        self._channel.send(block, inline, within_s=LOST_S)
        self._num_sent += 1
        self._sent_s = time.monotonic()

    def beat(self) -> bool:
        """Listen, and send a sign of life if one is due; return whether it was.

        Raises LinkTimeout where the other side sent nothing for long.
        """
        self.read()
        now_s = time.monotonic()
        if now_s - self._sent_s < BEAT_S:
            return False
        self._channel.send(Beat(), within_s=LOST_S)
        self._sent_s = now_s
        if now_s - self._heard_s > LOST_S:
            raise LinkTimeout("the fetching engine shows no sign of life")
        return True

    def read(self) -> None:
        """Take in what came; does not wait."""
        while not self.is_done and self._channel.has_input():
            self._take()

    def wait_for_end(self) -> None:
        """Wait until the other side has all: it may still copy from shared memory."""
        try:
            while not self.is_done:
                self._take()
        except LinkClosed:
            pass  # as good as Done: it has what it needs, or is gone

    def _take(self) -> None:
        message = self._channel.receive(Beat, Done, Landed, within_s=LOST_S)
        self._heard_s = time.monotonic()
        self.is_done = isinstance(message, Done)
        if isinstance(message, Landed):
            if message.num_blocks > self._num_sent:
                raise MessageError(
                    f"{message.num_blocks} blocks are there and {self._num_sent} sent"
                )
            self._num_landed = max(self._num_landed, message.num_blocks)
            self._note_landed(self._num_landed)
