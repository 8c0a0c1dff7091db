"""MooncakeStore: a SharedStore in Mooncake Store, with a master that knows where values are.

The only file that imports mooncake. The client library runs in this process: it gives a part of the
store's memory, and moves values over TCP between the memories of all clients; no etcd is needed. A
library call with a dead master blocks for seconds, so the master's port is tried before, at most
once a second. A claim is a value too: its name has the time it was made in, rounded, because values
cannot be overwritten. Knows no blocks. Always holds: the library is set up in a thread of its own,
since that may take seconds; until it is, a call waits for a moment and finds nothing.
"""

from __future__ import annotations

import errno
import importlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from quire.base.errors import SettingError
from quire.config.kv_store import StorePlace
from quire.kv_store.shared_store import CLAIM_LEASE_S, Parts, StoreNotReady

PROTOCOL = "tcp"
# Clients exchange their addresses themselves; there is no metadata server.
METADATA = "P2PHANDSHAKE"
# The master's port is tried again where its last answer is older than this.
ASK_AGAIN_S = 1.0
CONNECT_S = 0.25
# A call waits so long for the library to be set up, and `close` for an attempt to end.
START_WAIT_S, CLOSE_S = 1.0, 5.0
# Copies of values on their way, of all threads.
MIN_BUFFER_BYTES, BUFFERED_ENTRIES = 64 << 20, 32
_SEGMENT_UNIT = 16 << 20


def check_installed() -> None:
    """Raise SettingError where the client library cannot be loaded."""
    _library()


class MooncakeStore:
    """A SharedStore (see there) at the master of `place`.

    own_host: address at which other clients reach this one's memory of segment_bytes.
    """

    def __init__(
        self,
        place: StorePlace,
        *,
        own_host: str,
        segment_bytes: int,
        entry_bytes: int,
        timeout_s: float,
    ) -> None:
        self._place, self._own_host = place, own_host
        self._segment_bytes = -(-segment_bytes // _SEGMENT_UNIT) * _SEGMENT_UNIT
        self._buffer_bytes = max(MIN_BUFFER_BYTES, BUFFERED_ENTRIES * entry_bytes)
        self._connect_s = min(CONNECT_S, timeout_s)
        self._start_s = min(START_WAIT_S, timeout_s / 4)
        self._changed = threading.Condition()
        self._client: Any = None
        self._fault: OSError | None = None  # of the last attempt to set it up
        self._is_starting = self._is_closed = False
        self._answered_s = -ASK_AGAIN_S
        with self._changed:
            self._begin()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See SharedStore."""
        return self._exist([_entry(key) for key in keys])

    def get(self, keys: Sequence[bytes], rooms: Sequence[Parts]) -> list[int | None]:
        """See SharedStore."""
        client = self._ready()
        return [_fill(room, client.get(_entry(key))) for key, room in zip(keys, rooms, strict=True)]

    def put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        """See SharedStore."""
        client, names = self._ready(), [_entry(key) for key in keys]
        found = self._exist(names)
        for at, value in enumerate(values):
            if not found[at]:
                found[at] = client.put(names[at], b"".join(value)) == 0
        return found

    def remove(self, key: bytes) -> None:
        """See SharedStore; also of a value that was read a moment ago, which the library keeps."""
        self._ready().remove(_entry(key), True)

    def claim(self, key: bytes, record: bytes) -> bool:
        """See SharedStore."""
        if self.claims([key]):
            return False
        client, name = self._ready(), _claim(key, _now())
        client.put(name, record)  # does nothing where another was first
        return bool(client.get(name) == record)

    def claims(self, keys: Sequence[bytes]) -> list[bytes]:
        """See SharedStore: of these keys."""
        client, now = self._ready(), _now()
        names = [_claim(key, moment) for moment in (now, now - 1) for key in keys]
        found = self._exist(names)
        records = [
            client.get(name) for name, is_there in zip(names, found, strict=True) if is_there
        ]
        return [bytes(record) for record in records if record]

    def renew(self, key: bytes, record: bytes) -> None:
        """See SharedStore."""
        client, name = self._ready(), _claim(key, _now())
        if not self._exist([name])[0]:
            client.put(name, record)

    def release(self, key: bytes, record: bytes) -> None:
        """See SharedStore."""
        client, now = self._ready(), _now()
        for name in (_claim(key, now), _claim(key, now - 1)):
            if client.get(name) == record:
                client.remove(name, True)

    def wait_until_ready(self, within_s: float) -> bool:
        """Return whether the library is set up, at the latest after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._client is not None, within_s)

    def close(self) -> None:
        """Leave the store, with what this client's memory holds."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._is_starting, CLOSE_S)
            if self._client is not None:
                self._client.close()
                self._client = None

    def _exist(self, names: list[str]) -> list[bool]:
        found = self._ready().batch_is_exist(names) if names else []
        if any(one < 0 for one in found):
            raise OSError(errno.EIO, f"Mooncake error {min(found)}")
        self._answered_s = time.monotonic()
        return [one == 1 for one in found]

    def _ready(self) -> Any:
        """Return the client, set up.

        Raises OSError where the master does not answer, and StoreNotReady while it is set up.
        """
        with self._changed:
            if self._client is None:
                if not self._is_starting:
                    self._fault = None  # the master may have come since
                self._begin()
                self._changed.wait_for(lambda: not self._is_starting, self._start_s)
                if self._is_starting:
                    raise StoreNotReady("Mooncake is being set up")
                if self._fault is not None:
                    raise self._fault
                if self._client is None:
                    raise OSError(errno.ENOTCONN, "the store is closed")
            elif time.monotonic() - self._answered_s >= ASK_AGAIN_S:
                self._reach()
            return self._client

    def _begin(self) -> None:
        """Set the library up in a thread of its own, unless that goes on."""
        if not (self._is_starting or self._is_closed):
            self._is_starting = True
            threading.Thread(target=self._start, name="quire-mooncake", daemon=True).start()

    def _start(self) -> None:
        client, fault = None, None
        try:
            self._reach()
            client = self._set_up()
        except Exception as error:  # noqa: BLE001  of a library; raised in the next call
            fault = error if isinstance(error, OSError) else OSError(errno.EIO, repr(error))
        with self._changed:
            self._is_starting = False
            if self._is_closed and client is not None:
                client.close()
            else:
                self._client, self._fault = client, fault
            self._changed.notify_all()

    def _reach(self) -> None:
        """Find out whether the master's port answers. Raises OSError."""
        address = (self._place.host.strip("[]"), self._place.port)
        socket.create_connection(address, self._connect_s).close()
        self._answered_s = time.monotonic()

    def _set_up(self) -> Any:
        client = _library().MooncakeDistributedStore()
        status = client.setup(
            self._own_host,
            METADATA,
            self._segment_bytes,
            self._buffer_bytes,
            PROTOCOL,
            "",
            f"{self._place.host}:{self._place.port}",
        )
        if status != 0:
            raise OSError(errno.EIO, f"Mooncake cannot be set up: error {status}")
        return client


def _library() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise SettingError(
            "kv_store is a Mooncake master and mooncake is not installed; install it: "
            "pip install 'quire-llm[mooncake]'"
        ) from error
    except (ImportError, OSError) as error:
        raise SettingError(
            f"kv_store is a Mooncake master and its library cannot be loaded ({error}); install "
            "what it needs from the system: libibverbs1, libnl-3-200 and libnl-route-3-200, or "
            "what your distribution calls them"
        ) from error


def _entry(key: bytes) -> str:
    return f"quire/block/{key.hex()}"


def _claim(key: bytes, moment: int) -> str:
    return f"quire/claim/{key.hex()}/{moment}"


def _now() -> int:
    """Return the time in lives of a claim; clients with clocks far apart compute more than once."""
    return int(time.time() / CLAIM_LEASE_S)


def _fill(room: Parts, value: bytes) -> int | None:
    """Fill a room with a value of its size; return the size, None for no value."""
    if not value:
        return None
    if len(value) == sum(map(len, room)):
        first = 0
        view = memoryview(value)
        for part in room:
            part[:] = view[first : first + len(part)]
            first += len(part)
    return len(value)
