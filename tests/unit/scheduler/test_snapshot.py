"""The snapshot agrees with the scheduler's and the cache's state at every moment."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from quire.base.engine_snapshot import BlockUse, EngineSnapshot
from quire.engine.process.channel import from_engine_wire
from quire.engine.process.messages import SnapshotReported
from quire.scheduler import snapshot as snapshot_module
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup
from tests.unit.scheduler.test_properties import draw_setup, run_case


def cells_of(shot: EngineSnapshot) -> list[int]:
    """Return the owner of each cell."""
    return np.repeat(shot.run_owners, shot.run_lengths).tolist()


def check_snapshot(harness: Harness) -> EngineSnapshot:
    """Compare a snapshot with the cache's tables, block by block."""
    pool, tables, batch = harness.cache.pool, harness.cache.tables, harness.scheduler._batch
    shot = harness.scheduler.snapshot(harness.now_ms)
    stats = harness.scheduler.stats()
    assert (shot.running_total, shot.waiting_total) == (stats.running, stats.waiting)
    assert (len(shot.running), len(shot.waiting)) == (stats.running, stats.waiting)
    assert sum(owner.blocks for owner in shot.owners) == shot.blocks_total == pool.num_blocks
    cells = cells_of(shot)
    for block, at in enumerate(cells):
        owner = shot.owners[at]
        slots = np.flatnonzero((tables.blocks == block).any(axis=1)).tolist()
        if slots:
            assert owner.use is (BlockUse.SHARED if len(slots) > 1 else BlockUse.RUNNING)
            if len(slots) == 1:
                sequence = batch.sequence(slots[0])
                assert owner.request == sequence.arrival
                assert owner.tenant == sequence.request.tenant
        elif pool.references[block]:
            assert owner.use is BlockUse.PINNED
        elif pool.findable[block]:
            expected = BlockUse.PROTECTED if pool.protected[block] else BlockUse.CACHED
            assert owner.use is expected
        else:
            assert owner.use is BlockUse.FREE
    assert [cells.count(at) for at in range(len(shot.owners))] == [
        owner.blocks for owner in shot.owners
    ]
    for one in shot.running:
        assert 0 <= one.computed_tokens <= one.known_tokens <= one.max_tokens + 1
    return shot


def test_each_block_is_shown_with_its_use_and_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    check, uses = Harness.check, set()

    def checked(self: Harness) -> None:
        check(self)
        uses.update(owner.use for owner in check_snapshot(self).owners)

    monkeypatch.setattr(Harness, "check", checked)
    for seed in range(12):
        random = Random(seed)
        run_case(random, draw_setup(random), 40)
    assert uses == set(BlockUse)


def test_large_pools_and_long_lists_are_shortened_and_totals_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_CELLS", 10)
    monkeypatch.setattr(snapshot_module, "MAX_LISTED", 2)
    harness = Harness(Setup(num_blocks=64, max_num_seqs=3))
    for number, name in enumerate("abcdefg"):
        harness.add(make_request(name, range(10 * number, 10 * number + 9), max_tokens=9))
    harness.step()
    harness.step()
    shot = harness.scheduler.snapshot(5_000.0)
    assert (shot.running_total, shot.waiting_total) == (3, 4)
    assert [one.request for one in (*shot.running, *shot.waiting)] == [0, 1, 3, 4]
    assert shot.blocks_per_cell == 7
    assert len(cells_of(shot)) == 10
    assert sum(owner.blocks for owner in shot.owners) == 64
    assert shot.running[0].age_ms == 5_000.0
    harness.drain()


def test_a_snapshot_has_the_limits_and_what_steps_were_learned_to_cost() -> None:
    harness = Harness(Setup(num_blocks=64, max_num_seqs=3))
    before = harness.scheduler.snapshot(0.0).step_prices
    assert before.steps_timed == 0
    harness.add(make_request("a", range(9), max_tokens=9))
    harness.drain()
    shot = harness.scheduler.snapshot(9.0)
    assert shot.limits["max_num_seqs"] == 3
    assert shot.step_prices.steps_timed == harness.scheduler.speed.num_steps > 0
    assert shot.step_prices.fixed_ms == harness.scheduler.speed.fixed_ms != before.fixed_ms


def test_a_snapshot_names_no_request_and_no_salt() -> None:
    harness = Harness(Setup(num_blocks=64))
    for name in ("client-secret-1", "client-secret-2"):
        harness.add(make_request(name, range(40), max_tokens=9, salt="salt-secret"))
        harness.step()
        harness.step()
    message = SnapshotReported(ask_id=1, snapshot=harness.scheduler.snapshot(9.0))
    sent = from_engine_wire().encode(message)
    assert b"secret" not in sent
    read = from_engine_wire().decode(sent).snapshot
    assert read.owners == message.snapshot.owners
    assert read.running == message.snapshot.running
    assert cells_of(read) == cells_of(message.snapshot)
    harness.drain()
