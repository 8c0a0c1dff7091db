"""The positions that a plan samples: none, one or several at the end of a row; kept while the same
rows are sampled."""

import numpy as np

from quire.runner.batch_builder import KeptRows, sampled_rows
from quire.runner.slot_tables import SlotTables
from tests.unit.runner.plans import BLOCK_SIZE, admission_of, plan_of


def tables_of(*slots: int) -> SlotTables:
    tables = SlotTables(num_slots=8, max_model_len=64, block_size=BLOCK_SIZE)
    tables.apply(plan_of(0, [], admissions=tuple(admission_of(slot, [1, 2]) for slot in slots)))
    return tables


def test_each_row_samples_its_last_positions() -> None:
    tables = tables_of(0, 2, 3)
    plan = plan_of(1, [(3, 0, 2, 0), (0, 7, 1, 1), (2, 4, 5, 3)])
    sampled = sampled_rows(plan, tables)
    assert sampled.rows.tolist() == [1, 2, 2, 2]
    assert sampled.slots.tolist() == [0, 2, 2, 2]
    positions = sampled.positions(plan)
    assert positions.tolist() == [8, 7, 8, 9]
    assert positions.dtype == np.int32
    token_rows = sampled.token_rows(np.array([0, 2, 3, 8], np.int32))
    assert token_rows.tolist() == [2, 5, 6, 7]
    assert token_rows.dtype == np.int32
    assert sampled.firsts().tolist() == [0, 1, 1, 1]
    assert not sampled.is_decode
    assert plan.samples.tolist() == [False, True, True]


def test_the_same_rows_are_kept_until_rows_or_tables_change() -> None:
    tables = tables_of(0, 1)
    kept = KeptRows(tables)
    first = plan_of(1, [(0, 2, 1, 1), (1, 2, 1, 1)])
    rows = kept.of(first)
    assert rows.is_decode
    assert rows.positions(first).tolist() == [3, 3]
    later = plan_of(2, [(0, 3, 1, 1), (1, 9, 1, 1)])
    assert kept.of(later) is rows
    assert rows.positions(later).tolist() == [4, 10]
    assert kept.of(plan_of(3, [(0, 4, 1, 1), (1, 10, 1, 0)])) is not rows
    assert kept.of(plan_of(3, [(0, 4, 1, 1), (1, 10, 2, 1)])).is_decode is False
    rows = kept.of(later)
    assert rows.stays(tables) is None
    tables.apply(plan_of(4, [], retired=np.array([1], np.int32)))
    assert kept.of(later) is not rows
    stays = rows.stays(tables)
    assert stays is not None
    assert stays.tolist() == [True, False]
