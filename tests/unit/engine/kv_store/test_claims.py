"""Claims: renewed while a request has them, by a thread, and by no more than that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from quire.engine.kv_store import claims as claims_module
from quire.engine.kv_store.claims import MAX_STEP_MS, Claims
from quire.engine.kv_store.job_threads import Workers
from quire.kv_store.level import SharedLevel

GIVE_UP_S = 30.0
CLAIM = (b"k" * 16, b"a record")


class Store:
    """Notes what is renewed and released."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes, bytes]] = []
        self.now_ms = 0.0

    def renew(self, key: bytes, record: bytes) -> None:
        self.calls.append(("renew", key, record))

    def release(self, key: bytes, record: bytes) -> None:
        self.calls.append(("release", key, record))

    def num_renewed(self) -> int:
        return sum(what == "renew" for what, *_ in self.calls)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def claims(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Claims]:
    monkeypatch.setattr(claims_module, "RENEW_S", 0.005)
    workers = Workers(1, "calls", lambda what, **fields: None)
    made = Claims(cast("SharedLevel", store), workers, lambda: store.now_ms)
    yield made
    made.close()
    assert workers.close()


def test_a_claim_is_renewed_while_the_engine_is_in_a_step(claims: Claims, store: Store) -> None:
    claims.add("a", *CLAIM)
    until(lambda: store.num_renewed() >= 3)  # the engine's thread calls nothing
    store.now_ms = MAX_STEP_MS + 1.0  # and hangs
    before = store.num_renewed()
    claims.add("b", b"l" * 16, b"of another request")  # it does not
    until(lambda: store.num_renewed() >= before + 3)
    assert claims.num_made == 2


def test_the_claims_of_an_engine_that_hangs_are_not_renewed(claims: Claims, store: Store) -> None:
    claims.add("a", *CLAIM)
    until(lambda: store.num_renewed() >= 1)
    store.now_ms = MAX_STEP_MS + 1.0
    # What was decided before may still be called; then nothing is.
    until(lambda: _is_still(store))
    claims.note_alive(store.now_ms)
    before = store.num_renewed()
    until(lambda: store.num_renewed() > before)


def _is_still(store: Store) -> bool:
    before = store.num_renewed()
    time.sleep(0.1)
    return store.num_renewed() == before


def test_an_ended_claim_is_released_once_and_never_renewed_after_that(
    claims: Claims, store: Store
) -> None:
    claims.add("a", *CLAIM)
    until(lambda: store.num_renewed() >= 1)
    claims.end("a")
    claims.end("a")
    until(lambda: ("release", *CLAIM) in store.calls)
    until(lambda: claims._thread is None)  # the thread ends with the last claim
    assert store.calls[-1] == ("release", *CLAIM)
    assert store.calls.count(("release", *CLAIM)) == 1
    claims.add("b", *CLAIM)  # and another one begins
    before = store.num_renewed()
    until(lambda: store.num_renewed() > before)


def test_a_request_has_one_claim(claims: Claims, store: Store) -> None:
    claims.add("a", *CLAIM)
    claims.add("a", b"l" * 16, b"of a second lookup")
    until(lambda: ("release", b"l" * 16, b"of a second lookup") in store.calls)
    assert (len(claims), claims.num_made) == (1, 1)
