"""Jobs: what lookups find and claim while others write, and slices that hang."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from quire.engine.kv_store.jobs import Lookup, StoreFetch
from quire.kv_store.level import Fetched

GIVE_UP_S = 60.0


@pytest.mark.parametrize("num_put", [0, 1, 3])
def test_what_is_put_just_before_a_claim_ends_is_not_computed_again(num_put: int) -> None:
    """Another engine puts its last blocks and ends its claim between two calls of a lookup."""
    keys = tuple(bytes([at]) * 16 for at in range(5))
    stored = {*keys[:2]}
    released: list[tuple[bytes, bytes]] = []

    def claims(known: Sequence[bytes]) -> list[bytes]:
        stored.update(keys[2 : 2 + num_put])
        return []

    shared = SimpleNamespace(
        breaker=SimpleNamespace(may_allow=True),
        has=lambda asked: [key in stored for key in asked],
        claims=claims,
        claim=lambda key, record: True,
        release=lambda key, record: released.append((key, record)),
    )
    lookup = Lookup(
        request_id="a", keys=keys, before=(), owner=bytes(16), may_claim=True, began_ms=0.0
    )
    lookup.run([cast("Any", shared)], cast("Any", shared))
    assert len(lookup.levels) == 2 + num_put
    if num_put == 3:
        assert lookup.claimed is None
        assert released == [(keys[2], lookup.record)]
    else:
        assert (lookup.claimed, released) == (keys[2], [])
        assert lookup.record == bytes(16) + b"".join(keys[2:])


def test_a_slice_that_hangs_is_found_and_one_that_waits_for_a_thread_is_not() -> None:
    job = StoreFetch([bytes(16)] * 6, list(range(6)), [0] * 6, began_ms=0.0)
    assert job.slices() == [(0, 4), (4, 6)]
    assert not job.hangs(1e9)  # it is queued behind others
    released, reading = threading.Event(), threading.Event()

    class Hung:
        def fetch(self, keys: Sequence[bytes], outs: Sequence[Any]) -> list[Fetched]:
            reading.set()
            released.wait(GIVE_UP_S)
            return [Fetched.WHOLE] * len(keys)

    room = np.zeros(1, np.uint8)
    thread = threading.Thread(
        target=job.read,
        args=(0, 4, [Hung()], lambda place: room, 100.0),
    )
    thread.start()
    assert reading.wait(GIVE_UP_S)
    assert not job.hangs(100.0)
    assert job.hangs(101.0)
    released.set()
    thread.join()
    assert not job.end_slice(0, 4, 102.0)
    assert not job.hangs(1e9)
    assert job.end_slice(4, 6, 103.0)


def test_each_level_is_timed_by_its_own_slices() -> None:
    """A near level and a far one, which a job reads one after the other; one block is not there."""
    job = StoreFetch([bytes(16)] * 6, list(range(6)), [0, 0, 1, 1, 1, 1], began_ms=0.0)
    room = np.zeros(1, np.uint8)

    class Near:
        def fetch(self, keys: Sequence[bytes], outs: Sequence[Any]) -> list[Fetched]:
            return [Fetched.WHOLE] * len(keys)

    class Far:
        def fetch(self, keys: Sequence[bytes], outs: Sequence[Any]) -> list[Fetched]:
            return [Fetched.WHOLE, Fetched.WHOLE, Fetched.WHOLE, Fetched.MISSING]

    levels: Any = [Near(), Far()]
    for (first, end), (began_ms, ended_ms) in zip(
        job.slices(), [(10.0, 12.0), (12.0, 72.0)], strict=True
    ):
        job.read(first, end, levels, lambda place: room, began_ms)
        job.end_slice(first, end, ended_ms)
    assert [*job.took()] == [(0, 2, 2.0), (1, 3, 60.0)]


def test_a_level_that_brings_nothing_is_not_timed() -> None:
    job = StoreFetch([bytes(16)] * 2, [0, 1], [0, 0], began_ms=0.0)
    job.is_cancelled = True
    job.read(0, 2, [], lambda place: np.zeros(1, np.uint8), 5.0)
    assert job.end_slice(0, 2, 9.0)
    assert not [*job.took()]
