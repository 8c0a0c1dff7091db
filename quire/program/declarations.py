"""What a program declares for its operations to name: weights, KV caches and rotary angles.

Knows no operation and no model family. Always holds: records are frozen and compare by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from quire.program.tensors import DType
from quire.quant.scheme import SCHEMES, Scheme

# Schemes of a KV cache: each head's row as int8 or e4m3 values, with one f32 scale per row.
INT8_CACHE, FP8_CACHE = "int8", "fp8"
KV_SCALE_BYTES = 4
# Positions of a piece of a cache: attention is computed piece by piece, aligned to position 0, and
# merged in their order.
PIECE_POSITIONS = 256


class WeightForm(StrEnum):
    """How executors may lay a weight out."""

    MATRIX = "matrix"  # [N, K], packed for products (also a tied embedding)
    TABLE = "table"  # [N, K], only gathered from by row
    VECTOR = "vector"  # [N], kept in f32


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a fused weight that come from one tensor of the checkpoint.

    They are rows first_row .. first_row + rows - 1 of a tensor of `of_rows` rows, or all of it
    where of_rows is 0. transposed: the tensor is stored [columns, rows], as GPT-2 stores its
    products. stacked: the tensor holds so many experts, [stacked, of_rows / stacked, columns], and
    rows are counted through all of them; 0 for a matrix; never together with transposed. A vector's
    rows are its elements. Where of_columns is not 0, the weight has columns first_column and on of
    the tensor's `of_columns`.
    """

    name: str  # as in "q"
    source: str  # the checkpoint's tensor name
    rows: int
    first_row: int = 0
    of_rows: int = 0
    transposed: bool = False
    stacked: int = 0
    first_column: int = 0
    of_columns: int = 0


@dataclass(frozen=True, slots=True)
class Weight:
    """An entry of the parameter table: what a checkpoint must hold and where it goes.

    Shape is [rows, columns] (columns 0 for a vector); rows is the sum of the parts'. experts: the
    number of experts of a matrix with an expert axis, [experts, expert_rows, columns]; its
    parts are in the order of the experts; 0 for a weight without.
    `shard` is "" where each rank has the whole weight, else "rows", "columns" or "experts": plans
    count the bytes of a rank by whether it is empty (quire/sim/plan.py). What a rank has of a
    weight is decided by the operations that read it (quire/program/shard.py), not by this word.
    `offset` is added to each element while loading (norms that store weight - 1). `scheme` names
    the quantization of a matrix (quire.quant.scheme); "" keeps it in `dtype`. whole_rows: of the
    undivided weight, where a rank has a share of its rows; 0 for a whole one.
    """

    name: str
    form: WeightForm
    parts: tuple[WeightPart, ...]
    columns: int
    dtype: DType
    shard: str = ""
    offset: float = 0.0
    scheme: str = ""
    experts: int = 0
    whole_rows: int = 0

    @property
    def undivided_rows(self) -> int:
        """Output features of the whole weight, by which executors choose how a sum is made: the
        same at every degree."""
        return self.whole_rows or self.rows

    @property
    def rows(self) -> int:
        """Output features (N), of all experts where there are some."""
        return sum(part.rows for part in self.parts)

    @property
    def expert_rows(self) -> int:
        """Output features of one expert."""
        return self.rows // max(self.experts, 1)

    def by_expert(self) -> list[Weight]:
        """Return each expert's matrix as a weight of its own."""
        weights, parts = [], iter(self.parts)
        for expert in range(self.experts):
            own: list[WeightPart] = []
            while sum(part.rows for part in own) < self.expert_rows:
                own.append(next(parts))
            name = f"{self.name}.{expert}"
            weights.append(replace(self, name=name, parts=tuple(own), experts=0))
        return weights

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * max(self.columns, 1)

    @property
    def quantized(self) -> Scheme | None:
        """The quantization scheme, None for a weight in its dtype."""
        return SCHEMES.get(self.scheme)

    @property
    def ints(self) -> Scheme | None:
        """The scheme, for a weight that is kept as integers."""
        scheme = self.quantized
        return None if scheme is None or scheme.is_float else scheme

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its scales; an executor's padding does not count."""
        if self.quantized is not None:
            return self.quantized.row_bytes(self.columns)
        return max(self.columns, 1) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    def source_shape(self, part: WeightPart) -> tuple[int, ...]:
        """Return shape of the whole tensor that `part`, one of this weight's, is cut from."""
        rows, columns = part.of_rows or part.rows, part.of_columns or self.columns
        if self.form is WeightForm.VECTOR:
            return (rows,)
        if part.stacked:
            return (part.stacked, rows // part.stacked, columns)
        return (columns, rows) if part.transposed else (rows, columns)

    def __str__(self) -> str:
        size = f"{self.rows}" if not self.columns else f"{self.expert_rows} x {self.columns}"
        if self.experts:
            size = f"{self.experts} x {size}"
        return f"{self.name} [{size}] {self.scheme or self.dtype}"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A cache group of the program: layers of paged keys and values of one geometry, which share
    block tables.

    dtype is that of queries, keys and values. Keys and values are kept in it, or, where `scheme`
    is "int8" or "fp8", in one byte each. Several `ranks` have its pieces by turns: piece p is rank
    p modulo `ranks`'.
    """

    kind: str  # "paged"
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType
    window: int = 0  # positions that any layer attends to, the newest; 0: all
    scheme: str = ""
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.scheme not in ("", INT8_CACHE, FP8_CACHE):
            raise ValueError(
                f"a cache's scheme is {self.scheme!r}; {INT8_CACHE!r} and {FP8_CACHE!r} are known"
            )

    @property
    def precision(self) -> str:
        """Precision of stored keys and values: "f32", "bf16", "int8" or "fp8"."""
        return self.scheme or self.dtype.value

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in one layer: keys and values with their scales."""
        head_bytes = self.head_dim * self.dtype.itemsize
        if self.scheme:
            head_bytes = self.head_dim + KV_SCALE_BYTES
        return 2 * self.kv_heads * head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, in the mean over all ranks."""
        return -(-self.layers * self.layer_token_bytes // self.ranks)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary angles: position p turns pair i by p * inv_freq[i].

    cos and sin are multiplied by `attention_scale`. inv_freq are f32 values held as floats;
    scalings (llama3, linear, yarn) are already applied.
    """

    inv_freq: tuple[float, ...]
    attention_scale: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that are rotated."""
        return 2 * len(self.inv_freq)


class Declarations(Protocol):
    """The tables of a program that its operations refer to."""

    @property
    def weights(self) -> Mapping[str, Weight]: ...
    @property
    def caches(self) -> tuple[CacheSpec, ...]: ...
    @property
    def ropes(self) -> tuple[RopeSpec, ...]: ...
