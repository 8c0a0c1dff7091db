"""Blocks in a shared store: whole or not given out, whatever the store does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from quire.base.kv_store import BreakerState, StoreFailure
from quire.kv_store.breaker import FIRST_PAUSE_MS, MAX_PAUSE_MS, Breaker
from quire.kv_store.entry import HEAD_BYTES, EntryFormat, Seal, checksum, keyed_seal
from quire.kv_store.int8 import Int8Encoding
from quire.kv_store.level import Bytes, Fetched, SharedLevel
from quire.kv_store.shared_store import Parts, StoreNotReady
from tests.cases import each_case

BLOCK_BYTES = 512
WIDTH = 16
KEYS = [bytes([at]) * 16 for at in range(8)]


class MemoryStore:
    """A SharedStore in a dictionary, which can be made to fail. before: called in each call."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.before: Callable[[], None] = lambda: None
        self.num_calls = 0

    def _called(self) -> None:
        self.num_calls += 1
        self.before()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._called()
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[bytes], rooms: Sequence[Parts]) -> list[int | None]:
        self._called()
        sizes: list[int | None] = []
        for key, room in zip(keys, rooms, strict=True):
            value = self.values.get(key)
            sizes.append(None if value is None else len(value))
            if value is not None and len(value) == sum(map(len, room)):
                room[0][:] = value[: len(room[0])]
                room[1][:] = value[len(room[0]) :]
        return sizes

    def put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        self._called()
        self.values |= {key: b"".join(value) for key, value in zip(keys, values, strict=True)}
        return [True] * len(keys)

    def remove(self, key: bytes) -> None:
        self._called()
        self.values.pop(key, None)

    def claim(self, key: bytes, record: bytes) -> bool:
        self._called()
        return True

    def claims(self, keys: Sequence[bytes]) -> list[bytes]:
        self._called()
        return []

    def renew(self, key: bytes, record: bytes) -> None:
        self._called()

    def release(self, key: bytes, record: bytes) -> None:
        self._called()

    def close(self) -> None: ...


class Clock:
    """Time that is set."""

    ms = 0.0

    def now_ms(self) -> float:
        return self.ms


def level_of(
    store: MemoryStore,
    clock: Clock,
    reports: list[str] | None = None,
    *,
    fingerprint: bytes = b"one",
    seal: Seal = checksum,
    encoding: Int8Encoding | None = None,
) -> SharedLevel:
    return SharedLevel(
        store,
        EntryFormat(
            fingerprint=fingerprint,
            payload_bytes=BLOCK_BYTES if encoding is None else encoding.payload_bytes,
            encoding=0 if encoding is None else encoding.number,
            seal=seal,
        ),
        encoding=encoding,
        now_ms=clock.now_ms,
        timeout_ms=100.0,
        report=lambda what, **_: None if reports is None else reports.append(what),
    )


def raw(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def fetched(level: SharedLevel, number: int) -> Fetched:
    out = np.zeros(BLOCK_BYTES, np.uint8)
    (found,) = level.fetch([KEYS[number]], [out])
    if found is Fetched.WHOLE:
        assert np.array_equal(out, raw(number)), "other bytes than were put"
    return found


def test_a_block_comes_back_as_it_was_put() -> None:
    level = level_of(MemoryStore(), Clock())
    assert level.put(KEYS[:2], [raw(0), raw(1)]) == [True, True]
    assert level.has(KEYS[:3]) == [True, True, False]
    assert [fetched(level, at) for at in (1, 0, 2)] == [
        Fetched.WHOLE,
        Fetched.WHOLE,
        Fetched.MISSING,
    ]
    assert level.traffic.put_bytes == level.traffic.fetched_bytes == 2 * level.entry_bytes


@each_case("seal", [checksum, keyed_seal(b"a key")])
@each_case("at", [0, 9, 20, 40, HEAD_BYTES - 1, HEAD_BYTES, -1])
def test_one_changed_bit_is_found_counted_and_removed(seal: Seal, at: int) -> None:
    store = MemoryStore()
    level = level_of(store, Clock(), seal=seal)
    level.put(KEYS[:1], [raw(0)])
    changed = bytearray(store.values[KEYS[0]])
    changed[at] ^= 4
    store.values[KEYS[0]] = bytes(changed)
    assert fetched(level, 0) is Fetched.BAD
    assert level.failures[StoreFailure.CORRUPT] == 1
    assert level.traffic.fetched_blocks == 0
    assert KEYS[0] not in store.values
    assert level.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: values.update({KEYS[0]: values[KEYS[0]][:-1]}),
        lambda values: values.update({KEYS[0]: b""}),
        lambda values: values.update({KEYS[0]: values[KEYS[0]] + b"x"}),
        lambda values: values.update({KEYS[0]: values[KEYS[1]]}),  # stale, or of another key
        lambda values: values.update({KEYS[0]: bytes(len(values[KEYS[0]]))}),
    ],
)
def test_short_stale_and_empty_values_are_not_given_out(spoil: Callable[[Any], None]) -> None:
    store = MemoryStore()
    level = level_of(store, Clock())
    level.put(KEYS[:2], [raw(0), raw(1)])
    spoil(store.values)
    assert fetched(level, 0) is Fetched.BAD
    assert fetched(level, 1) is Fetched.WHOLE


def test_blocks_of_another_model_are_not_given_out() -> None:
    store = MemoryStore()
    level_of(store, Clock(), fingerprint=b"other").put(KEYS[:1], [raw(0)])
    assert fetched(level_of(store, Clock()), 0) is Fetched.BAD


def test_without_the_key_no_block_is_accepted() -> None:
    store = MemoryStore()
    level_of(store, Clock(), seal=checksum).put(KEYS[:1], [raw(0)])
    level_of(store, Clock(), seal=keyed_seal(b"another")).put(KEYS[1:2], [raw(1)])
    level = level_of(store, Clock(), seal=keyed_seal(b"one"))
    assert [fetched(level, 0), fetched(level, 1)] == [Fetched.BAD, Fetched.BAD]


def fail() -> None:
    raise ConnectionRefusedError("nothing listens")


def test_a_failing_store_is_a_miss_and_left_alone_for_a_while() -> None:
    store, clock, reports = MemoryStore(), Clock(), list[str]()
    level = level_of(store, clock, reports)
    level.put(KEYS[:1], [raw(0)])
    store.before, store.num_calls = fail, 0
    assert level.has(KEYS[:2]) == [False, False]
    assert fetched(level, 0) is Fetched.MISSING
    assert level.put(KEYS[:1], [raw(0)]) == [False]
    assert level.claim(KEYS[0], b"mine")  # so that it is computed
    assert level.claims(KEYS) == []
    assert store.num_calls == 1
    assert len(reports) == 1
    assert level.breaker.state is BreakerState.OPEN
    clock.ms += FIRST_PAUSE_MS
    store.before = lambda: None
    assert fetched(level, 0) is Fetched.WHOLE
    assert level.breaker.state is BreakerState.CLOSED


def test_a_slow_call_counts_and_opens_the_breaker() -> None:
    store, clock = MemoryStore(), Clock()
    level = level_of(store, clock)
    level.put(KEYS[:1], [raw(0)])

    def slow() -> None:
        clock.ms += 101.0

    store.before = slow
    assert fetched(level, 0) is Fetched.WHOLE  # the answer is right all the same
    assert level.failures[StoreFailure.SLOW] == 1
    assert level.breaker.state is BreakerState.OPEN


def test_a_breaker_lets_one_call_try_and_waits_longer_each_time() -> None:
    clock = Clock()
    breaker = Breaker(clock.now_ms)
    assert breaker.failed()
    pauses = []
    for _ in range(9):
        began_ms = clock.ms
        while not breaker.allows():
            assert breaker.state is BreakerState.OPEN
            clock.ms += FIRST_PAUSE_MS
        pauses.append(clock.ms - began_ms)
        assert breaker.state is BreakerState.HALF_OPEN
        assert not breaker.allows()  # one call at a time
        assert not breaker.failed()
    assert pauses == [min(FIRST_PAUSE_MS * 2**at, MAX_PAUSE_MS) for at in range(9)]
    breaker.failed()  # of a call that began before
    clock.ms += MAX_PAUSE_MS
    assert breaker.allows()
    clock.ms += MAX_PAUSE_MS  # that trial never came back
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()


def bf16(values: np.ndarray[Any, np.dtype[np.float32]]) -> Bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def floats(block: Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def test_int8_keeps_each_value_to_within_half_a_step_of_its_vector() -> None:
    random = np.random.default_rng(5)
    scales = 10.0 ** random.integers(-6, 7, BLOCK_BYTES // 2 // WIDTH)
    values = random.standard_normal((len(scales), WIDTH)) * scales[:, None]
    values[3] = 0.0
    block = bf16(values.astype(np.float32)).reshape(-1)
    encoding = Int8Encoding(BLOCK_BYTES, WIDTH)
    payload, back = np.empty(encoding.payload_bytes, np.uint8), np.empty(BLOCK_BYTES, np.uint8)
    assert encoding.encode(block, payload)
    encoding.decode(payload, back)
    before, after = floats(block).reshape(-1, WIDTH), floats(back).reshape(-1, WIDTH)
    largest = np.abs(before).max(axis=1, keepdims=True)
    assert (np.abs(after - before) <= largest * (0.5 / 127 + 2.0**-8)).all()
    assert encoding.payload_bytes < 0.65 * BLOCK_BYTES
    again = np.empty_like(payload)
    assert encoding.encode(block, again)
    assert np.array_equal(again, payload)  # the same block is the same bytes


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_does_not_store_what_it_cannot_stand_for(bad: float) -> None:
    values = np.ones(BLOCK_BYTES // 2, np.float32)
    values[7] = bad
    store = MemoryStore()
    level = level_of(store, Clock(), encoding=Int8Encoding(BLOCK_BYTES, WIDTH))
    assert level.put(KEYS[:2], [bf16(values), bf16(np.ones_like(values))]) == [False, True]
    assert list(store.values) == [KEYS[1]]
    out = np.empty(BLOCK_BYTES, np.uint8)
    assert level.fetch(KEYS[1:2], [out]) == [Fetched.WHOLE]
    assert (floats(out) == 1.0).all()


def test_int8_needs_whole_vectors() -> None:
    with pytest.raises(ValueError, match="no vectors"):
        Int8Encoding(100, 16)


def not_ready() -> None:
    raise StoreNotReady("it is being set up")


def test_a_store_that_is_being_set_up_is_empty_and_not_out_of_use() -> None:
    store, clock, reports = MemoryStore(), Clock(), list[str]()
    level = level_of(store, clock, reports)
    store.before = not_ready
    assert level.has(KEYS[:2]) == [False, False]
    assert fetched(level, 0) is Fetched.MISSING
    assert level.put(KEYS[:1], [raw(0)]) == [False]
    assert level.breaker.state is BreakerState.CLOSED
    assert not reports
    assert not any(level.failures.values())
    store.before = lambda: None
    assert level.put(KEYS[:1], [raw(0)]) == [True]


def test_a_trial_that_finds_a_store_being_set_up_is_made_again() -> None:
    store, clock = MemoryStore(), Clock()
    level = level_of(store, clock)
    store.before = fail
    level.has(KEYS[:1])
    clock.ms += FIRST_PAUSE_MS
    store.before = not_ready
    assert level.has(KEYS[:1]) == [False]
    assert level.breaker.state is BreakerState.OPEN
    clock.ms += FIRST_PAUSE_MS
    store.before = lambda: None
    level.has(KEYS[:1])
    assert level.breaker.state is BreakerState.CLOSED
