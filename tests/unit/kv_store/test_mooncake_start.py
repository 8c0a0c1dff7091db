"""The start of MooncakeStore, with a library of our own: set up beside the calls, tried again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.kv_store import StorePlace
from quire.kv_store import mooncake
from quire.kv_store.mooncake import MooncakeStore
from quire.kv_store.shared_store import StoreNotReady

GIVE_UP_S = 30.0
KEYS = [b"k" * 16]


class FakeClient:
    """The client of a store that has nothing. goes_on: when `setup` may return."""

    goes_on = threading.Event()
    num_closed = 0

    def setup(self, *terms: Any) -> int:
        assert self.goes_on.wait(GIVE_UP_S)
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [0] * len(names)

    def close(self) -> None:
        FakeClient.num_closed += 1


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return the socket of a master."""
    library = SimpleNamespace(MooncakeDistributedStore=FakeClient)
    monkeypatch.setattr(mooncake, "_library", lambda: library)
    FakeClient.goes_on, FakeClient.num_closed = threading.Event(), 0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def store_at(port: int, *, timeout_s: float = 0.2) -> MooncakeStore:
    return MooncakeStore(
        StorePlace(host="127.0.0.1", port=port),
        own_host="127.0.0.1",
        segment_bytes=1,
        entry_bytes=1,
        timeout_s=timeout_s,
    )


def test_a_store_is_empty_and_not_at_fault_until_it_is_set_up(master: socket.socket) -> None:
    store = store_at(master.getsockname()[1])
    for _ in range(2):
        with pytest.raises(StoreNotReady):
            store.exists(KEYS)
    FakeClient.goes_on.set()
    assert store.wait_until_ready(GIVE_UP_S)
    assert store.exists(KEYS) == [False]
    store.close()
    assert FakeClient.num_closed == 1


def test_a_master_that_comes_later_is_used(
    master: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "START_WAIT_S", GIVE_UP_S)
    port = master.getsockname()[1]
    master.close()
    FakeClient.goes_on.set()
    store = store_at(port, timeout_s=4 * GIVE_UP_S)
    with pytest.raises(ConnectionRefusedError):
        store.exists(KEYS)
    with socket.create_server(("127.0.0.1", port)):
        assert store.exists(KEYS) == [False]
    store.close()


def test_a_client_that_is_set_up_after_the_close_is_closed(
    master: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "CLOSE_S", 0.01)
    store = store_at(master.getsockname()[1])
    store.close()
    FakeClient.goes_on.set()
    with store._changed:
        assert store._changed.wait_for(lambda: not store._is_starting, GIVE_UP_S)
    assert FakeClient.num_closed == 1
    with pytest.raises(OSError, match="closed"):
        store.exists(KEYS)
