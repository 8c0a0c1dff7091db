"""BlockTable: columns in order of position, many slots at once."""

from __future__ import annotations

import numpy as np

from quire.cache.table import BlockTable


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.intp)


def test_appending_to_many_slots_gives_each_its_own_number_of_blocks() -> None:
    table = BlockTable(num_slots=4, num_columns=5, block_size=16, num_blocks=64)
    table.append(2, ints(9))
    rows, columns = table.append_many(slots(2, 0), ints(2, 1), ints(5, 6, 7))
    assert rows.tolist() == [2, 2, 0]
    assert columns.tolist() == [1, 2, 0]
    assert table.row(2).tolist() == [9, 5, 6]
    assert table.row(0).tolist() == [7]
    assert table.capacities.tolist() == [16, 0, 48, 0]


def test_one_block_each_is_the_common_case() -> None:
    table = BlockTable(num_slots=3, num_columns=2, block_size=4, num_blocks=64)
    rows, columns = table.append_many(slots(0, 2), ints(1, 1), ints(8, 9))
    assert (rows.tolist(), columns.tolist()) == ([0, 2], [0, 0])
    assert table.capacities.tolist() == [4, 0, 4]


def test_taking_empties_slots_and_returns_the_last_blocks_first() -> None:
    table = BlockTable(num_slots=3, num_columns=4, block_size=4, num_blocks=64)
    table.append(0, ints(1, 2, 3))
    table.append(1, ints(4))
    table.append(2, ints(5, 6))
    assert table.take(slots(0, 2)).tolist() == [3, 2, 1, 6, 5]
    assert table.counts.tolist() == [0, 1, 0]
    assert table.row(1).tolist() == [4]
    assert (table.blocks[[0, 2]] == -1).all()
    assert table.take(slots()).tolist() == []


def test_taking_one_slot_returns_its_last_block_first_and_none_before_its_first() -> None:
    table = BlockTable(num_slots=2, num_columns=4, block_size=4, num_blocks=64)
    table.append(1, ints(1, 2, 3))
    assert table.drop(slots(1), ints(1)).tolist() == [1]
    assert table.take(slots(1)).tolist() == [3, 2]
    assert (table.blocks == -1).all()
    assert [array[1] for array in (table.firsts, table.counts, table.capacities)] == [0, 0, 0]


def test_the_last_holder_of_a_block_is_found_however_many_followed() -> None:
    table = BlockTable(num_slots=2, num_columns=4, block_size=4, num_blocks=5)
    table.name(0, "first")
    table.append(0, ints(4, 1))
    for number in range(100):
        table.take(slots(1))
        table.name(1, f"later {number}")
        table.append(1, ints(2))
    assert table.last_holders().tolist() == ["", "first", "later 99", "", "first"]
    assert (table.holder(0), table.holder(1)) == ("first", "later 99")
    assert len(table._names) <= 2 * (2 + 5)
