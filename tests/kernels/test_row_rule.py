"""The Row Rule, kernel by kernel: row i of a result equals the one-row result bit for bit.

Holds for 1 to 65 rows, 1 to 3 threads, every instruction set and any content of the other rows; and
for 150 of 2,048 rows. In the default suite each case has a third of these numbers, and all
cases together have all. Attention is in test_attention_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.weights.dtypes import round_to_bf16
from tests.cases import each_case
from tests.drawn import each_third
from tests.kernels.attention_cases import Geometry, Kept, PagedCache, Tokens
from tests.kernels.attention_cases import Rows as Calls
from tests.kernels.isas import EVERY_ISA, ISAS
from tests.kernels.one_op import OneOp, Operand, draw

NUM_ROWS = 2_048
# Rows computed alone: the first 65, and of the last 33 and each 37th, every place in a tile of
# rows, a third in the default suite.
FIRST = range(65)
OTHERS = sorted({*range(NUM_ROWS - 33, NUM_ROWS), *range(65, NUM_ROWS, 37)})
# Rows that several threads share: about the sizes of tiles, and others.
SOME_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 47, 48, 49, 63, 64, 65)
HALF = 5
SPECIALS = (np.nan, np.inf, -np.inf, -0.0, 1e-40, -3e38)  # 1e-40 is a denormal

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operation: `settings` of OneOp, its inputs [rows, width] by operand, its batch arrays
    [rows], and the operand to compare.
    """

    kind: str
    operands: Sequence[Operand]
    inputs: Mapping[int, Float32s]
    output: int
    batch: Mapping[str, Int32s] = field(default_factory=dict)
    counts_itself: bool = False  # its batch array holds the row numbers 0, 1, 2, ...
    settings: Mapping[str, Any] = field(default_factory=dict)

    def op(self, isa: str, num_threads: int, max_rows: int) -> OneOp:
        """Return the operation, ready to run."""
        return OneOp(self.kind, self.operands, isa, num_threads, max_rows=max_rows, **self.settings)

    def run(self, op: OneOp, first: int, count: int, inputs: Mapping[int, Float32s]) -> Any:
        """Return the bits of rows first .. first + count in one step."""
        batch = {name: values[first : first + count] for name, values in self.batch.items()}
        if self.counts_itself:
            batch = {"sample_rows": np.arange(count, dtype=np.int32)}
        rows = {index: values[first : first + count] for index, values in inputs.items()}
        return op(rows, num_rows=count, batch=batch)[self.output].view(np.uint32)

    def alone(self, isa: str, inputs: Mapping[int, Float32s], numbers: Sequence[int]) -> Any:
        """Return these rows, each in its own step."""
        op = self.op(isa, 1, 1)
        return np.concatenate([self.run(op, row, 1, inputs) for row in numbers])


def _linear(dtype: str, out: str, k: int, n: int) -> Case:
    rng = np.random.default_rng(k)
    w, bias = draw(rng, n, k, dtype=dtype), draw(rng, n)
    return Case(
        kind="linear",
        operands=[Operand(k, dtype), Operand(n, out)],
        inputs={0: draw(rng, NUM_ROWS, k, dtype=dtype)},
        output=1,
        settings={"weights": [("matrix", dtype, w), ("vector", "f32", bias)]},
    )


def _int_linear(scheme: str, dtype: str, out: str, k: int, n: int) -> Case:
    rng = np.random.default_rng(k)
    w, bias = draw(rng, n, k), draw(rng, n)
    return Case(
        kind="linear",
        operands=[Operand(k, dtype), Operand(n, out)],
        inputs={0: draw(rng, NUM_ROWS, k, dtype=dtype)},
        output=1,
        settings={"weights": [("matrix", scheme, w), ("vector", "f32", bias)]},
    )


def _norm(form: str, group: int, *, num_vectors: int = 1) -> Case:
    rng = np.random.default_rng(3)
    width = 4 * group or 77
    vectors = [draw(rng, group or width) for _ in range(num_vectors)]
    return Case(
        kind="norm",
        operands=[Operand(width), Operand(width), Operand(width, "bf16")],
        inputs={0: draw(rng, NUM_ROWS, width), 2: draw(rng, NUM_ROWS, width, dtype="bf16")},
        output=1,
        settings={
            "values": {"form": form, "group": group, "eps": 1e-5},
            "weights": [("vector", "f32", vector) for vector in vectors],
        },
    )


def _activation(form: str) -> Case:
    rng = np.random.default_rng(4)
    return Case(
        kind="activation",
        operands=[Operand(97), Operand(97), Operand(97)],
        inputs={0: draw(rng, NUM_ROWS, 97), 2: draw(rng, NUM_ROWS, 97)},
        output=1,
        settings={"values": {"form": form}},
    )


def _rope() -> Case:
    rng = np.random.default_rng(5)
    cos, sin = draw(rng, 9, HALF), draw(rng, 9, HALF)
    return Case(
        kind="rope",
        operands=[Operand(33)],
        inputs={0: draw(rng, NUM_ROWS, 33)},
        output=0,
        batch={"rope_positions": rng.integers(0, 9, NUM_ROWS).astype(np.int32)},
        settings={"values": {"rope": 0, "heads": 3, "head_dim": 11}, "ropes": [(cos, sin)]},
    )


def _embed(form: str, dtype: str, out: str, *, ids: str = "tokens") -> Case:
    rng = np.random.default_rng(6)
    table = draw(rng, 50, 37, dtype=dtype)
    return Case(
        kind="embed",
        operands=[Operand(37, out)],
        inputs={},
        output=0,
        batch={
            "token_ids" if ids == "tokens" else "rope_positions": rng.integers(
                0, 50, NUM_ROWS
            ).astype(np.int32)
        },
        settings={"values": {"ids": ids}, "weights": [(form, dtype, table)]},
    )


def _plain(kind: str, *dtypes: str, output: int = 0, **values: Any) -> Case:
    """Return an operation of 45 columns on one input for each dtype except output-only ones."""
    rng = np.random.default_rng(7)
    written = {output} if output else set()
    return Case(
        kind=kind,
        operands=[Operand(45, dtype) for dtype in dtypes],
        inputs={
            index: draw(rng, NUM_ROWS, 45, dtype=dtype)
            for index, dtype in enumerate(dtypes)
            if index not in written
        },
        output=output,
        counts_itself=kind == "gather_rows",
        settings={"values": values},
    )


def _route(score: str, experts: int, *, groups: int = 0) -> Case:
    rng = np.random.default_rng(8)
    values = {"score": score, "form": "normalized", "top_k": 3, "scale": 1.5}
    return Case(
        kind="route",
        operands=[Operand(experts), Operand(experts)],
        inputs={0: draw(rng, NUM_ROWS, experts)},
        output=1,
        settings={
            "values": values | {"groups": groups, "top_groups": min(groups, 2)},
            "weights": [("vector", "f32", draw(rng, experts))] if groups else [],
        },
    )


def _experts(dtype: str, scheme: str, hidden: int, inner: int) -> Case:
    """Some rows have fewer experts than top_k, one has none; one expert is chosen by most rows."""
    rng, experts, top_k = np.random.default_rng(9), 7, 3
    routing = np.zeros((NUM_ROWS, experts), np.float32)
    for row in range(NUM_ROWS):
        ids = rng.choice(experts, rng.integers(0, top_k + 1), replace=False)
        routing[row, ids] = rng.standard_normal(len(ids))
        routing[row, 2] = row % 5 and routing[row, 2]
    return Case(
        kind="experts",
        operands=[Operand(hidden, dtype), Operand(experts), Operand(hidden)],
        inputs={0: draw(rng, NUM_ROWS, hidden, dtype=dtype), 1: routing},
        output=2,
        settings={
            "values": {"form": "silu", "top_k": top_k},
            "weights": [
                ("matrix", scheme, draw(rng, experts, 2 * inner, hidden, dtype=dtype)),
                ("matrix", scheme, draw(rng, experts, hidden, inner, dtype=dtype)),
            ],
        },
    )


# Drawn when they run, as the rows of all take long.
CASES: dict[str, Callable[[], Case]] = {
    "linear f32": partial(_linear, "f32", "f32", 67, 100),
    "linear f32 to bf16": partial(_linear, "f32", "bf16", 32, 33),
    "linear f32 of long K": partial(_linear, "f32", "f32", 1100, 33),
    "linear bf16": partial(_linear, "bf16", "f32", 66, 65),
    "linear bf16 of odd K": partial(_linear, "bf16", "f32", 67, 300),
    "linear bf16 of long K": partial(_linear, "bf16", "bf16", 1101, 40),
    "linear int8": partial(_int_linear, "int8", "f32", "f32", 200, 70),
    "linear int8 of long K": partial(_int_linear, "int8", "bf16", "bf16", 1101, 33),
    "linear int4 in groups of 32": partial(_int_linear, "int4-g32", "bf16", "f32", 200, 70),
    "linear int4 in groups of 64": partial(_int_linear, "int4-g64", "f32", "bf16", 600, 33),
    "linear int4 in groups of 128": partial(_int_linear, "int4-g128", "bf16", "f32", 1101, 40),
    "linear int4 with zero points": partial(_int_linear, "int4-g32-zp", "f32", "f32", 333, 33),
    "rms norm with delta": partial(_norm, "rms", 0),
    "layer norm with delta": partial(_norm, "layer", 0),
    "layer norm with bias": partial(_norm, "layer", 0, num_vectors=2),
    "layer norm without weight": partial(_norm, "layer", 0, num_vectors=0),
    "norm of groups": partial(_norm, "rms", 24),
    "silu": partial(_activation, "silu"),
    "gelu": partial(_activation, "gelu"),
    "gelu_tanh": partial(_activation, "gelu_tanh"),
    "relu": partial(_activation, "relu"),
    "rope": _rope,
    "embed from panels": partial(_embed, "matrix", "bf16", "f32"),
    "embed from a table": partial(_embed, "table", "f32", "bf16"),
    "embed by position": partial(_embed, "table", "bf16", "f32", ids="positions"),
    "add": partial(_plain, "add", "f32", "f32"),
    "add bf16 to f32": partial(_plain, "add", "f32", "bf16"),
    "scale": partial(_plain, "scale", "f32", factor=0.3),
    "scale bf16": partial(_plain, "scale", "bf16", factor=0.3),
    "soft_cap": partial(_plain, "soft_cap", "f32", cap=1.5),
    "soft_cap bf16": partial(_plain, "soft_cap", "bf16", cap=30.0),
    "copy": partial(_plain, "copy", "f32", "bf16", output=1),
    "copy bf16": partial(_plain, "copy", "bf16", "f32", output=1),
    "tap": partial(_plain, "tap", "f32", "f32", output=1),
    "gather_rows": partial(_plain, "gather_rows", "f32", "f32", output=1),
    "route by softmax": partial(_route, "softmax", 37),
    "route by sigmoid in groups": partial(_route, "sigmoid", 40, groups=5),
    "experts f32": partial(_experts, "f32", "f32", 33, 19),
    "experts bf16": partial(_experts, "bf16", "bf16", 67, 40),
    "experts int8": partial(_experts, "bf16", "int8", 70, 33),
    "experts int4 in groups of 32": partial(_experts, "bf16", "int4-g32", 130, 35),
    "gather_rows bf16": partial(_plain, "gather_rows", "bf16", "bf16", output=1),
}


@lru_cache(maxsize=1)  # the same for each instruction set
def _drawn(name: str) -> Case:
    return CASES[name]()


def _each(names: Iterable[str]) -> list[tuple[str, str]]:
    """Yield cases by instruction set: integer products on all, others only on sets with own
    kernels.
    """
    return [(isa, name) for name in names for isa in EVERY_ISA if isa in ISAS or " int" in name]


@each_case(("isa", "name"), _each(CASES))
def test_a_row_does_not_depend_on_row_or_thread_counts(isa: str, name: str) -> None:
    case = _drawn(name)
    numbers = [*FIRST, *each_third(OTHERS, isa, name)]
    expected = case.alone(isa, case.inputs, numbers)
    for num_threads in (1, 2, 3):
        op = case.op(isa, num_threads, 65)
        counts = range(1, 66) if num_threads == 1 else SOME_COUNTS
        for count in each_third(counts, isa, name, num_threads):
            found = case.run(op, 0, count, case.inputs)
            assert np.array_equal(found, expected[:count]), f"{count} rows, {num_threads} threads"
    for num_threads in each_third((1, 2, 3), isa, name):
        found = case.run(case.op(isa, num_threads, NUM_ROWS), 0, NUM_ROWS, case.inputs)
        assert np.array_equal(found[numbers], expected), f"{NUM_ROWS} rows, {num_threads} threads"


@each_case(("isa", "name"), _each(name for name in CASES if not name.startswith("embed")))
def test_a_row_does_not_depend_on_the_content_of_other_rows(isa: str, name: str) -> None:
    case, count = _drawn(name), 65
    assert case.inputs
    mixed = {index: values[:count].copy() for index, values in case.inputs.items()}
    special = np.array([special for special in SPECIALS for _ in range(2)], np.float32)
    for index, values in mixed.items():
        beside = np.resize(special, len(values[1::2]))[:, None]
        values[1::2, index % 2 :] = round_to_bf16(beside)  # all its columns, or all but the first
    alone = case.alone(isa, mixed, range(count))
    plain = case.run(case.op(isa, 1, count), 0, count, case.inputs)
    assert np.array_equal(alone[::2], plain[::2])
    for num_threads in (1, 3):
        for rows in each_third((2, 3, 5, 8, 17, 33, count), isa, name, num_threads):
            found = case.run(case.op(isa, num_threads, rows), 0, rows, mixed)
            assert np.array_equal(found[::2], alone[:rows:2]), f"{rows} rows, {num_threads} threads"
            both_nan = np.isnan(found.view(np.float32)) & np.isnan(alone[:rows].view(np.float32))
            assert ((found == alone[:rows]) | both_nan).all(), "a row of special values"


@each_case("isa", ISAS)
@each_case("kept", list(Kept))
def test_keys_and_values_are_stored_as_if_each_row_were_alone(isa: str, kept: Kept) -> None:
    geometry = Geometry(kept=kept, head_dim=24)
    tokens = Tokens(geometry, sequences=2, positions=70)
    tokens.k[0, 1::2], tokens.v[1, ::3] = np.nan, np.inf
    one_by_one = PagedCache(tokens, isa=isa)
    for sequence in range(2):
        for position in range(70):
            one_by_one.store([Calls(sequence, position, 1)])
    for num_threads in (1, 2, 3):
        for counts in ((70, 70), (1, 65), (33, 17)):
            together = PagedCache(tokens, isa=isa, num_threads=num_threads)
            together.store([Calls(sequence, 0, count) for sequence, count in enumerate(counts)])
            for sequence, count in enumerate(counts):
                if count < 70:
                    together.store([Calls(sequence, count, 70 - count)])
            assert np.array_equal(together.bytes, one_by_one.bytes)
