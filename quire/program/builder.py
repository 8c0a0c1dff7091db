"""ProgramBuilder: what a family file writes its forward pass with.

Each call appends one operation and returns the view it wrote, so a builder reads like a forward
pass. Runs once; knows no executor and no checkpoint values. Row and dtype rules live here: the
residual stream is f32, everything that feeds a product is `dtype`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.program.declarations import CacheSpec, RopeSpec, Weight, WeightForm, WeightPart
from quire.program.expert_ops import Experts, Route
from quire.program.forms import ActivationForm, IdSource, NormForm, RouterScore, RoutingForm
from quire.program.ops import (
    Activation,
    Add,
    Attention,
    Copy,
    Embed,
    Feed,
    GatherRows,
    Linear,
    Norm,
    Op,
    Rope,
    Scale,
    SoftCap,
    StoreKV,
)
from quire.program.program import Program
from quire.program.tensors import Buffer, DType, Rows, View


class ProgramBuilder:
    """Collects buffers, operations, weights, caches and ropes, and `build`s the Program."""

    def __init__(self, name: str, *, dtype: DType) -> None:
        self.name = name
        self.dtype = dtype
        self._buffers: list[Buffer] = []
        self._segments: dict[str, list[Op]] = {"trunk": []}
        self._ops = self._segments["trunk"]
        self._rows = Rows.TOKENS
        self._weights: dict[str, Weight] = {}
        self._caches: list[CacheSpec] = []
        self._ropes: list[RopeSpec] = []
        self._outputs: dict[str, View] = {}

    # ---- declarations

    def matrix(
        self, name: str, parts: Sequence[WeightPart], columns: int, *, shard: str = "rows"
    ) -> str:
        """Declare a [sum of parts' rows, columns] product weight; returns its name."""
        return self._declare(
            Weight(name, WeightForm.MATRIX, tuple(parts), columns, self.dtype, shard)
        )

    def expert_matrix(
        self,
        name: str,
        experts: int,
        parts: Sequence[WeightPart],
        columns: int,
        *,
        shard: str = "experts",
    ) -> str:
        """Declare a weight [experts, rows, columns], its parts in the order of the experts."""
        form = WeightForm.MATRIX
        return self._declare(
            Weight(name, form, tuple(parts), columns, self.dtype, shard, experts=experts)
        )

    def table(self, name: str, part: WeightPart, columns: int) -> str:
        """Declare an embedding table that is only gathered from."""
        return self._declare(Weight(name, WeightForm.TABLE, (part,), columns, self.dtype))

    def vector(self, name: str, parts: Sequence[WeightPart], *, offset: float = 0.0) -> str:
        """Declare an f32 vector (norm weight, bias)."""
        weight = Weight(name, WeightForm.VECTOR, tuple(parts), 0, DType.F32, offset=offset)
        return self._declare(weight)

    def cache(self, spec: CacheSpec) -> int:
        """Declare a cache group; returns the index operations refer to."""
        self._caches.append(spec)
        return len(self._caches) - 1

    def rope_spec(self, spec: RopeSpec) -> int:
        """Declare rotary angles; returns the index operations refer to."""
        self._ropes.append(spec)
        return len(self._ropes) - 1

    # ---- operations

    def embed(self, weight: str, *, ids: IdSource = IdSource.TOKENS) -> View:
        """Return rows of a table by token id (or by position), into a new f32 residual stream."""
        name = "residual" if ids is IdSource.TOKENS else ids
        y = self._new(name, self._weights[weight].columns, DType.F32)
        self._ops.append(Embed(y=y, weight=weight, ids=ids))
        return y

    def feed(self, width: int, *, dtype: DType = DType.F32) -> View:
        """Return the batch's features, a row per token."""
        y = self._new("features", width, dtype)
        self._ops.append(Feed(y=y))
        return y

    def space(self, name: str, width: int) -> View:
        """Return a new buffer in the program's dtype, for operations that write parts of its
        columns."""
        return self._new(name, width, self.dtype)

    def norm(
        self,
        x: View,
        weight: str | None,
        *,
        eps: float,
        delta: View | None = None,
        form: NormForm = NormForm.RMS,
        bias: str | None = None,
        dtype: DType | None = None,
        out_name: str = "normed",
        out: View | None = None,
    ) -> View:
        """Norm of x, after x += delta where a delta is given (x is then also an output).

        Without a weight it is ones; dtype defaults to the program's. out: where it is written.
        """
        y = out or self._new(out_name, x.width, dtype or self.dtype)
        self._ops.append(
            Norm(x=x, delta=delta, y=y, form=form, eps=eps, group=0, weight=weight, bias=bias)
        )
        return y

    def norm_heads(self, x: View, weight: str, *, eps: float, head_dim: int) -> View:
        """RMS norm of each head by itself, in place (q/k norm)."""
        form = NormForm.RMS
        self._ops.append(
            Norm(x=x, delta=None, y=x, form=form, eps=eps, group=head_dim, weight=weight, bias=None)
        )
        return x

    def linear(
        self,
        x: View,
        weight: str,
        *,
        bias: str | None = None,
        dtype: DType | None = None,
        out_name: str = "linear",
    ) -> View:
        """x @ W.T (+ bias) into a new buffer; dtype defaults to the program's."""
        if x.width != self._weights[weight].columns:
            raise ValueError(
                f"{weight} takes {self._weights[weight].columns} columns, not {x.width}"
            )
        y = self._new(out_name, self._weights[weight].rows, dtype or self.dtype)
        self._ops.append(Linear(x=x, y=y, weight=weight, bias=bias))
        return y

    def parts(self, view: View, weight: str) -> tuple[View, ...]:
        """Return the columns of a fused linear's output that belong to each part of its weight."""
        views, offset = [], 0
        for part in self._weights[weight].parts:
            views.append(view.columns(offset, part.rows))
            offset += part.rows
        return tuple(views)

    def rope(self, x: View, rope: int, *, heads: int, head_dim: int) -> View:
        """Rotate x in place by the angles of `rope`."""
        self._ops.append(Rope(x=x, rope=rope, heads=heads, head_dim=head_dim))
        return x

    def store_kv(self, k: View, v: View, *, layer: int, cache: int = 0) -> None:
        """Write keys and values of the step's tokens into a layer of a cache group."""
        self._ops.append(StoreKV(k=k, v=v, layer=layer, cache=cache))

    def attention(
        self,
        q: View,
        *,
        layer: int,
        heads: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        cache: int = 0,
    ) -> View:
        """Causal attention of q over a layer of a cache group."""
        spec = self._caches[cache]
        y = self._new("attended", heads * spec.head_dim, self.dtype)
        self._ops.append(
            Attention(
                q=q,
                y=y,
                layer=layer,
                heads=heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                cache=cache,
            )
        )
        return y

    def activation(
        self, gate: View, up: View | None = None, *, form: ActivationForm = ActivationForm.SILU
    ) -> View:
        """form(gate) * up, or form(gate) alone."""
        y = self._new("activated", gate.width, self.dtype)
        self._ops.append(Activation(gate=gate, up=up, y=y, form=form))
        return y

    def route(
        self,
        x: View,
        *,
        top_k: int,
        score: RouterScore = RouterScore.SOFTMAX,
        form: RoutingForm = RoutingForm.SCORES,
        bias: str | None = None,
        groups: int = 0,
        top_groups: int = 0,
        scale: float = 1.0,
    ) -> View:
        """Routing weights by a router's logits x [R, E], f32: 0 for each expert not chosen."""
        y = self._new("routing", x.width, DType.F32)
        self._ops.append(
            Route(
                x=x,
                y=y,
                score=score,
                form=form,
                top_k=top_k,
                bias=bias,
                groups=groups,
                top_groups=top_groups,
                scale=scale,
            )
        )
        return y

    def experts(
        self,
        x: View,
        routing: View,
        gate_up: str,
        down: str,
        *,
        top_k: int,
        form: ActivationForm = ActivationForm.SILU,
    ) -> View:
        """Sum of the chosen experts' outputs by their routing weights, f32."""
        y = self._new("experts", self._weights[down].expert_rows, DType.F32)
        self._ops.append(
            Experts(x=x, routing=routing, y=y, gate_up=gate_up, down=down, form=form, top_k=top_k)
        )
        return y

    def add(self, x: View, y: View) -> View:
        """x += y in place."""
        self._ops.append(Add(x=x, y=y))
        return x

    def scale(self, x: View, factor: float) -> View:
        """x *= factor in place."""
        self._ops.append(Scale(x=x, factor=factor))
        return x

    def soft_cap(self, x: View, cap: float) -> View:
        """x = cap * tanh(x / cap) in place."""
        self._ops.append(SoftCap(x=x, cap=cap))
        return x

    def rounded(self, x: View) -> View:
        """x in the program's dtype, for a product: x itself where it has that dtype."""
        if x.dtype is self.dtype:
            return x
        y = self._new("rounded", x.width, self.dtype)
        self._ops.append(Copy(x=x, y=y))
        return y

    def copy(self, x: View, out: View) -> View:
        """x, rounded to the dtype of `out`."""
        self._ops.append(Copy(x=x, y=out))
        return out

    def begin_head(self, x: View) -> View:
        """Start the head segment: the rows of x that sample."""
        self.output("hidden", x)
        self._ops = self._segments.setdefault("head", [])
        self._rows = Rows.SAMPLES
        y = self._new("sampled", x.width, x.dtype)
        self._ops.append(GatherRows(x=x, y=y))
        return y

    def output(self, name: str, view: View) -> None:
        """Name a view so that executors can hand it out."""
        self._outputs[name] = view

    def build(self, *, vocab_size: int, max_positions: int) -> Program:
        """Return the finished Program; raises ValueError where it contradicts itself."""
        return Program(
            name=self.name,
            buffers=tuple(self._buffers),
            segments={name: tuple(ops) for name, ops in self._segments.items()},
            weights=dict(self._weights),
            caches=tuple(self._caches),
            ropes=tuple(self._ropes),
            outputs=dict(self._outputs),
            vocab_size=vocab_size,
            max_positions=max_positions,
        )

    # ---- private

    def _declare(self, weight: Weight) -> str:
        if weight.name in self._weights:
            raise ValueError(f"weight {weight.name!r} is declared twice")
        self._weights[weight.name] = weight
        return weight.name

    def _new(self, name: str, width: int, dtype: DType) -> View:
        buffer = Buffer(
            len(self._buffers), f"{name}.{len(self._buffers)}", self._rows, width, dtype
        )
        self._buffers.append(buffer)
        return View(buffer, 0, width)
