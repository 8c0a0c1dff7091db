"""BlockClient: the fetching side of transfers: threads that bring blocks of other engines here.

A job names blocks by digest and the places they go to. Its thread connects, shakes hands, has the
prompt computed where that is asked for, and copies each block that matches its checksum into its
place. Knows no scheduler and no map. Always holds: a job ends once, with its first `num_landed`
blocks whole in their places; after `cancel` has returned nothing is written into a place; a job
ends within its time limits, whatever the other side does.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.kv_transfer import Failure
from quire.base.prefill_load import PrefillLoad
from quire.transfer.links.block_server import BEAT_S, LOST_S
from quire.transfer.links.channel import Channel, LinkTimeout
from quire.transfer.links.checksum import checksum_of, copied
from quire.transfer.links.handshake import LinkRefused, greet_as_fetcher
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
from quire.transfer.links.security import TLS_S, LinkSecurity
from quire.transfer.links.ways import INLINE, Opener, Reader, way_of

Bytes = NDArray[np.uint8]

MAX_THREADS = 16
CONNECT_S = 3.0
# After so many blocks at the latest, both engines learn how many are here.
LANDED_EVERY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where blocks are fetched. engine_id: "" for any. salt, token_ids: of a prompt (int32 bytes)
    that the other engine computes first; no token_ids: it has, under the transfer id."""

    host: str
    port: int
    transfer_id: bytes
    engine_id: str = ""
    salt: str = ""
    token_ids: bytes = b""


@dataclass(slots=True, eq=False)
class FetchJob:
    """Blocks on their way. places[i] is for the block of digests[i]; no digests: nothing is fetched
    of the transfer, and the other engine can end its lease.

    num_landed: leading blocks that are in their places. failure: why they are fewer; None where all
    are there, or the job was cancelled. receive_ms: time spent on their bytes. lock: held while a
    place is written. accepts: whether to go on at an engine with such a load; None: with any. load:
    that of the other engine, once it is known.
    """

    source: Source
    digests: Sequence[bytes]
    places: Sequence[int]
    accepts: Callable[[PrefillLoad], bool] | None = None
    load: PrefillLoad | None = None
    began_s: float = field(default_factory=time.monotonic)
    num_landed: int = 0
    failure: Failure | None = None
    detail: str = ""
    receive_ms: float = 0.0
    is_cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    channel: Channel | None = None

    def cancel(self) -> None:
        """End the job; its thread writes nothing more."""
        self.is_cancelled = True
        channel = self.channel  # which its thread takes away when it ends
        if channel is not None:
            channel.stop()  # so that a thread that waits for bytes stops writing at once
        with self.lock:
            pass  # nothing is being written any more


class _JobFailed(Exception):
    """A job ends with a failure."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure, self.detail = failure, detail


class BlockClient:
    """Fetches for one engine. room: returns the memory of a place. wake: called when blocks have
    landed, and when a job ends.

    openers: how other engines' memory is read, by backend. timeout_s: the longest wait for a block.
    """

    def __init__(
        self,
        *,
        security: LinkSecurity,
        identity: Identity,
        room: Callable[[int], Bytes],
        wake: Callable[[], None],
        openers: Mapping[str, Opener],
        timeout_s: float,
    ) -> None:
        self._security, self._identity, self._room = security, identity, room
        self._wake, self._openers, self._timeout_s = wake, openers, timeout_s
        self._jobs: queue.SimpleQueue[FetchJob | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[FetchJob] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._live: set[FetchJob] = set()

    def start(self, job: FetchJob) -> None:
        """Begin a job; called by one thread, as `ended` is."""
        self._live.add(job)
        self._jobs.put(job)
        if len(self._threads) < min(MAX_THREADS, len(self._live)):
            thread = threading.Thread(target=self._work, name="quire-kv-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def ended(self) -> list[FetchJob]:
        """Return the jobs that have ended since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._ended.get_nowait())
        self._live.difference_update(found)
        return found

    def close(self) -> None:
        """Cancel all jobs and end the threads."""
        for job in self._live:
            job.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(CONNECT_S + TLS_S + 1.0)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._run(job)
            except _JobFailed as failed:
                job.failure, job.detail = failed.failure, failed.detail
            except Exception as error:  # noqa: BLE001  ends this job; what lacks is computed
                job.failure, job.detail = Failure.CUT, repr(error)
            if job.is_cancelled:
                job.failure = None
            self._ended.put(job)
            self._wake()

    def _next(self) -> FetchJob | None:
        """Wait for a job; meanwhile give up what nothing reads any more."""
        while True:
            due_s = [one.forget_unread() for one in self._openers.values()]
            wait_s = min((one for one in due_s if one is not None), default=None)
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=wait_s)

    def _run(self, job: FetchJob) -> None:
        if time.monotonic() - job.began_s > self._timeout_s:
            raise _JobFailed(Failure.TIMEOUT, "other transfers took all threads")
        channel = self._connected(job)
        try:
            job.channel = channel
            if job.is_cancelled:  # before it had a channel to stop
                return
            self._fetch(job, channel)
        except (LinkRefused, ssl.SSLError) as error:
            raise _JobFailed(Failure.REFUSED, str(error)) from error
        except LinkTimeout as error:
            raise _JobFailed(Failure.TIMEOUT, str(error)) from error
        except (OSError, MessageError) as error:
            raise _JobFailed(Failure.CUT, str(error)) from error
        finally:
            job.channel = None
            channel.close()

    def _connected(self, job: FetchJob) -> Channel:
        source = job.source
        try:
            connection = socket.create_connection((source.host, source.port), CONNECT_S)
        except (OSError, UnicodeError) as error:
            raise _JobFailed(Failure.UNREACHABLE, str(error)) from error
        try:
            return Channel(self._security.connected(connection, source.host))
        except OSError as error:
            connection.close()
            is_refused = isinstance(error, ssl.SSLError)
            raise _JobFailed(Failure.REFUSED if is_refused else Failure.CUT, str(error)) from error

    def _fetch(self, job: FetchJob, channel: Channel) -> None:
        source = job.source
        other = greet_as_fetcher(channel, self._security.key, self._identity)
        if source.engine_id and other.engine_id != source.engine_id:
            raise _JobFailed(
                Failure.EXPIRED, "another engine is at this address now; it was restarted"
            )
        way = self._way(channel, other)
        self._take_load(job, channel)
        reader = self._reader(way, channel, other)
        with contextlib.ExitStack() as ending:
            if reader is not None:
                ending.callback(reader.close)
            if not job.digests:
                channel.send(Release(source.transfer_id), within_s=LOST_S)
                return
            if source.token_ids:
                prompt = Prefill(source.transfer_id, source.salt, source.token_ids)
                channel.send(prompt, within_s=LOST_S)
            asked = Fetch(source.transfer_id, tuple(job.digests), reader is None)
            channel.send(asked, within_s=LOST_S)
            self._receive(job, channel, reader)
            with contextlib.suppress(OSError):
                channel.send(Done(), within_s=LOST_S)

    def _way(self, channel: Channel, other: Identity) -> str:
        """Return how bytes travel. Raises LinkRefused where both sides have no way in common."""
        way = way_of(handing=other, fetching=self._identity)
        if way is None:
            refusal = channel.receive(Refusal, within_s=LOST_S)
            assert isinstance(refusal, Refusal)
            raise LinkRefused(refusal.reason)
        return way

    def _take_load(self, job: FetchJob, channel: Channel) -> None:
        """Learn how busy the other engine is. Raises _JobFailed where it is too busy."""
        message = channel.receive(Load, within_s=LOST_S)
        assert isinstance(message, Load)
        job.load = message.load
        if job.accepts is None:
            return
        self._wake()  # the next prompt may be placed by it
        if not job.accepts(message.load):
            queue_ms = f"{message.load.queue_ms:.0f} ms"
            raise _JobFailed(Failure.BUSY, f"its prompts take {queue_ms}; computing here is faster")

    def _reader(self, way: str, channel: Channel, other: Identity) -> Reader | None:
        """Read the other side's memory, where both can; None: bytes come on the connection."""
        opener = self._openers.get(way)
        if opener is None:
            return None
        described = channel.receive(opener.message, within_s=LOST_S)
        try:
            return opener.open(described)
        except OSError as error:
            if INLINE in self._identity.backends and INLINE in other.backends:
                return None  # another machine, or a container without a view of the process
            raise LinkRefused(
                f"the other engine's memory cannot be read by {way}: {error}"
            ) from error

    def _receive(self, job: FetchJob, channel: Channel, reader: Reader | None) -> None:
        """Take in blocks until there are no more. Raises _JobFailed where they are too few."""
        last_s, num_told, wanted = time.monotonic(), 0, len(job.digests)
        coming: deque[Block] = deque()  # of which the bytes are being read
        most = 1 if reader is None else 1 + reader.ahead
        while job.num_landed < wanted:
            num_known = job.num_landed + len(coming)
            is_due = len(coming) == most or num_known == wanted
            if coming and (is_due or not channel.has_input()):
                if not self._place(job, coming.popleft(), channel, reader):
                    return
                if job.num_landed - num_told >= LANDED_EVERY:
                    num_told = self._tell(job, channel)
                continue
            if num_told < job.num_landed and not channel.has_input():
                num_told = self._tell(job, channel)
            message = channel.receive(Block, Beat, End, within_s=LOST_S)
            if isinstance(message, End):
                for block in coming:
                    if not self._place(job, block, channel, reader):
                        return
                raise _JobFailed(*_shortage(message.reason))
            if isinstance(message, Beat):
                channel.send(Beat(), within_s=LOST_S)
                if time.monotonic() - last_s > self._timeout_s:
                    raise _JobFailed(Failure.TIMEOUT, f"no block came for {self._timeout_s:g} s")
                continue
            assert isinstance(message, Block)
            last_s = time.monotonic()
            if (message.offset == Block.INLINE) != (reader is None):
                raise MessageError("a block comes in another way than it was asked for")
            if message.index != num_known:
                raise MessageError(f"block {message.index} came in place of {num_known}")
            if reader is not None:
                reader.expect(message.offset)
            coming.append(message)
        self._tell(job, channel)

    def _tell(self, job: FetchJob, channel: Channel) -> int:
        """Let both engines know how many blocks are here; return that number."""
        with contextlib.suppress(OSError):  # found out when more is received, if it is
            channel.send(Landed(job.num_landed), within_s=LOST_S)
        self._wake()  # they are loaded while others are on their way
        return job.num_landed

    def _place(
        self, job: FetchJob, message: Block, channel: Channel, reader: Reader | None
    ) -> bool:
        """Bring a block into its place, and check what is there; return False after `cancel`.

        The other side may change its memory at any time, so what is in the place is summed.
        """
        num_bytes, began_s = self._identity.block_bytes, time.monotonic()
        raw = None if reader is None else reader.view(message.offset, num_bytes)
        with job.lock:
            if job.is_cancelled:
                return False  # and the place may be another block's by now
            place = self._room(job.places[message.index])
            if raw is None:
                channel.receive_inline(place.data, within_s=LOST_S)
                checksum = checksum_of(place)
            else:
                checksum = copied(raw, place)
            if checksum != message.checksum:
                reason = f"block {message.index} does not match its checksum"
                raise _JobFailed(Failure.BAD_BYTES, reason)
            job.receive_ms += (time.monotonic() - began_s) * 1000.0
            job.num_landed += 1
        return True


def _shortage(reason: str) -> tuple[Failure, str]:
    """Return the failure for the reason of an End that came too early."""
    known = {"expired": Failure.EXPIRED, "missing": Failure.MISSING, "done": Failure.CUT}
    return known.get(reason, Failure.REFUSED), reason


__all__ = ["BEAT_S", "BlockClient", "FetchJob", "Source"]
