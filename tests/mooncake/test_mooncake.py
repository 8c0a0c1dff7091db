"""Mooncake Store, with the real library and master: values, claims, a dead master, two engines.

Skipped where quire-llm[mooncake], or what its library needs of the system, is not installed
(`make mooncake`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.kv_store import BreakerState, StoreFailure
from quire.kv_store.entry import EntryFormat, keyed_seal
from quire.kv_store.level import Fetched, SharedLevel
from quire.kv_store.mooncake import MooncakeStore
from tests.mooncake.master import START_S, Master, skip_without_mooncake
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.kv_store.test_store_client import NUM_BLOCKS, Node, prompt, request_of

skip_without_mooncake()

BLOCK_BYTES = 1 << 16
KEYS = [bytes([at]) * 16 for at in range(8)]


@pytest.fixture
def master() -> Iterator[Master]:
    made = Master()
    yield made
    made.kill()


@pytest.fixture
def stores(master: Master) -> Iterator[list[MooncakeStore]]:
    made = [
        MooncakeStore(
            master.place,
            own_host="127.0.0.1",
            segment_bytes=32 << 20,
            entry_bytes=BLOCK_BYTES,
            timeout_s=5.0,
        )
        for _ in range(2)
    ]
    assert all(store.wait_until_ready(START_S) for store in made)
    yield made
    for store in made:
        store.close()


def level_of(store: MooncakeStore, key: bytes = b"a key") -> SharedLevel:
    return SharedLevel(
        store,
        EntryFormat(
            fingerprint=b"one", payload_bytes=BLOCK_BYTES, encoding=0, seal=keyed_seal(key)
        ),
        now_ms=lambda: time.monotonic() * 1e3,
        timeout_ms=20_000.0,
        report=lambda what, **_: None,
    )


def raw(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def fetched(level: SharedLevel, number: int) -> Fetched:
    out = np.zeros(BLOCK_BYTES, np.uint8)
    (found,) = level.fetch(KEYS[number : number + 1], [out])
    assert found is not Fetched.WHOLE or np.array_equal(out, raw(number))
    return found


def test_what_one_client_puts_another_gets(stores: list[MooncakeStore]) -> None:
    one, other = (level_of(store) for store in stores)
    assert one.put(KEYS[:2], [raw(0), raw(1)]) == [True, True]
    assert other.has(KEYS[:3]) == [True, True, False]
    assert [fetched(other, at) for at in range(3)] == [
        Fetched.WHOLE,
        Fetched.WHOLE,
        Fetched.MISSING,
    ]
    assert other.put(KEYS[:1], [raw(0)]) == [True]


def test_entries_of_others_are_not_accepted_and_removed(stores: list[MooncakeStore]) -> None:
    level_of(stores[0], b"another key").put(KEYS[:1], [raw(0)])
    level = level_of(stores[1])
    assert fetched(level, 0) is Fetched.BAD
    assert level.has(KEYS[:1]) == [False]
    assert level.put(KEYS[:1], [raw(0)]) == [True]
    assert fetched(level_of(stores[0]), 0) is Fetched.WHOLE


def test_a_full_store_evicts_or_refuses(stores: list[MooncakeStore]) -> None:
    level = level_of(stores[0])
    keys = [number.to_bytes(16, "big") for number in range(1400)]  # 88 MiB into 64
    stored = [level.put([key], [raw(0)])[0] for key in keys]
    assert any(stored)
    assert level.failures[StoreFailure.FULL] == stored.count(False)
    assert sum(level.has(keys)) < len(keys)
    assert level.breaker.state is BreakerState.CLOSED


def test_a_claim_is_one_clients(stores: list[MooncakeStore]) -> None:
    one, other = stores
    assert one.claim(KEYS[0], b"one")
    assert not other.claim(KEYS[0], b"other")
    assert other.claims(KEYS) == [b"one"]
    one.renew(KEYS[0], b"one")
    assert b"one" in other.claims(KEYS)
    one.release(KEYS[0], b"one")
    assert other.claims(KEYS) == []
    assert other.claim(KEYS[0], b"other")


def test_a_dead_master_is_a_miss_without_a_wait(
    master: Master, stores: list[MooncakeStore]
) -> None:
    level = level_of(stores[0])
    level.put(KEYS[:1], [raw(0)])
    master.kill()
    time.sleep(1.1)  # its last answer was a while ago
    began_s = time.monotonic()
    assert level.has(KEYS[:1]) == [False]
    assert fetched(level, 0) is Fetched.MISSING
    assert time.monotonic() - began_s < 4.0  # the library alone would block for longer
    assert level.breaker.state is BreakerState.OPEN
    master.start()
    deadline_s = time.monotonic() + START_S
    while level.put(KEYS[1:2], [raw(1)]) != [True]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert fetched(level, 1) is Fetched.WHOLE


def test_an_engine_that_starts_before_its_store_goes_on_and_uses_it_later(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the library is set up the store is empty, which does not open the breaker."""
    goes_on = threading.Event()
    set_up = MooncakeStore._set_up

    def held(store: MooncakeStore) -> Any:
        goes_on.wait(START_S)
        return set_up(store)

    monkeypatch.setattr(MooncakeStore, "_set_up", held)
    store = MooncakeStore(
        master.place,
        own_host="127.0.0.1",
        segment_bytes=16 << 20,
        entry_bytes=BLOCK_BYTES,
        timeout_s=0.2,
    )
    level = level_of(store)
    assert level.has(KEYS[:1]) == [False]
    assert level.put(KEYS[:1], [raw(0)]) == [False]
    assert level.claim(KEYS[0], b"mine")
    assert level.breaker.state is BreakerState.CLOSED
    assert not any(level.failures.values())
    goes_on.set()
    assert store.wait_until_ready(START_S)
    assert level.put(KEYS[:1], [raw(0)]) == [True]
    assert fetched(level, 0) is Fetched.WHOLE
    store.close()


def test_two_masters_are_two_stores(master: Master) -> None:
    second = Master()
    made = [
        MooncakeStore(
            one.place,
            own_host="127.0.0.1",
            segment_bytes=16 << 20,
            entry_bytes=BLOCK_BYTES,
            timeout_s=5.0,
        )
        for one in (master, second)
    ]
    assert all(store.wait_until_ready(START_S) for store in made)
    one, other = map(level_of, made)
    one.put(KEYS[:1], [raw(0)])
    assert fetched(other, 0) is Fetched.MISSING
    for store in made:
        store.close()
    second.kill()


def test_engines_share_blocks_and_go_on_without_a_master(master: Master, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", seed=3, max_position_embeddings=512)
    (tmp_path / "key").write_text("a key that engines share")
    (tmp_path / "key").chmod(0o600)
    settings = {
        "kv_store_key_file": str(tmp_path / "key"),
        "kv_store_size": "32MiB",
    }
    store: Any = f"mooncakestore://127.0.0.1:{master.port}"
    one, other = Node(model, store, **settings), Node(model, store, **settings)
    try:
        shared: list[Any] = [node.client._shared.store for node in (one, other)]
        assert all(store.wait_until_ready(START_S) for store in shared)
        wanted = one.answer(request_of("a"))
        one.settle()
        assert one.stats.put_blocks_total == NUM_BLOCKS
        assert other.answer(request_of("b")) == wanted
        assert other.stats.fetched_blocks_total == NUM_BLOCKS
        second = other.answer(request_of("c", prompt(1)))
        other.settle()
        master.kill()
        assert one.answer(request_of("d", prompt(1))) == second
        assert one.answer(request_of("e", prompt(2)))
        assert one.stats.fetched_blocks_total == 0
    finally:
        one.close()
        other.close()
