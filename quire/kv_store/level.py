"""Level: where KV blocks lie below the memory of the host, found by the digest of their chain.

SharedLevel keeps them in a SharedStore: it makes and checks entries (entry.py), encodes blocks, and
asks a breaker. What a store does wrong is counted here and costs time only. Knows no engine and no
request; any thread may call. Always holds: a block is given out only for the digest under which it
was put, and only if its bytes are unchanged; nothing here raises for what a store does.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.kv_store import StoreFailure
from quire.base.report import Report
from quire.kv_store.breaker import Breaker
from quire.kv_store.entry import HEAD_BYTES, EntryFormat
from quire.kv_store.int8 import Int8Encoding
from quire.kv_store.shared_store import Parts, SharedStore, StoreNotReady

Bytes = NDArray[np.uint8]
Answer = TypeVar("Answer")


class Fetched(Enum):
    """What became of a block that was asked for."""

    WHOLE = auto()
    MISSING = auto()
    BAD = auto()


class Level(Protocol):
    """Blocks of one size by the digests of their chains."""

    name: str

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its block can be asked for."""

    def fetch(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> list[Fetched]:
        """Read blocks into `outs`; one that is not whole leaves anything there."""

    def put(self, keys: Sequence[bytes], raws: Sequence[Bytes]) -> list[bool]:
        """Keep blocks; return for each whether it is there now."""


@dataclass(slots=True)
class Traffic:
    """Counts of one level since its start. Only grow."""

    put_blocks: int = 0
    put_bytes: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0


class SharedLevel:
    """A Level in `store`. now_ms: a clock; timeout_ms: from when on a call counts as failed.

    report receives the first failure of each time the store is out of use.
    """

    name = "shared"

    def __init__(
        self,
        store: SharedStore,
        entries: EntryFormat,
        *,
        encoding: Int8Encoding | None = None,
        now_ms: Callable[[], float],
        timeout_ms: float,
        report: Report,
    ) -> None:
        self.store = store
        self.breaker = Breaker(now_ms)
        self.traffic = Traffic()
        self.failures: Counter[StoreFailure] = Counter()
        self._entries, self._encoding = entries, encoding
        self._now_ms, self._timeout_ms, self._report = now_ms, timeout_ms, report
        self._lock = threading.Lock()

    @property
    def entry_bytes(self) -> int:
        """The size of each entry."""
        return HEAD_BYTES + self._entries.payload_bytes

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """See Level."""
        found: list[bool] | None = self._ask(lambda: self.store.exists(keys))
        return [False] * len(keys) if found is None else found

    def fetch(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> list[Fetched]:
        """See Level."""
        heads = [bytearray(HEAD_BYTES) for _ in keys]
        payloads = [self._room(out) for out in outs]
        rooms: list[Parts] = [
            (memoryview(head), payload.data) for head, payload in zip(heads, payloads, strict=True)
        ]
        sizes: list[int | None] | None = self._ask(lambda: self.store.get(keys, rooms))
        if sizes is None:
            return [Fetched.MISSING] * len(keys)
        found = []
        for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            if size is None:
                found.append(Fetched.MISSING)
            elif size != self.entry_bytes or not self._entries.is_intact(key, *rooms[at]):
                self._fail(StoreFailure.CORRUPT)
                self._ask(lambda key=key: self.store.remove(key))  # type: ignore[misc]
                found.append(Fetched.BAD)
            else:
                if self._encoding is not None:
                    self._encoding.decode(payloads[at], outs[at])
                found.append(Fetched.WHOLE)
        num_whole = found.count(Fetched.WHOLE)
        with self._lock:
            self.traffic.fetched_blocks += num_whole
            self.traffic.fetched_bytes += num_whole * self.entry_bytes
        return found

    def put(self, keys: Sequence[bytes], raws: Sequence[Bytes]) -> list[bool]:
        """See Level. A block that cannot be encoded is not stored."""
        if not self.breaker.may_allow:
            return [False] * len(keys)
        payloads = [self._payload(raw) for raw in raws]
        able = [at for at, payload in enumerate(payloads) if payload is not None]
        values = []
        for at in able:
            payload = payloads[at].data  # type: ignore[union-attr]
            values.append((memoryview(self._entries.head(keys[at], payload)), payload))
        asked = [keys[at] for at in able]
        stored: list[bool] | None = self._ask(lambda: self.store.put(asked, values))
        found = [False] * len(keys)
        for at, is_there in zip(able, stored or (), strict=False):
            found[at] = is_there
        num_stored = sum(found)
        with self._lock:
            self.traffic.put_blocks += num_stored
            self.traffic.put_bytes += num_stored * self.entry_bytes
        if stored is not None and num_stored < len(able):
            self._fail(StoreFailure.FULL, len(able) - num_stored)
        return found

    def claim(self, key: bytes, record: bytes) -> bool:
        """Return whether a claim could be made; so it is where the store fails."""
        return self._ask(lambda: self.store.claim(key, record)) is not False

    def claims(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return records of live claims; see SharedStore."""
        return self._ask(lambda: self.store.claims(keys)) or []

    def renew(self, key: bytes, record: bytes) -> None:
        """See SharedStore."""
        self._ask(lambda: self.store.renew(key, record))

    def release(self, key: bytes, record: bytes) -> None:
        """See SharedStore."""
        self._ask(lambda: self.store.release(key, record))

    def stalled(self) -> None:
        """Note that a call has not returned in time."""
        self._fail(StoreFailure.SLOW)
        self._open("a call has not returned in time")

    def _ask(self, call: Callable[[], Answer]) -> Answer | None:
        """Return what a call returned; None where the store is out of use or fails."""
        if not self.breaker.allows():
            return None
        began_ms = self._now_ms()
        try:
            answer = call()
        except StoreNotReady:
            self.breaker.undecided()
            return None
        except Exception as error:  # noqa: BLE001  of a file system or a library; costs time only
            self._fail(StoreFailure.ERROR)
            self._open(f"{type(error).__name__}: {error}")
            return None
        took_ms = self._now_ms() - began_ms
        if took_ms > self._timeout_ms:
            self._fail(StoreFailure.SLOW)
            self._open(f"a call took {took_ms:.0f} ms")
        else:
            self.breaker.succeeded()
        return answer

    def _open(self, why: str) -> None:
        if self.breaker.failed():
            self._report(
                "the shared KV store does not work; until it does, blocks are computed", error=why
            )

    def _fail(self, failure: StoreFailure, count: int = 1) -> None:
        with self._lock:
            self.failures[failure] += count

    def _room(self, out: Bytes) -> Bytes:
        return out if self._encoding is None else np.empty(self._entries.payload_bytes, np.uint8)

    def _payload(self, raw: Bytes) -> Bytes | None:
        if self._encoding is None:
            return raw
        out = np.empty(self._entries.payload_bytes, np.uint8)
        return out if self._encoding.encode(raw, out) else None
