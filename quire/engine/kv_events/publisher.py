"""KVEventPublisher: the cache's block events over ZeroMQ, in the format of vLLM.

    PUB frames    [topic, sequence number u64 big-endian, msgpack of [ts, events, dp_rank]]
    ROUTER        a subscriber sends ["", first sequence number] and gets ["", number, batch] for
                  each batch that is kept from there on, then ["", 2**64 - 1, ""]

Events are arrays: ["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium,
lora_name], ["BlockRemoved", hashes, medium] and ["AllBlocksCleared"]. A thread of its own encodes
and sends, so the engine only appends to a queue. Always holds: the queue, the batches kept and what
waits for a slow subscriber are bounded; a batch that was dropped leaves a gap in the numbers.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec
import zmq

from quire.base.errors import SettingError
from quire.base.report import Report
from quire.cache.reporting import BlockEvent, BlocksRemoved, BlocksStored, CacheCleared
from quire.config.kv_events import KVEventsConfig

# The pool of KV blocks that steps compute with; vLLM's name for it, on whatever device it lies.
MEDIUM = "GPU"
END_OF_REPLAY = (2**64 - 1).to_bytes(8, "big")
_MAX_EVENTS = 1024  # of a batch
_MAX_KEPT_BYTES = 64 << 20  # of batches for replays
_WAKE = "inproc://kv-events-wake"


class KVEventPublisher:
    """topic: as in kv@host:port@model. report: receives failures. Raises SettingError where an
    address cannot be listened at."""

    def __init__(
        self, config: KVEventsConfig, *, topic: str, block_size: int, report: Report
    ) -> None:
        self.reports_isolated = config.isolated_tenants
        self._topic = topic.encode()
        self._rank = config.data_parallel_rank
        self._block_size = block_size
        self._report = report
        self._queue: deque[BlockEvent] = deque()
        self._max_queued = config.max_queue_size
        self._num_dropped = 0
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._kept_bytes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context(io_threads=1)
        self._is_ending = False
        try:
            self._publisher = _bound(self._context, zmq.PUB, config.endpoint, config.hwm)
            self._replay = None
            if config.replay_endpoint is not None:
                self._replay = _bound(
                    self._context, zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 2
                )
            self._woken = self._context.socket(zmq.PULL)
            self._woken.bind(_WAKE)
            self._wake = self._context.socket(zmq.PUSH)
            self._wake.connect(_WAKE)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._is_awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()
        self.put(CacheCleared())  # what a subscriber knows of an engine before this one is gone

    def put(self, event: BlockEvent) -> None:
        """Queue an event; in the engine's thread. It is dropped where too many wait."""
        if len(self._queue) >= self._max_queued:
            self._num_dropped += 1
            return
        self._queue.append(event)
        if not self._is_awake.is_set():
            self._is_awake.set()
            self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, and end; in the engine's thread."""
        self._is_ending = True
        self._wake.send(b"", zmq.NOBLOCK)
        self._thread.join()
        self._context.destroy(linger=200)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not (self._is_ending and not self._queue):
                ready = dict(poller.poll())
                if self._woken in ready:
                    self._woken.recv()
                    # Cleared first: an event that comes from now on wakes this thread again.
                    self._is_awake.clear()
                    while self._queue:
                        self._publish()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        except Exception as error:  # noqa: BLE001  the engine goes on without events
            self._report("KV events are no longer published", error=repr(error))
            self._max_queued = 0

    def _publish(self) -> None:
        """Send the oldest events as one batch."""
        if self._num_dropped:
            self._report("KV events were dropped", events=self._num_dropped)
            self._num_dropped = 0
            self._sequence += 1
        events = [self._queue.popleft() for _ in range(min(len(self._queue), _MAX_EVENTS))]
        batch = self._encode([time.time(), [self._array(event) for event in events], self._rank])
        self._keep(batch)
        self._publisher.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), batch))
        self._sequence += 1

    def _keep(self, batch: bytes) -> None:
        if len(self._kept) == self._kept.maxlen:
            self._kept_bytes -= len(self._kept[0][1])
        self._kept.append((self._sequence, batch))
        self._kept_bytes += len(batch)
        while self._kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _array(self, event: BlockEvent) -> list[object]:
        if isinstance(event, BlocksStored):
            described = (event.hashes, event.parent, event.token_ids, self._block_size)
            return ["BlockStored", *described, None, MEDIUM, None]
        if isinstance(event, BlocksRemoved):
            return ["BlockRemoved", event.hashes, MEDIUM]
        return ["AllBlocksCleared"]

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the batches that are kept, from the number on that was asked for."""
        client, *rest = replay.recv_multipart()
        if not rest or len(rest[-1]) != 8:
            return  # no request for a replay
        first = int.from_bytes(rest[-1], "big")
        for number, batch in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, hwm: int
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.LINGER, 200)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise SettingError(
            f"kv_events_config: {endpoint} cannot be listened at ({error}); give another address"
        ) from error
    return socket
