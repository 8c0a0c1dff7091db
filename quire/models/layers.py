"""The layers that model families share, written once over ProgramBuilder.

A family file writes one layer as a forward pass and hands it to `decoder`. What a layer does beyond
the plain case (windows, biases, caps, scales) is read from the ModelSpec, so a family that differs
only in its configuration needs no builder of its own. Source names are those of transformers'
decoders (`model.layers.N.self_attn.q_proj`); a caller can give others. Letters: T token rows,
S sample rows, H hidden width, I inner width, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.models.rope import rope_spec
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.declarations import CacheSpec, WeightPart
from quire.program.forms import IdSource
from quire.program.program import Program
from quire.program.tensors import DType, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Ropes:
    """Indices of a program's angles: for layers without a window, and for those with one."""

    full: int
    windowed: int


class Layer(Protocol):
    """A layer of a family: adds `delta` of the layer before to the stream x [T, H] (None in the
    first), and returns what the layer after it adds."""

    def __call__(
        self,
        p: ProgramBuilder,
        spec: ModelSpec,
        x: View,
        delta: View | None,
        layer: int,
        ropes: Ropes,
    ) -> View: ...


def decoder(spec: ModelSpec, layer: Layer, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of a decoder with rotary angles: embedding, layers, norm and head.

    Activations, products and cache are in `dtype`, the residual stream in f32.
    """
    p = begin(spec, dtype)
    ropes = declare_ropes(p, spec, max_positions)
    x, head = embed(p, spec)  # [T, H]
    delta: View | None = None
    for index in range(spec.num_layers):
        delta = layer(p, spec, x, delta, index, ropes)
    return finish(p, spec, x, delta, head, max_positions=max_positions)


def begin(spec: ModelSpec, dtype: DType) -> ProgramBuilder:
    """Return a builder with the model's cache declared: a paged one over all layers."""
    p = ProgramBuilder(spec.architecture, dtype=dtype)
    attention = spec.attention
    # Positions beyond every layer's window need not be kept.
    window = max(attention.windows) if attention.windows and all(attention.windows) else 0
    geometry = spec.num_layers, attention.num_kv_heads, attention.head_dim
    p.cache(CacheSpec("paged", *geometry, dtype, window))
    return p


def declare_ropes(p: ProgramBuilder, spec: ModelSpec, max_positions: int) -> Ropes:
    """Declare the rotary angles of a model that has some."""
    if spec.rotary is None:
        raise ValueError(f"{spec.architecture} has no rotary angles")
    head_dim = spec.attention.head_dim
    full = p.rope_spec(rope_spec(spec.rotary.full, head_dim, max_positions))
    if spec.rotary.windowed is None:
        return Ropes(full=full, windowed=full)
    windowed = p.rope_spec(rope_spec(spec.rotary.windowed, head_dim, max_positions))
    return Ropes(full=full, windowed=windowed)


def embed(
    p: ProgramBuilder,
    spec: ModelSpec,
    source: str = "model.embed_tokens.weight",
    head_source: str = "lm_head.weight",
) -> tuple[View, str]:
    """Return embedded tokens [T, H], and the name of the head: the same matrix where they are tied.

    They are spec.embedding.size wide where that is not 0.
    """
    width = spec.embedding.size or spec.hidden_size
    part = WeightPart("embed", source, spec.vocab_size)
    if spec.head.is_tied:
        embedding = head = p.matrix("embed", [part], width)
    else:
        embedding = p.table("embed", part, width)
        head_part = WeightPart("head", head_source, spec.vocab_size)
        head = p.matrix("head", [head_part], width)
    x = p.embed(embedding)
    if spec.embedding.scale != 1.0:
        # Gemma's and Granite's were trained with the factor rounded to the weights' type.
        p.scale(x, rounded(spec.embedding.scale, p.dtype))
    return x, head


def embed_positions(
    p: ProgramBuilder, spec: ModelSpec, source: str, width: int, *, first_row: int = 0
) -> View:
    """Learned embeddings of the tokens' positions [T, width]; position 0's is row `first_row`."""
    rows = spec.max_positions
    part = WeightPart("positions", source, rows, first_row=first_row, of_rows=first_row + rows)
    return p.embed(p.table("positions", part, width), ids=IdSource.POSITIONS)


def norm(
    p: ProgramBuilder,
    spec: ModelSpec,
    x: View,
    source: str,
    delta: View | None = None,
    *,
    dtype: DType | None = None,
) -> View:
    """Return the model's norm of x (after x += delta); tensors `source`.weight and .bias, as it
    has."""
    name = own_name(source)
    weight = bias = None
    if spec.norm.has_weight:
        part = WeightPart("norm", f"{source}.weight", x.width)
        weight = p.vector(name, [part], offset=spec.norm.offset)
    if spec.norm.has_bias:
        bias = p.vector(f"{name}.bias", [WeightPart("norm", f"{source}.bias", x.width)])
    form, eps = spec.norm.form, spec.norm.eps
    return p.norm(x, weight, eps=eps, delta=delta, form=form, bias=bias, dtype=dtype)


def norm_heads(p: ProgramBuilder, spec: ModelSpec, x: View, source: str) -> View:
    """RMS norm of each head of x by itself, in place (q/k norm)."""
    head_dim = spec.attention.head_dim
    part = WeightPart("norm", f"{source}.weight", head_dim)
    weight = p.vector(own_name(source), [part], offset=spec.norm.offset)
    return p.norm_heads(x, weight, eps=spec.norm.eps, head_dim=head_dim)


def qkv(
    p: ProgramBuilder, spec: ModelSpec, h: View, layer: int, *, source: str = ""
) -> tuple[View, View, View]:
    """Return queries [T, heads * D], keys and values [T, kv_heads * D]: one product of three
    tensors.

    source: the prefix of their names, "model.layers.N.self_attn." by default.
    """
    source = source or f"model.layers.{layer}.self_attn."
    attention = spec.attention
    rows = {"q": attention.query_size, "k": attention.kv_size, "v": attention.kv_size}
    q, k, v = _fused(p, h, f"layers.{layer}.qkv", source, rows, has_bias=attention.qkv_bias)
    return q, k, v


def rotate(
    p: ProgramBuilder, spec: ModelSpec, q: View, k: View, layer: int, ropes: Ropes
) -> tuple[View, View]:
    """q and k rotated by their positions' angles, in place, where the layer has any."""
    assert spec.rotary is not None, "angles were declared"
    attention = spec.attention
    if layer not in spec.rotary.unrotated_layers:
        rope = ropes.windowed if attention.window(layer) else ropes.full
        p.rope(q, rope, heads=attention.num_heads, head_dim=attention.head_dim)
        p.rope(k, rope, heads=attention.num_kv_heads, head_dim=attention.head_dim)
    return q, k


def self_attention(
    p: ProgramBuilder,
    spec: ModelSpec,
    qkv: tuple[View, View, View],
    layer: int,
    ropes: Ropes,
    *,
    dtype: DType | None = None,
) -> View:
    """Return what the attention half of a layer adds [T, H], from queries, keys and values."""
    q, k, v = qkv
    if spec.attention.head_norms:
        source = f"model.layers.{layer}.self_attn."
        norm_heads(p, spec, q, f"{source}q_norm")
        norm_heads(p, spec, k, f"{source}k_norm")
    rotate(p, spec, q, k, layer, ropes)
    attended = attend(p, spec, q, k, v, layer)  # [T, heads * D]
    return attention_out(p, spec, attended, layer, dtype=dtype)


def attend(p: ProgramBuilder, spec: ModelSpec, q: View, k: View, v: View, layer: int) -> View:
    """Store keys and values, then attend [T, heads * D] within the layer's window."""
    attention = spec.attention
    p.store_kv(k, v, layer=layer)
    return p.attention(
        q,
        layer=layer,
        heads=attention.num_heads,
        scale=attention.score_scale(layer),
        window=attention.window(layer),
        soft_cap=attention.soft_cap,
    )


def attention_out(
    p: ProgramBuilder, spec: ModelSpec, attended: View, layer: int, *, dtype: DType | None = None
) -> View:
    """Return what attention adds to the residual stream [T, H], in the program's dtype or
    `dtype`."""
    source, has_bias = f"model.layers.{layer}.self_attn.o_proj", spec.attention.output_bias
    return product(p, spec, attended, f"layers.{layer}.o", source, has_bias=has_bias, dtype=dtype)


def gated_mlp(
    p: ProgramBuilder, spec: ModelSpec, h: View, layer: int, *, dtype: DType | None = None
) -> View:
    """Return what the gated feed-forward half adds [T, H], in the program's dtype or `dtype`."""
    name, source = f"layers.{layer}.", f"model.layers.{layer}.mlp."
    y = gated_products(p, spec, h, name, source, spec.mlp.size, dtype=dtype)
    return to_residual(p, spec, y)


def gated_products(
    p: ProgramBuilder,
    spec: ModelSpec,
    h: View,
    name: str,
    source: str,
    size: int,
    *,
    dtype: DType | None = None,
    out_name: str = "down",
) -> View:
    """down @ (activation(gate @ h) * (up @ h)) [T, H], of inner width `size`.

    name, source: prefixes of its weights' names and of its tensors' ("model.layers.N.mlp.").
    """
    rows = {"gate": size, "up": size}
    gate, up = _fused(p, h, f"{name}gate_up", source, rows, has_bias=spec.mlp.bias)
    inner = p.activation(gate, up, form=spec.mlp.activation)
    weight, bias = _outer(p, spec, inner, f"{name}down", f"{source}down_proj", spec.mlp.bias)
    return p.linear(inner, weight, bias=bias, dtype=dtype, out_name=out_name)


def mlp_out(
    p: ProgramBuilder, spec: ModelSpec, activated: View, layer: int, *, dtype: DType | None = None
) -> View:
    """Return what a gated feed-forward half adds [T, H], from its activated columns [T, I]."""
    source, has_bias = f"model.layers.{layer}.mlp.down_proj", spec.mlp.bias
    name = f"layers.{layer}.down"
    return product(p, spec, activated, name, source, has_bias=has_bias, dtype=dtype)


def plain_mlp(
    p: ProgramBuilder,
    spec: ModelSpec,
    h: View,
    layer: int,
    *,
    up: str,
    down: str,
    transposed: bool = False,
) -> View:
    """Return what a feed-forward half without a gate adds [T, H]; `up` and `down` name its
    tensors."""
    inner, form = spec.mlp.size, spec.mlp.activation
    name = f"layers.{layer}.up"
    part = WeightPart("up", f"{up}.weight", inner, transposed=transposed)
    weight = p.matrix(name, [part], h.width)
    bias = None
    if spec.mlp.bias:
        bias = p.vector(f"{name}.bias", [WeightPart("up", f"{up}.bias", inner)])
    activated = p.activation(p.linear(h, weight, bias=bias, out_name="up"), form=form)
    name = f"layers.{layer}.down"
    return product(p, spec, activated, name, down, has_bias=spec.mlp.bias, transposed=transposed)


def product(
    p: ProgramBuilder,
    spec: ModelSpec,
    x: View,
    name: str,
    source: str,
    *,
    has_bias: bool,
    transposed: bool = False,
    dtype: DType | None = None,
) -> View:
    """Return a product that half a layer adds to the residual stream [T, H]."""
    weight, bias = _outer(p, spec, x, name, source, has_bias, transposed=transposed)
    y = p.linear(x, weight, bias=bias, dtype=dtype, out_name=name.rsplit(".", 1)[-1])
    return to_residual(p, spec, y)


def to_residual(p: ProgramBuilder, spec: ModelSpec, y: View) -> View:
    """y [T, H] times residual_scale, in place: all that half a layer adds passes here once."""
    return y if spec.residual_scale == 1.0 else p.scale(y, spec.residual_scale)


def _outer(
    p: ProgramBuilder,
    spec: ModelSpec,
    x: View,
    name: str,
    source: str,
    has_bias: bool,
    *,
    transposed: bool = False,
) -> tuple[str, str | None]:
    """Declare the weight and the bias of a product from x [T, I] to the stream's width."""
    last = name.rsplit(".", 1)[-1]
    part = WeightPart(last, f"{source}.weight", spec.hidden_size, transposed=transposed)
    weight = p.matrix(name, [part], x.width, shard="columns")
    if not has_bias:
        return weight, None
    bias = [WeightPart(last, f"{source}.bias", spec.hidden_size)]
    return weight, p.vector(f"{name}.bias", bias)


def logits(p: ProgramBuilder, spec: ModelSpec, h: View, head: str) -> View:
    """Return the head's product [S, V] in f32, scaled and capped where the model says so."""
    y = p.linear(h, head, dtype=DType.F32, out_name="logits")
    if spec.head.scale != 1.0:
        p.scale(y, spec.head.scale)
    if spec.head.soft_cap:
        p.soft_cap(y, spec.head.soft_cap)
    p.output("logits", y)
    return y


def finish(
    p: ProgramBuilder,
    spec: ModelSpec,
    x: View,
    delta: View | None,
    head: str,
    *,
    max_positions: int,
    norm_source: str = "model.norm",
) -> Program:
    """Add the last sum, the rows that sample, the final norm and the head; return the Program."""
    assert delta is not None, "a model has at least one layer"
    x = p.begin_head(p.add(x, delta))  # [S, H]
    logits(p, spec, norm(p, spec, x, norm_source), head)
    return p.build(vocab_size=spec.vocab_size, max_positions=max_positions)


def rounded(value: float, dtype: DType) -> float:
    """Round `value` to `dtype`, ties to even."""
    single = np.float32(value)
    if dtype is DType.F32:
        return float(single)
    bits = int(single.view(np.uint32))
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(kept).view(np.float32))


def own_name(source: str) -> str:
    """Return the name of a weight: its tensor's without the prefix that all tensors of a file
    share."""
    return source.removeprefix("model.").removeprefix("decoder.").removeprefix("transformer.")


def parts_of(
    source: str, rows: Sequence[tuple[str, int]], *, transposed: bool = False
) -> list[WeightPart]:
    """Return consecutive parts of a single fused tensor `source`."""
    total, first, parts = sum(n for _, n in rows), 0, []
    for name, n in rows:
        part = WeightPart(name, source, n, first_row=first, of_rows=total, transposed=transposed)
        parts.append(part)
        first += n
    return parts


def _fused(
    p: ProgramBuilder,
    h: View,
    name: str,
    source: str,
    rows: Mapping[str, int],
    *,
    has_bias: bool,
) -> tuple[View, ...]:
    """Return one product of the tensors `source`PART_proj, and the columns of each part."""
    parts = {part: f"{source}{part}_proj" for part in rows}
    weight = p.matrix(
        name,
        [WeightPart(part, f"{tensor}.weight", rows[part]) for part, tensor in parts.items()],
        h.width,
    )
    bias = None
    if has_bias:
        bias = p.vector(
            f"{name}.bias",
            [WeightPart(part, f"{tensor}.bias", rows[part]) for part, tensor in parts.items()],
        )
    return p.parts(p.linear(h, weight, bias=bias, out_name=name.rsplit(".", 1)[-1]), weight)
