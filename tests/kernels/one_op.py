"""Run a single native operation on arrays: a program of one op, with its rows surrounded by NaN.

Each operand is in its own buffer, shifted by an odd number of columns and followed by more columns,
all NaN, as are the rows beyond the step's: reads or writes outside its columns show. Values cross
as float32; bf16 operands must hold bf16 values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.weights.dtypes import bf16_bits, from_bf16_bits, round_to_bf16

Float32s = NDArray[np.float32]

NO_INTS = np.empty(0, np.int32)
# The order of operands, if it is not x, y.
OPERANDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "embed": ("y",),
        "feed": ("y",),
        "norm": ("x", "y", "delta"),
        "activation": ("gate", "y", "up"),
        "experts": ("x", "routing", "y"),
    }
)
# The order of weights, where it is not weight, bias.
WEIGHTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {"route": ("bias",), "experts": ("gate_up", "down")}
)
# Fields that have a default in Python.
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"experts": {"rank": 0, "degree": 1, "unit": 0, "holders": ()}}
)
PANEL_ROWS = 32
SHIFT = 3  # columns before an operand
BEYOND = 5  # columns after it


@dataclass(frozen=True)
class Operand:
    """Width and storage of one view of an operation."""

    width: int
    dtype: str = "f32"


@dataclass(frozen=True)
class OneOp:
    """An operation ready to run: call it with the rows of its operands that are inputs."""

    kind: str
    operands: Sequence[Operand]
    isa: str
    num_threads: int = 2
    values: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields that are neither views nor weights
    weights: Sequence[tuple[str, str, Float32s]] = ()  # (form, dtype or scheme, values)
    max_rows: int = 70
    shift: int = SHIFT
    ropes: Sequence[tuple[Float32s, Float32s]] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pool = _native.Pool(self.num_threads, isa=self.isa)
        strides = [_stride(operand) for operand in self.operands]
        sizes = [
            stride * self.max_rows * _itemsize(operand)
            for stride, operand in zip(strides, self.operands, strict=True)
        ]
        program = _native.Program(pool, sum(sizes))
        offset = 0
        for operand, stride, size in zip(self.operands, strides, sizes, strict=True):
            program.add_buffer(0, offset, stride, self.max_rows, operand.dtype)
            offset += size
        for index, (cos, sin) in enumerate(self.ropes):
            program.set_rope(index, cos, sin)
        program.add_segment([(self.kind, self._fields(pool))])
        self.state["program"] = program

    def __call__(
        self,
        inputs: Mapping[int, Float32s],
        *,
        num_rows: int,
        batch: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        keeps_taps: bool = True,
    ) -> list[Float32s]:
        """Return all operands' rows after the run; `inputs` by operand index, the others
        start as NaN.
        """
        program = self.state["program"]
        for index in range(len(self.operands)):
            whole = self._whole(index)
            whole[:] = np.nan if whole.dtype == np.float32 else 0x7FC1
            if index in inputs:
                values = inputs[index]
                bits = values if whole.dtype == np.float32 else bf16_bits(values)
                whole[: len(values), self.shift : self.shift + values.shape[1]] = bits
        rows = np.zeros(num_rows, np.int32)
        arrays = dict.fromkeys(
            ("token_ids", "positions", "rope_positions", "kv_slots"), rows
        ) | dict(batch)
        program.run(
            0,
            **{"sample_rows": NO_INTS, **arrays},
            seq_starts=np.array([0, num_rows], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            keeps_taps=keeps_taps,
        )
        return [self._read(index, num_rows) for index in range(len(self.operands))]

    def _fields(self, pool: _native.Pool) -> dict[str, Any]:
        """The operation's fields: operands and weights by order, None where there are fewer."""
        operands = OPERANDS.get(self.kind, ("x", "y"))
        weight_names = WEIGHTS.get(self.kind, ("weight", "bias"))
        views = [(i, self.shift, operand.width) for i, operand in enumerate(self.operands)]
        weights = [packed(pool, *weight) for weight in self.weights]
        fields: dict[str, Any] = {**DEFAULTS.get(self.kind, {}), **self.values}
        for name, kind in _native.OPERATIONS[self.kind].items():
            if kind.startswith("view"):
                at = operands.index(name)
                fields[name] = views[at] if at < len(views) else None
            if kind.startswith("weight"):
                at = weight_names.index(name)
                fields[name] = weights[at] if at < len(weights) else None
        return fields

    def _whole(self, index: int) -> NDArray[Any]:
        stride = _stride(self.operands[index])
        whole: NDArray[Any] = self.state["program"].array((index, 0, stride), self.max_rows)
        return whole

    def _read(self, index: int, num_rows: int) -> Float32s:
        whole = self._whole(index)
        values = whole if whole.dtype == np.float32 else from_bf16_bits(whole)
        width = self.operands[index].width
        outside = values[:, : self.shift], values[:, self.shift + width :]
        assert all(np.isnan(part).all() for part in outside), (
            f"{self.kind}: operand {index}: columns outside written"
        )
        return values[:num_rows, self.shift : self.shift + width].copy()


def packed(pool: _native.Pool, form: str, dtype: str, values: Float32s) -> _native.Weight:
    """A native weight of `values` ([rows, columns], [rows] for a vector, or [experts, rows,
    columns]); dtype may be a scheme of integers."""
    columns = values.shape[-1] if values.ndim > 1 else 1
    scheme = dtype if dtype.startswith("int") else ""
    experts = values if values.ndim == 3 else [values]
    count = len(experts[0])
    stride = -(-count // PANEL_ROWS) * PANEL_ROWS if values.ndim == 3 else count
    weight = _native.Weight(
        form, "f32" if scheme else dtype, stride * len(experts), columns, scheme
    )
    for index, of_expert in enumerate(experts):
        raw = np.ascontiguousarray(of_expert).view(np.uint8).ravel()
        weight.fill(pool, index * stride, count, raw, "f32")
    return weight


def draw(rng: np.random.Generator, *shape: int, dtype: str = "f32") -> Float32s:
    """Normal random values that `dtype` has."""
    values = rng.standard_normal(shape).astype(np.float32)
    return round_to_bf16(values) if dtype == "bf16" else values


def assert_close(found: Float32s, expected: Float32s, *, dtype: str, scale: Any = None) -> None:
    """Within float32 rounding of `scale` (default: the value), plus one rounding to `dtype`."""
    scale = np.abs(expected) if scale is None else scale
    allowed = 4e-6 * scale + 1e-30
    if dtype == "bf16":
        allowed = allowed + np.abs(expected) * 2.0**-8
    worst = np.max(np.abs(found - expected) / allowed)
    assert worst <= 1, f"the error is {worst:.3g} times the tolerance"


def _itemsize(operand: Operand) -> int:
    return 4 if operand.dtype == "f32" else 2


def _stride(operand: Operand) -> int:
    per_line = 64 // _itemsize(operand)
    return -(-(SHIFT + operand.width + BEYOND) // per_line) * per_line
