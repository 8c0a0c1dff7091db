"""The operations of a program. Each class owns its contract, checks, cost and printed text.

Executors dispatch on the class and read typed fields; `Op` is the union of all of them, so a
`match` over it is checked for completeness. H hidden width, T/S row counts of the step.

Arithmetic inside an operation is f32; rounding happens when an output is stored, by the output
buffer's dtype, and nowhere else. The one exception is named by the numerics version: attention
rounds its probabilities to the cache's dtype before the product with V (and where the cache holds
int8 or fp8, multiplies each by its value's scale before).

Route and Experts, the operations of a mixture of experts, are in expert_ops.py; AllGather, the
exchange between ranks, is in comm_ops.py.

The fields of an operation (`schema` in operation.py) are also its encoding for the native executor:
native/include/quire/operations.h declares the same fields by name, and
quire/execute/native_ops.py compares both tables when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.cost import Cost, StepShape
from quire.program.declarations import CacheSpec, Declarations, WeightForm
from quire.program.expert_ops import Experts, Route
from quire.program.forms import QUANTIZING_OPS, ActivationForm, IdSource, NormForm
from quire.program.operation import Operation, WeightName, check_width
from quire.program.stage_ops import Recv, Send
from quire.program.tensors import DType, Rows, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Operation):
    """y[T, H] = rows of `weight` by the batch's token_ids, or by its rope_positions."""

    kind = "embed"
    reads = ()
    writes = ("y",)

    y: View
    weight: WeightName
    ids: IdSource

    def check(self, declared: Declarations) -> None:
        """Check that the table is as wide as the output, which has a row per token."""
        check_width("y", self.y, declared.weights[self.weight].columns)
        if self.y.buffer.rows is not Rows.TOKENS:
            raise ValueError(f"y has {self.y.buffer.rows} rows; an embedding has one per token")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        by = "" if self.ids is IdSource.TOKENS else f" by {self.ids}"
        return f"{declared.weights[self.weight]}{by}"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        weight = declared.weights[self.weight]
        return Cost(weight_bytes=min(step.rows(Rows.TOKENS), weight.rows) * weight.row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed(Operation):
    """y[T, W] = the batch's features [T, W], f32, rounded to y's dtype."""

    kind = "feed"
    reads = ()
    writes = ("y",)

    y: View

    def check(self, declared: Declarations) -> None:
        """Check that the output has a row per token."""
        if self.y.buffer.rows is not Rows.TOKENS:
            raise ValueError(f"y has {self.y.buffer.rows} rows; features have one per token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Operation):
    """y = norm(x) * weight + bias, after x += delta where there is a delta.

    The sum is rounded to x's dtype and stored in x. group > 0 norms each run of `group` columns by
    itself with the same weight (q/k norm). Without a weight it is ones, and there is no bias.
    """

    kind = "norm"
    reads = ("x", "delta")
    writes = ("y",)

    x: View
    delta: View | None
    y: View
    form: NormForm
    eps: float
    group: int
    weight: WeightName | None
    bias: WeightName | None

    @property
    def outputs(self) -> tuple[View, ...]:
        """y, and x where a delta is added to it."""
        return (self.y,) if self.delta is None else (self.y, self.x)

    def check(self, declared: Declarations) -> None:
        """Check that views have one width, which the group divides, and vectors the length of a
        group."""
        if self.weight is None and self.bias is not None:
            raise ValueError("a bias and no weight")
        for name, view in (("y", self.y), ("delta", self.delta)):
            if view is not None:
                check_width(name, view, self.x.width)
        length = self.group or self.x.width
        if self.group < 0 or self.x.width % length:
            raise ValueError(f"group is {self.group}; {self.x.width} columns are no multiple of it")
        for weight in self.weights:
            if declared.weights[weight].rows != length:
                raise ValueError(f"{weight} has {declared.weights[weight].rows} rows, not {length}")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        words = [] if self.weight is None else [str(declared.weights[self.weight])]
        words += ["+ bias"] if self.bias is not None else []
        words += [self.form, f"each {self.group}"] if self.group else [self.form]
        return " ".join(words)

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        per_element = 4 + (self.form is NormForm.LAYER) + (self.bias is not None)
        per_element += self.delta is not None
        return Cost(
            other_ops=per_element * _elements(self.x, step),
            weight_bytes=sum(declared.weights[name].num_bytes for name in self.weights),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Operation):
    """y[R, N] = x[R, K] @ W.T (+ bias), rounded once to y's dtype; bias is added in f32 before.

    For a weight with an integer scheme x becomes int8 (quire/quant/int_rows.py), with an fp8
    scheme both are fp8 (quire/quant/fp8.py).
    """

    kind = "linear"
    reads = ("x",)
    writes = ("y",)
    is_row_wise = False

    x: View
    y: View
    weight: WeightName
    bias: WeightName | None

    def check(self, declared: Declarations) -> None:
        """Check that the weight is a matrix [y's width, x's width], and the bias as long as y is
        wide."""
        weight = declared.weights[self.weight]
        if weight.form is not WeightForm.MATRIX:
            raise ValueError(f"{weight.name} is a {weight.form}, not a matrix")
        if weight.experts:
            raise ValueError(f"{weight.name} has {weight.experts} experts; a linear takes none")
        check_width("x", self.x, weight.columns)
        check_width("y", self.y, weight.rows)
        if self.bias is not None and declared.weights[self.bias].rows != weight.rows:
            raise ValueError(f"{self.bias} has {declared.weights[self.bias].rows} rows")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"{declared.weights[self.weight]}" + (" + bias" if self.bias is not None else "")

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        weight, rows = declared.weights[self.weight], step.rows(self.x.buffer.rows)
        bias_bytes = 0 if self.bias is None else declared.weights[self.bias].num_bytes
        return Cost(
            product_ops=2 * rows * weight.size,
            other_ops=(rows * weight.rows if self.bias is not None else 0)
            + (QUANTIZING_OPS * rows * weight.columns if weight.scheme else 0),
            weight_bytes=(weight.num_bytes if rows else 0) + bias_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Operation):
    """Rotate the first columns of each head of x in place, by the batch's rope_positions.

    `rope` is an index into the program's ropes. Column i turns with column i + rotary_dim / 2.
    """

    kind = "rope"
    reads = ("x",)
    writes = ("x",)

    x: View
    rope: int
    heads: int
    head_dim: int

    def check(self, declared: Declarations) -> None:
        """x holds the heads; the angles are declared and fit into one."""
        check_width("x", self.x, self.heads * self.head_dim)
        if not 0 <= self.rope < len(declared.ropes):
            raise ValueError(f"rope is {self.rope}; {len(declared.ropes)} are declared")
        if declared.ropes[self.rope].rotary_dim > self.head_dim:
            raise ValueError(
                f"{declared.ropes[self.rope].rotary_dim} columns of a head are rotated; it has "
                f"{self.head_dim}"
            )

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"{self.heads} heads of {self.head_dim}"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        rotated = self.heads * declared.ropes[self.rope].rotary_dim
        return Cost(other_ops=3 * rotated * step.rows(Rows.TOKENS))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKV(Operation):
    """Write keys and values of the step's tokens into a cache at the batch's kv_slots; slot -1
    stores nothing.

    cache: the cache group, an index into the program's caches; layer: counted within the group.
    """

    kind = "store_kv"
    reads = ("k", "v")
    writes = ()

    k: View
    v: View
    layer: int
    cache: int = 0

    def check(self, declared: Declarations) -> None:
        """Keys and values have the geometry of the cache."""
        cache = _cache_of(declared, self.cache, self.layer)
        for name, view in (("k", self.k), ("v", self.v)):
            check_width(name, view, cache.kv_heads * cache.head_dim)

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return _layer_text(self.cache, self.layer)

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        cache = declared.caches[self.cache]
        stored = step.rows(Rows.TOKENS) * cache.layer_token_bytes
        return Cost(kv_bytes=-(-stored // cache.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Operation):
    """Causal attention of q over a layer of a cache; fresh keys are read from there too.

    cache, layer: see StoreKV. window: positions a row attends to, its own included; 0 for all.
    soft_cap: 0 for none. Of several ranks (degree > 1) each has the pieces of PIECE_POSITIONS
    positions of the cache with a number that is its rank, modulo `degree`, and attends to them for
    all heads; the ranks exchange what each piece gives, and y has the rank's heads,
    `share_of`(heads, 1, ...), merged in the order of positions.
    """

    kind = "attention"
    reads = ("q",)
    writes = ("y",)
    is_row_wise = False

    q: View
    y: View
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float
    cache: int = 0
    rank: int = 0
    degree: int = 1

    @property
    def exchanges(self) -> int:
        """See Operation."""
        return 1 if self.degree > 1 else 0

    @property
    def own_heads(self) -> int:
        """How many heads y has."""
        start, end = share_of(self.heads, 1, self.rank, self.degree)
        return end - start

    def check(self, declared: Declarations) -> None:
        """Heads have the geometry of the cache and divide evenly over its KV heads."""
        cache = _cache_of(declared, self.cache, self.layer)
        if (self.kv_heads, self.head_dim) != (cache.kv_heads, cache.head_dim):
            raise ValueError(
                f"{self.kv_heads} KV heads of {self.head_dim}; the cache has {cache.kv_heads} of "
                f"{cache.head_dim}"
            )
        if self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} KV heads")
        if not 0 <= self.rank < self.degree <= max(self.heads, 1):
            raise ValueError(f"rank is {self.rank} of {self.degree}; there are {self.heads} heads")
        if cache.ranks != self.degree:
            raise ValueError(f"{self.degree} ranks; the cache is divided over {cache.ranks}")
        check_width("q", self.q, self.heads * self.head_dim)
        check_width("y", self.y, self.own_heads * self.head_dim)

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        words = f"{self.heads} heads over {self.kv_heads} of {self.head_dim}"
        words += f" window {self.window}" if self.window else ""
        words += f" capped at {self.soft_cap:g}" if self.soft_cap else ""
        words += f" {_layer_text(self.cache, self.layer)}"
        if self.degree == 1:
            return words
        return f"{words}, pieces of rank {self.rank} of {self.degree}, all_to_all of parts"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        pairs = -(-step.attended_positions(self.window) * self.heads // self.degree)
        token_bytes = declared.caches[self.cache].layer_token_bytes
        parts, merged_ops = 0, 0
        if self.degree > 1:
            pieces = step.attended_pieces(self.window)
            own = step.attended_pieces(self.window, self.rank, self.degree)
            parts = (pieces - own) * self.own_heads
            merged_ops = 2 * pieces * self.own_heads * self.head_dim
        return Cost(
            attention_ops=4 * pairs * self.head_dim,
            other_ops=4 * pairs + merged_ops,
            kv_bytes=-(-step.read_positions(self.window) * token_bytes // self.degree),
            comm_bytes=parts * (self.head_dim + 2) * DType.F32.itemsize,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(Operation):
    """y = form(gate) * up, or form(gate) alone."""

    kind = "activation"
    reads = ("gate", "up")
    writes = ("y",)

    gate: View
    up: View | None
    y: View
    form: ActivationForm

    def check(self, declared: Declarations) -> None:
        """Check that views have one width, and gate and up one dtype."""
        check_width("y", self.y, self.gate.width)
        if self.up is not None:
            check_width("up", self.up, self.gate.width)
            if self.up.dtype is not self.gate.dtype:
                raise ValueError(f"up is {self.up.dtype}, gate {self.gate.dtype}")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return self.form

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        return Cost(other_ops=(3 + len(self.inputs)) * _elements(self.gate, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Operation):
    """x += y in place, rounded to x's dtype."""

    kind = "add"
    reads = ("x", "y")
    writes = ("x",)

    x: View
    y: View

    def check(self, declared: Declarations) -> None:
        """Both are as wide."""
        check_width("y", self.y, self.x.width)

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        return Cost(other_ops=_elements(self.x, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Operation):
    """x *= factor in place."""

    kind = "scale"
    reads = ("x",)
    writes = ("x",)

    x: View
    factor: float

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"by {self.factor:g}"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        return Cost(other_ops=_elements(self.x, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCap(Operation):
    """x = cap * tanh(x / cap) in place."""

    kind = "soft_cap"
    reads = ("x",)
    writes = ("x",)

    x: View
    cap: float

    def check(self, declared: Declarations) -> None:
        """Check that the cap is positive."""
        if not self.cap > 0:
            raise ValueError(f"cap is {self.cap}; it must be above 0")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"at {self.cap:g}"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        return Cost(other_ops=6 * _elements(self.x, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Operation):
    """y = x, rounded to y's dtype."""

    kind = "copy"
    reads = ("x",)
    writes = ("y",)

    x: View
    y: View

    def check(self, declared: Declarations) -> None:
        """Both are as wide."""
        check_width("y", self.y, self.x.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap(Operation):
    """y = x, rounded to y's dtype, in steps that keep taps (ForwardBatch.keeps_taps). In others
    nothing is computed, and y holds anything."""

    kind = "tap"
    reads = ("x",)
    writes = ("y",)

    x: View
    y: View

    def check(self, declared: Declarations) -> None:
        """Both are as wide."""
        check_width("y", self.y, self.x.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRows(Operation):
    """y[S] = rows of x[T] at the batch's sample_rows."""

    kind = "gather_rows"
    reads = ("x",)
    writes = ("y",)
    is_row_wise = False

    x: View
    y: View

    def check(self, declared: Declarations) -> None:
        """Both are as wide and of one dtype."""
        check_width("y", self.y, self.x.width)
        if self.y.dtype is not self.x.dtype:
            raise ValueError(f"y is {self.y.dtype}, x {self.x.dtype}")


Op = (
    Embed
    | Feed
    | Norm
    | Linear
    | Rope
    | StoreKV
    | Attention
    | Activation
    | Add
    | Scale
    | SoftCap
    | Copy
    | Tap
    | GatherRows
    | Route
    | Experts
    | AllGather
    | AllReduce
    | Send
    | Recv
)
OPERATIONS: Mapping[str, type[Op]] = MappingProxyType({op.kind: op for op in get_args(Op)})


def _layer_text(cache: int, layer: int) -> str:
    return f"layer {layer}" + (f" of cache {cache}" if cache else "")


def _cache_of(declared: Declarations, index: int, layer: int) -> CacheSpec:
    if not 0 <= index < len(declared.caches):
        raise ValueError(f"cache is {index}; {len(declared.caches)} are declared")
    cache = declared.caches[index]
    if not 0 <= layer < cache.layers:
        raise ValueError(f"layer is {layer}; the cache has {cache.layers}")
    return cache


def _elements(view: View, step: StepShape) -> int:
    return step.rows(view.buffer.rows) * view.width
