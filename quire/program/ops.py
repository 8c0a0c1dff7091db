"""The vocabulary of a program: dtypes, row counts, buffers, views, operations, weights, caches.

Plain frozen records. Nothing here computes; executors give operations their meaning, and the
table below is the contract they share (H hidden width, T/S row counts of the step).

kind         inputs -> outputs                     attrs
-----------  ------------------------------------  ------------------------------------------------
embed        () -> y[T,H]                          weight (table), ids tokens|positions: row
             batch token_ids or rope_positions (learned positions) of the table
norm         x[, delta] -> y[, x]                  form rms|layer, eps[, weight[, bias]], group
             with delta: x += delta (rounded to x's dtype, in place), y = norm(x). group > 0:
             norm each run of `group` columns by itself with the same weight (q/k norm).
             weight None: ones, and no bias.
linear       x[R,K] -> y[R,N]                      weight[, bias]; y = x @ W.T (+ bias), rounded
             once to y's dtype. bias is added in f32 before rounding. A weight with a scheme
             is of integers, and x becomes int8 (quire/quant/int_rows.py), or both become fp8
             (quire/quant/fp8.py).
rope         x -> x (in place)                     rope (index into program.ropes), heads, head_dim
             rotates the first ropes[i].rotary_dim columns of each head; x holds heads*head_dim
             columns; angles by batch rope_positions; halves are rotated (i with i + rotary/2).
store_kv     k, v -> ()                            layer; writes cache rows at batch kv_slots,
             -1 stores nothing
attention    q -> y                                layer, heads, kv_heads, head_dim, scale,
             window (0 none), soft_cap (0 none)    causal, reads the cache only
activation   gate[, up] -> y                       form silu|gelu|gelu_tanh|relu; y = f(gate)*up
add          x, y -> x (in place)                  x += y, rounded to x's dtype
scale        x -> x (in place)                     factor
soft_cap     x -> x (in place)                     cap; x = cap * tanh(x / cap)
copy         x -> y                                y = x, rounded to y's dtype
gather_rows  x[T] -> y[S]                          rows of x at batch sample_rows

Arithmetic inside an operation is f32; rounding happens when an output is stored, by the output
buffer's dtype, and nowhere else. The one exception is named by the executor's numerics version:
attention rounds its probabilities to the cache's dtype before the product with V (and where
the cache holds integers or fp8, multiplies each by its value's scale before).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from quire.quant.scheme import SCHEMES, Scheme

# A cache's schemes: each head's row as integers or in e4m3, its scale an f32 beside them.
INT8_CACHE, FP8_CACHE = "int8", "fp8"
KV_SCALE_BYTES = 4


class DType(StrEnum):
    """Storage types of buffers, weights and caches."""

    F32 = "f32"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return 4 if self is DType.F32 else 2


class Rows(StrEnum):
    """Symbolic row counts; a step gives the numbers."""

    TOKENS = "tokens"
    SAMPLES = "samples"
    SEQUENCES = "sequences"


class OpKind(StrEnum):
    """Kinds of operation; the module docstring has their contract."""

    EMBED = "embed"
    NORM = "norm"
    LINEAR = "linear"
    ROPE = "rope"
    STORE_KV = "store_kv"
    ATTENTION = "attention"
    ACTIVATION = "activation"
    ADD = "add"
    SCALE = "scale"
    SOFT_CAP = "soft_cap"
    COPY = "copy"
    GATHER_ROWS = "gather_rows"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A [rows, width] array of the step, laid out once for the largest step."""

    index: int
    name: str
    rows: Rows
    width: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class View:
    """`width` columns of a buffer from column `offset`; the row stride is the buffer's."""

    buffer: Buffer
    offset: int
    width: int

    @property
    def dtype(self) -> DType:
        """The buffer's dtype."""
        return self.buffer.dtype

    def columns(self, offset: int, width: int) -> View:
        """A narrower view of the same rows."""
        if offset < 0 or width <= 0 or offset + width > self.width:
            raise ValueError(
                f"columns {offset}..{offset + width} of view {self.buffer.name} of width "
                f"{self.width}"
            )
        return View(self.buffer, self.offset + offset, width)

    def __str__(self) -> str:
        if self.offset == 0 and self.width == self.buffer.width:
            return self.buffer.name
        return f"{self.buffer.name}[{self.offset}:{self.offset + self.width}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on named buffers; `kind` fixes the meaning of inputs, outputs and attrs."""

    kind: OpKind
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


class WeightForm(StrEnum):
    """How executors may lay a weight out."""

    MATRIX = "matrix"  # [N, K], packed for products (an embedding table that is also the head too)
    TABLE = "table"  # [N, K], gathered by row only
    VECTOR = "vector"  # [N], kept in f32


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a fused weight that come from one tensor of the checkpoint.

    They are rows first_row .. first_row + rows - 1 of a tensor of `of_rows` rows, or all of it
    where of_rows is 0. transposed: the tensor is stored [columns, rows], as GPT-2 stores its
    products. A vector's rows are its elements.
    """

    name: str  # as in "q"
    source: str  # the checkpoint's tensor name
    rows: int
    first_row: int = 0
    of_rows: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """An entry of the parameter table: what a checkpoint must hold and where it goes.

    Shape is [rows, columns] (columns 0 for a vector); rows is the sum of the parts'.
    `shard` says which axis tensor parallelism cuts: "rows", "columns" or "" for none.
    `offset` is added to each element while loading (norms that store weight - 1). `scheme` names
    how a matrix is kept in few bits (quire.quant.scheme), "" in `dtype` as it is.
    """

    name: str
    form: WeightForm
    parts: tuple[WeightPart, ...]
    columns: int
    dtype: DType
    shard: str = ""
    offset: float = 0.0
    scheme: str = ""

    @property
    def rows(self) -> int:
        """Output features (N)."""
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * max(self.columns, 1)

    @property
    def quantized(self) -> Scheme | None:
        """How the weight is kept in few bits, None where it is in its dtype."""
        return SCHEMES.get(self.scheme)

    @property
    def ints(self) -> Scheme | None:
        """The scheme, where the weight is kept as integers."""
        scheme = self.quantized
        return None if scheme is None or scheme.is_float else scheme

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, of its scales too; padding is the executor's and does not count."""
        if self.quantized is not None:
            return self.quantized.row_bytes(self.columns)
        return max(self.columns, 1) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    def source_shape(self, part: WeightPart) -> tuple[int, ...]:
        """Shape of the whole tensor that `part`, one of this weight's, is cut from."""
        rows = part.of_rows or part.rows
        if self.form is WeightForm.VECTOR:
            return (rows,)
        return (self.columns, rows) if part.transposed else (rows, self.columns)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A cache the program declares: layers of paged keys and values of one geometry.

    dtype is that of queries, keys and values. Keys and values are kept in it, or, where `scheme`
    is "int8" or "fp8", as integers or in e4m3, a byte each.
    """

    kind: str  # "paged"
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType
    window: int = 0  # positions that any layer sees, the last first; 0: all
    scheme: str = ""

    def __post_init__(self) -> None:
        if self.scheme not in ("", INT8_CACHE, FP8_CACHE):
            raise ValueError(
                f"a cache's scheme is {self.scheme!r}; {INT8_CACHE!r} and {FP8_CACHE!r} are known"
            )

    @property
    def precision(self) -> str:
        """What keys and values are kept in: "f32", "bf16", "int8" or "fp8"."""
        return self.scheme or self.dtype.value

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all layers, keys and values with their scales."""
        head_bytes = self.head_dim * self.dtype.itemsize
        if self.scheme:
            head_bytes = self.head_dim + KV_SCALE_BYTES
        return 2 * self.layers * self.kv_heads * head_bytes


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary angles: position p turns pair i by p * inv_freq[i].

    cos and sin are multiplied by `attention_scale`. inv_freq are f32 values held as floats;
    scalings (llama3, linear, yarn) are already in them.
    """

    inv_freq: tuple[float, ...]
    attention_scale: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that are rotated."""
        return 2 * len(self.inv_freq)
