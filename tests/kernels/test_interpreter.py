"""The interpreter rejects out-of-bounds accesses of kernels, stops on request, and counts
its work.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native

WIDTH, VOCAB, BLOCK = 32, 7, 16
ANGLES = np.ones((8, 4), np.float32)  # must outlive the program
X, Y = (0, 0, WIDTH), (1, 0, WIDTH)
ATTENTION = {
    "layer": 0, "heads": 1, "kv_heads": 1, "head_dim": WIDTH,
    "scale": 1.0, "window": 0, "soft_cap": 0.0, "cache": 0, "rank": 0, "degree": 1,
}  # fmt: skip
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
    """Return embed, rope, store_kv, attention, and gather_rows as a second segment; two
    cache blocks.
    """
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
            ("embed", {"y": x, "weight": table, "ids": "tokens"}),
            ("rope", {"x": x, "rope": 0, "heads": 1, "head_dim": WIDTH}),
            ("store_kv", {"k": x, "v": x, "layer": 0, "cache": 0}),
            ("attention", {"q": x, "y": y, **ATTENTION}),
        ]
    )
    program.add_segment([("gather_rows", {"x": y, "y": sampled})])
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
def test_out_of_range_indices_are_rejected_before_anything_runs(
    program: _native.Program, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        program.run(0, **_step(**changes))
    assert program.ops_done == 0


def test_positions_past_a_position_table_are_rejected(program: _native.Program) -> None:
    table = _native.Weight("table", "f32", VOCAB, WIDTH)
    program.add_segment([("embed", {"y": (0, 0, WIDTH), "weight": table, "ids": "positions"})])
    program.run(2, **_step(token_ids=_ints(99, 99)))  # token ids are not looked up
    with pytest.raises(ValueError, match=r"rope_positions\[1\] is 7; allowed are 0 to 6"):
        program.run(2, **_step(rope_positions=_ints(6, 7)))


def test_columns_past_a_sequences_last_position_are_not_read(program: _native.Program) -> None:
    program.run(0, **_step(block_tables=np.array([[1, 999]], np.int32)))
    assert program.ops_done == 4


def test_sample_rows_must_be_rows_of_the_step(program: _native.Program) -> None:
    with pytest.raises(ValueError, match=r"sample_rows\[0\] is 2; allowed are 0 to 1"):
        program.run(1, **_step(sample_rows=_ints(2)))


def test_more_rows_than_the_buffers_hold_are_rejected(program: _native.Program) -> None:
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


def test_an_aborted_run_raises_and_the_next_one_runs(
    program: _native.Program,
) -> None:
    program.abort()  # nothing runs: no row is selected
    program.run(0, **_step())
    assert program.ops_done == 4
    seen_stop = _stop_while_running(program)
    assert seen_stop, "no abort reached a running step"
    before = program.ops_done
    program.run(0, **_step())
    assert program.ops_done == before + 4


def _stop_while_running(program: _native.Program) -> bool:
    """Abort from another thread until it reaches a run; return whether one did."""
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


def test_malformed_operations_are_rejected_when_the_program_is_built(
    program: _native.Program,
) -> None:
    view = (0, 0, WIDTH)
    matrix = _native.Weight("matrix", "f32", 5, WIDTH)
    for op, message in (
        (("dance", {"x": view}), 'no operation is called "dance"'),
        (("scale", {"x": view}), 'scale: field "factor" is missing'),
        (("scale", {"x": view, "factor": "a"}), 'scale: field "factor" is no float'),
        (("scale", {"x": view, "factor": 1.0, "cap": 1.0}), "scale: 3 fields; it has 2"),
        (("add", {"x": view, "y": None}), 'add: field "y" is no view'),
        (("add", {"x": view, "y": (9, 0, WIDTH)}), "no buffer 9"),
        (("add", {"x": view, "y": (1, 1, WIDTH)}), "wider than its buffer"),
        (("add", {"x": view, "y": (1, 0, 8)}), "views differ in width"),
        (("soft_cap", {"x": view, "cap": 0.0}), "the cap is not above zero"),
        (
            ("activation", {"gate": view, "up": None, "y": view, "form": "mish"}),
            '"form" is "mish"; allowed are silu|gelu|gelu_tanh|relu',
        ),
        (
            ("embed", {"y": (2, 0, WIDTH), "weight": matrix, "ids": "positions"}),
            "not a row for each token",
        ),
        (
            ("linear", {"x": view, "y": (1, 0, 6), "weight": matrix, "bias": None}),
            "differ in width",
        ),
        (
            ("linear", {"x": view, "y": (1, 0, 5), "weight": None, "bias": None}),
            'linear: field "weight" is None',
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            program.add_segment([op])


@pytest.mark.parametrize("block_size", [2, 12, 17, 256])
def test_an_unsupported_block_size_is_rejected(program: _native.Program, block_size: int) -> None:
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
        (("store_kv", {"k": X, "v": Y, "layer": 1, "cache": 0}), "no such layer"),
        (("store_kv", {"k": X, "v": Y, "layer": 0, "cache": 1}), "there is one cache"),
        (
            ("store_kv", {"k": (0, 0, 16), "v": (1, 0, 16), "layer": 0, "cache": 0}),
            "has not the heads' width",
        ),
        (("attention", {"q": X, "y": Y, **ATTENTION, "heads": 2}), "has not the heads' width"),
        (("attention", {"q": X, "y": Y, **ATTENTION, "kv_heads": 2}), "KV heads are not the cache"),
        (("rope", {"x": X, "rope": 0, "heads": 8, "head_dim": 4}), "more angles than half a head"),
    ],
)
def test_operations_that_do_not_match_cache_or_rope_are_rejected(
    program: _native.Program, op: Any, message: str
) -> None:
    program.add_segment([op])
    with pytest.raises(ValueError, match=message):
        program.run(2, **_step())
