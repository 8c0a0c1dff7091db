"""TierMover: every copy ends once, in an order that cannot mix blocks up, whatever fails."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.block_copies import CopiesEnded, Tier, between, joined
from quire.base.errors import DeviceLost, WorkerError
from quire.base.records import StepPlan
from quire.base.report import Field
from quire.runner.model_runner import ModelRunner
from quire.runner.tier_mover import TierMover
from tests.unit.runner.scripted_executor import ScriptedExecutor

SIZE = 8


class Pool(ScriptedExecutor):
    """Sixteen blocks of eight bytes."""

    block_bytes = SIZE

    def __init__(self) -> None:
        super().__init__()
        self.blocks = np.arange(16 * SIZE, dtype=np.uint8).reshape(16, SIZE)

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        out[:] = self.blocks[block]

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        self.blocks[block] = raw


class Store:
    """A tier in a dict, which can be made to wait and to fail."""

    tier, num_blocks, block_bytes = Tier.DISK, 16, SIZE

    def __init__(self) -> None:
        self.kept: dict[int, tuple[bytes, bytes]] = {}
        self.fails: OSError | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_closed = False
        self.asked: list[str] = []

    def room(self, place: int) -> None:
        pass

    def held(self) -> Sequence[tuple[bytes, int]]:
        return ()

    def save(self, place: int, digest: bytes, raw: NDArray[np.uint8]) -> None:
        self._ask(f"save {place}")
        self.kept[place] = (digest, raw.tobytes())

    def fetch(self, place: int, digest: bytes, out: NDArray[np.uint8]) -> bool:
        self._ask(f"fetch {place}")
        known, raw = self.kept.get(place, (b"", b""))
        if known == digest:
            out[:] = np.frombuffer(raw, np.uint8)
        return known == digest

    def expect(self, places: Sequence[int]) -> None:
        pass

    def clear(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        self.is_closed = True

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        assert self.may_go_on.wait(60)
        if self.fails is not None:
            raise self.fails


class HostMemory(Store):
    """A tier with places in memory."""

    tier = Tier.HOST

    def __init__(self) -> None:
        super().__init__()
        self.rooms = np.zeros((16, SIZE), np.uint8)

    def room(self, place: int) -> NDArray[np.uint8]:
        return self.rooms[place]


class LatePool(Pool):
    """An asynchronous device's pool, which exports blocks on a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[Callable[[], None]] = []
        self.imports: list[list[int]] = []
        self.fails: Exception | None = None

    def sample_later(self, logits: object, batch: object, slots: object) -> Callable[[], None]:
        raise NotImplementedError

    def begin_moving(self, num_blocks: int) -> None:
        self.rows = num_blocks

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.zeros(num_bytes, np.uint8)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        raise NotImplementedError

    def mark(self) -> Callable[[], None]:
        return self._do

    def export_blocks(
        self, blocks: NDArray[np.int32], outs: Sequence[NDArray[np.uint8]]
    ) -> Callable[[], None]:
        if self.fails is not None:
            raise self.fails

        def copy() -> None:
            for block, out in zip(blocks.tolist(), outs, strict=True):
                out[:] = self.blocks[block]

        self.submitted.append(copy)
        return self._do

    def import_blocks(self, blocks: NDArray[np.int32], raws: Sequence[NDArray[np.uint8]]) -> None:
        self.imports.append(blocks.tolist())
        for block, raw in zip(blocks.tolist(), raws, strict=True):
            self.blocks[block] = raw

    def overwrite(self, block: int) -> None:
        """Overwrite blocks, as a later step does."""
        self.submitted.append(lambda: self.blocks[block].fill(99))

    def _do(self) -> None:
        while self.submitted:
            self.submitted.pop(0)()


class Rig:
    """A mover, its reports, and a wait until it is idle."""

    def __init__(self, pool: Pool | None = None, store: Store | None = None) -> None:
        self.pool, self.store = pool or Pool(), store or Store()
        self.reports: list[str] = []
        self.woken = threading.Event()
        self.mover = TierMover(
            self.pool, self.store, now_ms=lambda: 1.0, report=self._report, wake=self.woken.set
        )

    def _report(self, what: str, **_: Field) -> None:
        self.reports.append(what)

    def save(self, *pairs: tuple[int, int]) -> None:
        blocks, places = (np.array(one, np.int32) for one in zip(*pairs, strict=True))
        self.mover.begin(between(Tier.POOL, blocks, self.store.tier, places, _keys(places)))

    def fetch(self, *pairs: tuple[int, int]) -> None:
        places, blocks = (np.array(one, np.int32) for one in zip(*pairs, strict=True))
        self.mover.begin(between(self.store.tier, places, Tier.POOL, blocks, _keys(places)))

    def ended(self, count: int) -> list[CopiesEnded]:
        """Return ended copies, once there are so many."""
        found: list[CopiesEnded] = []
        while sum(len(one.to_blocks) for one in found) < count:
            assert self.woken.wait(60)
            self.woken.clear()
            if (copies := self.mover.ended()) is not None:
                found.append(copies)
        return found


def _keys(places: NDArray[np.int32]) -> list[bytes]:
    return [int(place).to_bytes(16, "little") for place in places]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_saved_block_comes_back_as_it_was_at_submission(rig: Rig) -> None:
    before = rig.pool.blocks[3].copy()
    rig.store.may_go_on.clear()
    rig.save((3, 5))
    rig.pool.blocks[3] = 99  # the plan writes into it at once
    rig.store.may_go_on.set()
    rig.ended(1)
    rig.fetch((5, 8))
    (copies,) = rig.ended(1)
    assert copies.arrived.tolist() == [True]
    assert copies.to_blocks.tolist() == [8]
    assert copies.fetched == 1
    assert np.array_equal(rig.pool.blocks[8], before)
    rig.mover.close()
    assert rig.store.is_closed


def test_loads_overtake_saves_except_those_of_their_own_place(rig: Rig) -> None:
    rig.save((1, 1))
    rig.ended(1)
    rig.store.may_go_on.clear()
    rig.save((2, 2), (3, 3), (4, 4))
    rig.fetch((1, 9), (4, 10))
    rig.store.may_go_on.set()
    found = rig.ended(5)
    order = [what for what in rig.store.asked if what.startswith("fetch")]
    assert order == ["fetch 1", "fetch 4"]
    assert rig.store.asked.index("fetch 1") < rig.store.asked.index("save 4")
    assert rig.store.asked.index("save 4") < rig.store.asked.index("fetch 4")
    assert all(copies.arrived.all() for copies in found)
    rig.mover.close()


def test_an_incomplete_block_is_reported_and_never_reaches_the_pool(rig: Rig) -> None:
    before = rig.pool.blocks.copy()
    rig.fetch((7, 2))
    (copies,) = rig.ended(1)
    assert copies.arrived.tolist() == [False]
    assert copies.num_bad == 1
    assert not copies.broken
    assert np.array_equal(rig.pool.blocks, before)
    rig.mover.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failing_medium_is_reported_once_and_not_used_again(rig: Rig, number: int) -> None:
    rig.save((1, 1))
    rig.ended(1)
    rig.store.fails = OSError(number, "the disk")
    rig.save((2, 2))
    rig.fetch((1, 3), (1, 4))
    found = rig.ended(3)
    assert any(copies.broken for copies in found)
    assert not any(copies.arrived.any() for copies in found)
    assert sum(copies.num_bad for copies in found) == 0
    rig.store.fails = None
    asked = len(rig.store.asked)
    rig.fetch((1, 5))
    assert rig.ended(1)[0].arrived.tolist() == [False]
    assert len(rig.store.asked) == asked
    assert len(rig.reports) == 1
    rig.mover.close()


def test_plans_that_name_blocks_in_transfer_wait_for_them(rig: Rig) -> None:
    rig.save((1, 1))
    rig.ended(1)
    rig.store.may_go_on.clear()
    rig.fetch((1, 6))
    rig.mover.wait_for(np.array([5], np.int32))  # not these
    waited = threading.Event()

    def wait() -> None:
        rig.mover.wait_for(np.array([6], np.int32))
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not waited.wait(0.05)
    rig.store.may_go_on.set()
    assert waited.wait(60)
    thread.join()
    rig.mover.close()


def test_cleared_blocks_are_not_returned(rig: Rig) -> None:
    rig.save((1, 1))
    rig.ended(1)
    rig.mover.clear()
    rig.fetch((1, 2))
    assert rig.ended(1)[0].arrived.tolist() == [False]
    rig.mover.close()


def test_submitted_saves_are_finished_at_the_end(rig: Rig) -> None:
    rig.save(*((block, block) for block in range(10)))
    rig.mover.close()
    assert sorted(rig.store.kept) == list(range(10))


def test_a_runner_without_a_tier_rejects_plans_that_need_one(rig: Rig) -> None:
    runner = ModelRunner(
        ScriptedExecutor(), num_slots=2, max_model_len=16, block_size=4, max_samples=2
    )
    none = np.array([0], np.int32)
    copies = joined([between(Tier.DISK, none, Tier.POOL, none, _keys(none))] * 2)
    with pytest.raises(WorkerError, match="moves 2 blocks"):
        runner.collect(runner.submit(StepPlan(step=1, tier_copies=copies)))
    rig.mover.close()


@pytest.fixture(params=[Store, HostMemory], ids=["disk", "host"])
def late(request: pytest.FixtureRequest) -> tuple[Rig, LatePool]:
    pool = LatePool()
    return Rig(pool, request.param()), pool


def test_an_asynchronous_device_is_not_waited_for(late: tuple[Rig, LatePool]) -> None:
    rig, pool = late
    before = pool.blocks[[3, 4]].copy()
    rig.store.may_go_on.clear()
    rig.fetch((9, 1))  # keeps the thread busy
    rig.save((3, 5), (4, 6))
    assert len(pool.submitted) == 1
    pool.overwrite(3)
    pool.overwrite(4)
    rig.store.may_go_on.set()
    rig.ended(3)
    rig.fetch((5, 10), (6, 11))
    (copies,) = rig.ended(2)
    assert copies.arrived.all()
    assert np.array_equal(pool.blocks[[10, 11]], before)
    rig.mover.close()


def test_a_block_is_read_before_it_is_overwritten(late: tuple[Rig, LatePool]) -> None:
    """One plan saves a block and has another loaded into it; loads overtake saves."""
    rig, pool = late
    rig.save((1, 1))
    rig.ended(1)
    before = pool.blocks[2].copy()
    rig.store.may_go_on.clear()
    rig.fetch((9, 7))
    places, blocks = np.array([8, 1], np.int32), np.array([2, 2], np.int32)
    save = between(Tier.POOL, blocks[:1], rig.store.tier, places[:1], _keys(places[:1]))
    fetch = between(rig.store.tier, places[1:], Tier.POOL, blocks[1:], _keys(places[1:]))
    both = joined([save, fetch])
    assert both is not None
    rig.mover.begin(both)
    rig.store.may_go_on.set()
    rig.ended(3)
    assert np.array_equal(pool.blocks[2], pool.blocks[1])
    rig.fetch((8, 12))
    rig.ended(1)
    assert np.array_equal(pool.blocks[12], before)
    rig.mover.close()


def test_copies_submitted_together_arrive_together_if_places_are_memory() -> None:
    pool = LatePool()
    rig = Rig(pool, HostMemory())
    rig.save(*((block, block) for block in range(6)))
    rig.ended(6)
    rig.store.kept[3] = (b"another", b"")
    rig.fetch(*((place, place + 8) for place in range(6)))
    (copies,) = rig.ended(6)
    assert copies.arrived.tolist() == [True, True, True, False, True, True]
    assert (copies.fetched, copies.num_bad) == (5, 1)
    assert pool.imports == [[8, 9, 10, 12, 13]]
    assert np.array_equal(pool.blocks[[8, 9, 12, 13]], pool.blocks[[0, 1, 4, 5]])
    rig.mover.close()


def test_a_place_is_refilled_only_after_it_was_read() -> None:
    """Possible if plans are replayed faster than they were made."""
    pool = LatePool()
    rig = Rig(pool, HostMemory())
    before = pool.blocks[1].copy()
    rig.save((1, 1))
    rig.ended(1)
    rig.store.may_go_on.clear()
    rig.fetch((1, 6))
    begun = threading.Event()

    def save() -> None:
        rig.save((2, 1))
        begun.set()

    thread = threading.Thread(target=save)
    thread.start()
    assert not begun.wait(0.05)
    rig.store.may_go_on.set()
    assert begun.wait(60)
    thread.join()
    rig.mover.close()
    assert np.array_equal(pool.blocks[6], before)


@pytest.mark.parametrize("error", [WorkerError("no memory"), DeviceLost("a rank is lost")])
def test_a_failing_device_ends_its_copies_and_is_reported_once(
    late: tuple[Rig, LatePool], error: WorkerError
) -> None:
    """The mover leaves it to the engine to report a lost device, of which it ends."""
    rig, pool = late
    rig.save((1, 1))
    rig.ended(1)
    pool.fails = error
    rig.save((2, 2), (3, 3))
    rig.fetch((1, 4))
    found = rig.ended(3)
    assert any(copies.broken for copies in found)
    assert not any(copies.arrived.any() for copies in found)
    assert len(rig.reports) == (not isinstance(error, DeviceLost))
    rig.mover.close()
