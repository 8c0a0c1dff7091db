"""The interpreter refuses what would make a kernel read or write outside its arrays, stops when
told to, and counts what it did."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native

WIDTH, VOCAB, BLOCK = 32, 7, 16
ANGLES = np.ones((8, 4), np.float32)  # the program does not keep them alive
Int32s = NDArray[np.int32]


def _ints(*values: int) -> Int32s:
    return np.array(values, np.int32)


def _step(**changes: Any) -> dict[str, Any]:
    batch = {
        "token_ids": _ints(1, 2),
        "positions": _ints(0, 1),
        "rope_positions": _ints(0, 1),
        "kv_slots": _ints(16, 17),
        "seq_starts": _ints(0, 2),
        "block_tables": np.array([[1]], np.int32),
        "sample_rows": _ints(0, 1),
    }
    return batch | changes


@pytest.fixture
def program() -> _native.Program:
    """embed, rope, store_kv, attention; gather_rows as a second segment. Two cache blocks."""
    pool = _native.Pool(2)
    rows, row_bytes = 4, WIDTH * 4
    program = _native.Program(pool, 3 * rows * row_bytes)
    for index, code in enumerate((0, 0, 1)):
        program.add_buffer(code, index * rows * row_bytes, WIDTH, rows, "f32")
    table = _native.Weight("table", "f32", VOCAB, WIDTH)
    values = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    table.fill(pool, 0, VOCAB, values.view(np.uint8).ravel(), "f32")
    x, y, sampled = (0, 0, WIDTH), (1, 0, WIDTH), (2, 0, WIDTH)
    program.add_segment(
        [
            ("embed", [x], [0], [], [table]),
            ("rope", [x], [0, 1, WIDTH], [], []),
            ("store_kv", [x, x], [0], [], []),
            ("attention", [x, y], [0, 1, 0], [1.0, 0.0], []),
        ]
    )
    program.add_segment([("gather_rows", [y, sampled], [], [], [])])
    program.set_rope(0, ANGLES, ANGLES)
    program.allocate_cache(
        dtype="f32", kv_heads=1, head_dim=WIDTH, block_size=BLOCK, layers=1, num_blocks=2
    )
    return program


def test_a_step_runs_and_is_counted(program: _native.Program) -> None:
    program.run(0, **_step())
    program.run(1, **_step())
    assert program.ops_done == 5
    attended = program.array((1, 0, WIDTH), 2)
    np.testing.assert_array_equal(program.array((2, 0, WIDTH), 2), attended)
    assert np.isfinite(attended).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": _ints(1, VOCAB)}, r"token_ids\[1\] is 7; allowed are 0 to 6"),
        ({"token_ids": _ints(-1, 0)}, r"token_ids\[0\] is -1"),
        ({"rope_positions": _ints(0, 8)}, r"rope_positions\[1\] is 8; allowed are 0 to 7"),
        ({"kv_slots": _ints(16, 32)}, r"kv_slots\[1\] is 32; allowed are -1 to 31"),
        ({"kv_slots": _ints(-2, 3)}, r"kv_slots\[0\] is -2"),
        ({"positions": _ints(0, 16)}, r"positions\[1\] is 16; allowed are 0 to 15"),
        ({"block_tables": np.array([[2]], np.int32)}, r"block_tables\[0\] is 2"),
        ({"seq_starts": _ints(0, 1)}, "seq_starts do not span"),
        ({"seq_starts": _ints(0)}, "differ in length"),
        ({"positions": _ints(0)}, "differ in length"),
    ],
)
def test_indices_outside_their_arrays_are_refused_before_anything_runs(
    program: _native.Program, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        program.run(0, **_step(**changes))
    assert program.ops_done == 0


def test_positions_past_a_table_of_positions_are_refused(program: _native.Program) -> None:
    table = _native.Weight("table", "f32", VOCAB, WIDTH)
    program.add_segment([("embed", [(0, 0, WIDTH)], [1], [], [table])])
    program.run(2, **_step(token_ids=_ints(99, 99)))  # not what is looked up
    with pytest.raises(ValueError, match=r"rope_positions\[1\] is 7; allowed are 0 to 6"):
        program.run(2, **_step(rope_positions=_ints(6, 7)))


def test_columns_past_a_sequences_last_position_are_not_read(program: _native.Program) -> None:
    program.run(0, **_step(block_tables=np.array([[1, 999]], np.int32)))
    assert program.ops_done == 4


def test_sample_rows_must_be_rows_of_the_step(program: _native.Program) -> None:
    with pytest.raises(ValueError, match=r"sample_rows\[0\] is 2; allowed are 0 to 1"):
        program.run(1, **_step(sample_rows=_ints(2)))


def test_more_rows_than_the_buffers_hold_are_refused(program: _native.Program) -> None:
    five = np.arange(5, dtype=np.int32)
    names = ("token_ids", "positions", "rope_positions", "kv_slots")
    with pytest.raises(ValueError, match="5 rows; the buffers hold 4"):
        program.run(0, **_step(**dict.fromkeys(names, five), seq_starts=_ints(0, 5)))


def test_an_empty_step_does_nothing(program: _native.Program) -> None:
    names = ("token_ids", "positions", "rope_positions", "kv_slots", "sample_rows")
    empty = _step(
        **dict.fromkeys(names, _ints()),
        seq_starts=_ints(0),
        block_tables=np.empty((0, 1), np.int32),
    )
    program.run(0, **empty)
    program.run(1, **empty)
    assert program.ops_done == 5


def test_a_run_that_is_told_to_stop_raises_and_the_next_one_runs(
    program: _native.Program,
) -> None:
    program.abort()  # nothing runs: nobody is meant
    program.run(0, **_step())
    assert program.ops_done == 4
    seen_stop = _stop_while_running(program)
    assert seen_stop, "no run was met by its abort"
    before = program.ops_done
    program.run(0, **_step())
    assert program.ops_done == before + 4


def _stop_while_running(program: _native.Program) -> bool:
    """Abort from another thread until a run is met; whether one was."""
    over = threading.Event()

    def stop() -> None:
        while not over.is_set():
            program.abort()

    thread = threading.Thread(target=stop)
    thread.start()
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            program.run(0, **_step())
    except _native.Aborted:
        return True
    finally:
        over.set()
        thread.join()
    return False


def test_blocks_are_copied_in_order(program: _native.Program) -> None:
    program.run(0, **_step())
    half = len(program.cache) // 2
    second = program.cache[half:].copy()
    assert second.any()
    assert not program.cache[:half].any()
    program.copy_blocks(_ints(1), _ints(0))
    np.testing.assert_array_equal(program.cache[:half], second)
    program.cache[:half] = 1
    program.copy_blocks(_ints(0, 1, 1), _ints(1, 0, 1))
    assert (program.cache == 1).all()
    with pytest.raises(ValueError, match=r"copy_to\[0\] is 2"):
        program.copy_blocks(_ints(0), _ints(2))


def test_malformed_operations_are_refused_when_the_program_is_built(
    program: _native.Program,
) -> None:
    view = (0, 0, WIDTH)
    matrix = _native.Weight("matrix", "f32", 5, WIDTH)
    for op, message in (
        (("dance", [view], [], [], []), 'no operation is called "dance"'),
        (("scale", [view], [], [], []), "too many or too few"),
        (("add", [view, (9, 0, WIDTH)], [], [], []), "no buffer 9"),
        (("add", [view, (1, 1, WIDTH)], [], [], []), "wider than its buffer"),
        (("add", [view, (1, 0, 8)], [], [], []), "views differ in width"),
        (("soft_cap", [view], [], [0.0], []), "the cap is not above zero"),
        (("embed", [(2, 0, WIDTH)], [1], [], [matrix]), "not a row for each token"),
        (("linear", [view, (1, 0, 6)], [], [], [matrix]), "differ in width"),
    ):
        with pytest.raises(ValueError, match=message):
            program.add_segment([op])


@pytest.mark.parametrize("block_size", [8, 17, 256])
def test_a_block_size_that_kernels_cannot_take_is_refused(
    program: _native.Program, block_size: int
) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        program.allocate_cache(
            dtype="f32",
            kv_heads=1,
            head_dim=WIDTH,
            block_size=block_size,
            layers=1,
            num_blocks=2,
        )


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (("store_kv", [(0, 0, WIDTH), (1, 0, WIDTH)], [1], [], []), "no such layer"),
        (("store_kv", [(0, 0, 16), (1, 0, 16)], [0], [], []), "has not the heads' width"),
        (
            ("attention", [(0, 0, WIDTH), (1, 0, WIDTH)], [0, 2, 0], [1.0, 0.0], []),
            "has not the heads' width",
        ),
        (("rope", [(0, 0, WIDTH)], [0, 8, 4], [], []), "more angles than half a head"),
    ],
)
def test_operations_that_do_not_suit_cache_or_angles_are_refused(
    program: _native.Program, op: Any, message: str
) -> None:
    program.add_segment([op])
    with pytest.raises(ValueError, match=message):
        program.run(2, **_step())
