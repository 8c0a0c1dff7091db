"""What a step of a program costs: arithmetic operations and bytes, for given rows and depths.

Counts what the mathematics needs, not what an executor happens to do: a multiplication and an
addition are two operations; a weight is read once a step, a cached key or value once a sequence
and layer, a buffer element once for each operation that reads or writes it. So the largest of
bytes over bandwidth and operations over peak is a floor. Knows no machine and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from quire.program.ops import CacheSpec, Op, OpKind, Rows, View
from quire.program.program import Program

Int64s = NDArray[np.int64]

# For each element of a row that is made an integer: its magnitude, a product, rounding, a sum.
QUANTIZING_OPS = 4


class StepShape:
    """Rows and depths of a step: sequence i computes `counts[i]` tokens after `starts[i]` others.

    `num_samples` rows go through the head (default: one a sequence).
    """

    def __init__(
        self, counts: Iterable[int], starts: Iterable[int], *, num_samples: int | None = None
    ) -> None:
        self.counts: Int64s = np.array(list(counts), np.int64)
        self.starts: Int64s = np.array(list(starts), np.int64)
        if len(self.counts) != len(self.starts):
            raise ValueError(f"{len(self.counts)} counts and {len(self.starts)} starts")
        if (self.counts < 0).any() or (self.starts < 0).any():
            raise ValueError("counts and starts must not be negative")
        samples = len(self.counts) if num_samples is None else num_samples
        self._rows = {
            Rows.TOKENS: int(self.counts.sum()),
            Rows.SAMPLES: samples,
            Rows.SEQUENCES: len(self.counts),
        }

    def rows(self, rows: Rows) -> int:
        """The number behind a symbolic row count."""
        return self._rows[rows]

    def attended_positions(self, window: int) -> int:
        """Pairs of a token row and a position it sees, over all rows (window 0: none)."""
        reach = self.starts + self.counts
        seen = _triangle(reach) - _triangle(self.starts)
        if window:
            hidden = _triangle(np.maximum(reach - window, 0))
            seen -= hidden - _triangle(np.maximum(self.starts - window, 0))
        return int(seen.sum())

    def read_positions(self, window: int) -> int:
        """Cached positions that somebody sees, each counted once a sequence."""
        first = np.maximum(self.starts - window + 1, 0) if window else np.zeros_like(self.starts)
        return int((self.starts + self.counts - first)[self.counts > 0].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Operations of one kind of work or of several; bytes by where they come from.

    product_ops: of weight products. attention_ops: of the two products of attention. other_ops:
    all the rest, roughly (an exponential counts as one). weight_bytes and kv_bytes come from
    memory; buffer_bytes are the step's own and may stay in caches.
    """

    product_ops: int = 0
    attention_ops: int = 0
    other_ops: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def operations(self) -> int:
        """All arithmetic operations."""
        return self.product_ops + self.attention_ops + self.other_ops

    @property
    def memory_bytes(self) -> int:
        """Bytes that must come from memory: weights and cached keys and values."""
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            product_ops=self.product_ops + other.product_ops,
            attention_ops=self.attention_ops + other.attention_ops,
            other_ops=self.other_ops + other.other_ops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            buffer_bytes=self.buffer_bytes + other.buffer_bytes,
        )


def op_cost(program: Program, op: Op, step: StepShape) -> Cost:
    """The cost of one operation of `program`."""
    return _COSTS[op.kind](program, op, step) + Cost(buffer_bytes=_buffer_bytes(op, step))


def segment_cost(program: Program, segment: str, step: StepShape) -> Cost:
    """The sum over a segment's operations."""
    return sum((op_cost(program, op, step) for op in program.segments[segment]), Cost())


def step_cost(program: Program, step: StepShape) -> Cost:
    """The sum over all segments."""
    return sum((segment_cost(program, segment, step) for segment in program.segments), Cost())


def _triangle(length: Int64s) -> Int64s:
    """1 + 2 + ... + length."""
    total: Int64s = length * (length + 1) // 2
    return total


def _buffer_bytes(op: Op, step: StepShape) -> int:
    return sum(_view_bytes(view, step) for view in (*op.inputs, *op.outputs))


def _view_bytes(view: View, step: StepShape) -> int:
    return step.rows(view.buffer.rows) * view.width * view.dtype.itemsize


def _elements(view: View, step: StepShape) -> int:
    return step.rows(view.buffer.rows) * view.width


def _weight_bytes(program: Program, name: str | None) -> int:
    if name is None:
        return 0
    return program.weights[name].num_bytes


def _embed(program: Program, op: Op, step: StepShape) -> Cost:
    weight = program.weights[op.attrs["weight"]]
    rows = min(step.rows(Rows.TOKENS), weight.rows)
    return Cost(weight_bytes=rows * weight.row_bytes)


def _norm(program: Program, op: Op, step: StepShape) -> Cost:
    per_element = 4 + (op.attrs["form"] == "layer") + (op.attrs["bias"] is not None)
    per_element += len(op.inputs) - 1
    return Cost(
        other_ops=per_element * _elements(op.inputs[0], step),
        weight_bytes=_weight_bytes(program, op.attrs["weight"])
        + _weight_bytes(program, op.attrs["bias"]),
    )


def _linear(program: Program, op: Op, step: StepShape) -> Cost:
    weight, bias = program.weights[op.attrs["weight"]], op.attrs["bias"]
    rows = step.rows(op.inputs[0].buffer.rows)
    return Cost(
        product_ops=2 * rows * weight.size,
        other_ops=(rows * weight.rows if bias is not None else 0)
        + (QUANTIZING_OPS * rows * weight.columns if weight.scheme else 0),
        weight_bytes=(_weight_bytes(program, op.attrs["weight"]) if rows else 0)
        + _weight_bytes(program, bias),
    )


def _rope(program: Program, op: Op, step: StepShape) -> Cost:
    turned = op.attrs["heads"] * program.ropes[op.attrs["rope"]].rotary_dim
    return Cost(other_ops=3 * turned * step.rows(Rows.TOKENS))


def _store_kv(program: Program, op: Op, step: StepShape) -> Cost:
    return Cost(kv_bytes=step.rows(Rows.TOKENS) * _layer_token_bytes(program.caches[0]))


def _attention(program: Program, op: Op, step: StepShape) -> Cost:
    window, heads, head_dim = op.attrs["window"], op.attrs["heads"], op.attrs["head_dim"]
    pairs = step.attended_positions(window) * heads
    return Cost(
        attention_ops=4 * pairs * head_dim,
        other_ops=4 * pairs,
        kv_bytes=step.read_positions(window) * _layer_token_bytes(program.caches[0]),
    )


def _layer_token_bytes(spec: CacheSpec) -> int:
    return spec.token_bytes // spec.layers


def _activation(program: Program, op: Op, step: StepShape) -> Cost:
    return Cost(other_ops=(3 + len(op.inputs)) * _elements(op.inputs[0], step))


def _one_each(program: Program, op: Op, step: StepShape) -> Cost:
    return Cost(other_ops=_elements(op.outputs[0], step))


def _soft_cap(program: Program, op: Op, step: StepShape) -> Cost:
    return Cost(other_ops=6 * _elements(op.inputs[0], step))


def _nothing(program: Program, op: Op, step: StepShape) -> Cost:
    return Cost()


_COSTS: Mapping[OpKind, Callable[[Program, Op, StepShape], Cost]] = MappingProxyType(
    {
        OpKind.EMBED: _embed,
        OpKind.NORM: _norm,
        OpKind.LINEAR: _linear,
        OpKind.ROPE: _rope,
        OpKind.STORE_KV: _store_kv,
        OpKind.ATTENTION: _attention,
        OpKind.ACTIVATION: _activation,
        OpKind.ADD: _one_each,
        OpKind.SCALE: _one_each,
        OpKind.SOFT_CAP: _soft_cap,
        OpKind.COPY: _nothing,
        OpKind.GATHER_ROWS: _nothing,
    }
)
