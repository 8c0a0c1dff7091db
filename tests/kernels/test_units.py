"""Consecutive row-wise operations run together, with the bits each has alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import _native
from tests.cases import each_case
from tests.kernels.isas import ISAS
from tests.kernels.one_op import draw, packed

HEADS, HEAD_DIM, VOCAB, BLOCK = 3, 16, 50, 16
WIDTH, MAX_ROWS = HEADS * HEAD_DIM, 96
X, QKV, OUT = 0, 1, 2
ANGLES = np.random.default_rng(6).uniform(0, 6, (MAX_ROWS, HEAD_DIM // 2)).astype(np.float32)
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)  # must outlive the program
Ops = list[tuple[str, dict[str, Any]]]


def _ops(pool: _native.Pool) -> Ops:
    """Return the operations between two products of a layer, and those after the embedding."""
    rng = np.random.default_rng(5)
    table = packed(pool, "table", "f32", draw(rng, VOCAB, WIDTH))
    wide, each = (packed(pool, "vector", "f32", draw(rng, n)) for n in (WIDTH, HEAD_DIM))
    x, out = (X, 0, WIDTH), (OUT, 0, WIDTH)
    q, k, v = ((QKV, i * WIDTH, WIDTH) for i in range(3))
    norm = {"delta": None, "form": "rms", "eps": 1e-6, "bias": None}
    rope = {"rope": 0, "heads": HEADS, "head_dim": HEAD_DIM}
    return [
        ("embed", {"y": x, "weight": table, "ids": "tokens"}),
        ("norm", {"x": x, "y": q, "group": 0, "weight": wide, **norm}),
        ("norm", {"x": x, "y": k, "group": 0, "weight": wide, **norm}),
        ("copy", {"x": x, "y": v}),
        ("norm", {"x": q, "y": q, "group": HEAD_DIM, "weight": each, **norm}),
        ("rope", {"x": q, **rope}),
        ("rope", {"x": k, **rope}),
        ("store_kv", {"k": k, "v": v, "layer": 0, "cache": 0}),
        ("activation", {"gate": q, "y": out, "up": k, "form": "silu"}),
        ("scale", {"x": out, "factor": 0.7}),
        ("add", {"x": x, "y": out}),
    ]


def _program(isa: str, threads: int, *, apart: bool, shared: bool = False) -> _native.Program:
    """Return one segment, or one per operation. shared: OUT aliases X."""
    pool = _native.Pool(threads, isa=isa)
    narrow, wide = MAX_ROWS * WIDTH * 4, MAX_ROWS * 3 * WIDTH * 2
    offsets = {X: 0, QKV: narrow, OUT: 0 if shared else narrow + wide}
    program = _native.Program(pool, 2 * narrow + wide)
    program.add_buffer(0, offsets[X], WIDTH, MAX_ROWS, "f32")
    program.add_buffer(0, offsets[QKV], 3 * WIDTH, MAX_ROWS, "bf16")
    program.add_buffer(0, offsets[OUT], WIDTH, MAX_ROWS, "f32")
    ops = _ops(pool)[: 9 if shared else None]
    for segment in [[op] for op in ops] if apart else [ops]:
        program.add_segment(segment)
    program.set_rope(0, COS, SIN)
    program.allocate_cache(
        dtype="bf16",
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK,
        layers=1,
        num_blocks=MAX_ROWS // BLOCK,
    )
    return program


def _run(
    program: _native.Program, segments: int, rows: int, *, keeps_taps: bool = True
) -> list[NDArray[Any]]:
    rng = np.random.default_rng(7)
    positions = np.arange(rows, dtype=np.int32)
    slots = rng.permutation(MAX_ROWS)[:rows].astype(np.int32)
    slots[rows // 2] = -1
    batch: dict[str, Any] = {
        "token_ids": rng.integers(0, VOCAB, rows).astype(np.int32),
        "positions": positions,
        "rope_positions": positions,
        "kv_slots": slots,
        "seq_starts": np.array([0, rows], np.int32),
        "block_tables": np.arange(MAX_ROWS // BLOCK, dtype=np.int32)[None],
        "sample_rows": np.empty(0, np.int32),
    }
    for segment in range(segments):
        program.run(segment, keeps_taps=keeps_taps, **batch)
    widths = {X: WIDTH, QKV: 3 * WIDTH, OUT: WIDTH}
    arrays = [program.array((index, 0, width), rows) for index, width in widths.items()]
    return [array.copy() for array in (*arrays, program.cache)]


@each_case("isa", ISAS)
@each_case("rows", [1, 2, 15, 16, 17, 96])
def test_fused_and_separate_operations_have_the_same_bits(isa: str, rows: int) -> None:
    apart = _program(isa, 1, apart=True)
    alone = _run(apart, 11, rows)
    for threads in (1, 2, 3):
        together = _program(isa, threads, apart=False)
        assert [unit[:2] for unit in together.units(0)] == [(0, 11)]
        for found, expected in zip(_run(together, 1, rows), alone, strict=True):
            assert found.tobytes() == expected.tobytes()


def test_operations_with_shared_memory_do_not_run_together() -> None:
    program = _program("", 2, apart=False, shared=True)
    assert [unit[:2] for unit in program.units(0)] == [(0, 8), (8, 1)]
    found = _run(program, 1, 96)[OUT]
    expected = _run(_program("", 1, apart=True), 9, 96)[OUT]
    assert found.tobytes() == expected.tobytes()


def test_times_are_recorded_on_request() -> None:
    program = _program("", 2, apart=True)
    _run(program, 1, 16)
    assert [unit[2] for unit in program.units(0)] == [0]
    program.set_timed(True)
    _run(program, 1, 16)
    assert all(unit[2] > 0 for unit in program.units(0))
    program.set_timed(True)
    assert [unit[2] for unit in program.units(0)] == [0]
    program.set_timed(False)


def test_the_pool_counts_its_dispatches() -> None:
    pool = _native.Pool(2)
    pool.deal(1, lambda *_: None)
    assert pool.num_forks == 0
    pool.deal(5, lambda *_: None)
    assert pool.num_forks == 1


def test_compute_time_is_counted() -> None:
    before = _native.compute_ns()
    _run(_program("", 1, apart=False), 1, 16)
    assert _native.compute_ns() > before


@each_case("isa", ISAS)
def test_a_tap_is_left_out_among_the_operations_it_runs_with(isa: str) -> None:
    """Of which it reads what one has written, and the next writes on."""
    for keeps_taps in (True, False):
        found = []
        for kinds in (("norm", "tap", "scale"), ("norm", "copy" if keeps_taps else None, "scale")):
            program = _tapped(isa, kinds)
            assert [unit[:2] for unit in program.units(0)] == [(0, len([*filter(None, kinds)]) + 1)]
            found.append(_run(program, 1, 96, keeps_taps=keeps_taps)[:3])
        for tapped, plain in zip(*found, strict=True):
            assert tapped.tobytes() == plain.tobytes()


def _tapped(isa: str, kinds: tuple[str | None, ...]) -> _native.Program:
    """Return an embedding, and operations of these kinds on its rows."""
    pool = _native.Pool(2, isa=isa)
    program = _native.Program(pool, 5 * MAX_ROWS * WIDTH * 4)
    for index, (width, first) in enumerate(((WIDTH, 0), (3 * WIDTH, 1), (WIDTH, 4))):
        program.add_buffer(0, first * MAX_ROWS * WIDTH * 4, width, MAX_ROWS, "f32")
        program.array((index, 0, width), MAX_ROWS)[:] = 0.0
    rng, x, out = np.random.default_rng(5), (X, 0, WIDTH), (OUT, 0, WIDTH)
    vector = packed(pool, "vector", "f32", draw(rng, WIDTH))
    table = packed(pool, "table", "f32", draw(rng, VOCAB, WIDTH))
    norm = {"form": "rms", "eps": 1e-6, "group": 0, "weight": vector, "bias": None, "delta": None}
    fields: dict[str, dict[str, Any]] = {
        "norm": {"x": x, "y": (QKV, 0, WIDTH), **norm},
        "tap": {"x": x, "y": out},
        "copy": {"x": x, "y": out},
        "scale": {"x": x, "factor": 0.5},
    }
    ops: Ops = [("embed", {"y": x, "weight": table, "ids": "tokens"})]
    program.add_segment([*ops, *((kind, fields[kind]) for kind in kinds if kind is not None)])
    return program
