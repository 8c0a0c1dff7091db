"""The layers families share: what a decoder is made of, written once over ProgramBuilder.

A family file strings these together as a forward pass and writes itself only what it does
differently. What a layer does beyond the plain case (windows, biases, caps, scales) it reads from
the ModelSpec, so that a family whose configuration says it all needs no builder of its own.
Source names are those transformers gives its decoders (`model.layers.N.self_attn.q_proj`), and a
caller can give others. Letters: T token rows, S sample rows, H hidden width, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.models.rope import rope_spec
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.declarations import CacheSpec, WeightPart
from quire.program.ops import ActivationForm, IdSource, NormForm
from quire.program.program import Program
from quire.program.tensors import DType, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Ropes:
    """Indices of a program's angles: for layers that see everything, and for those that do not."""

    everywhere: int
    windowed: int


def begin(spec: ModelSpec, dtype: DType) -> ProgramBuilder:
    """A builder with the model's cache declared: a paged one over all layers."""
    p = ProgramBuilder(spec.architecture, dtype=dtype)
    # What no layer sees any more need not be kept.
    window = max(spec.windows) if spec.windows and all(spec.windows) else 0
    geometry = spec.num_layers, spec.num_kv_heads, spec.head_dim
    p.cache(CacheSpec("paged", *geometry, dtype, window))
    return p


def ropes(p: ProgramBuilder, spec: ModelSpec, max_positions: int) -> Ropes:
    """Declare the rotary angles of a model that has some."""
    if spec.rope is None:
        raise ValueError(f"{spec.architecture} has no rotary angles")
    everywhere = p.rope_spec(rope_spec(spec.rope, spec.head_dim, max_positions))
    if spec.local_rope is None:
        return Ropes(everywhere=everywhere, windowed=everywhere)
    windowed = p.rope_spec(rope_spec(spec.local_rope, spec.head_dim, max_positions))
    return Ropes(everywhere=everywhere, windowed=windowed)


def embed(
    p: ProgramBuilder,
    spec: ModelSpec,
    source: str = "model.embed_tokens.weight",
    head_source: str = "lm_head.weight",
) -> tuple[View, str]:
    """Embedded tokens [T, H], and the name of the head: the same matrix where they are tied.

    They are spec.embedding_size wide where that is not 0.
    """
    width = spec.embedding_size or spec.hidden_size
    part = WeightPart("embed", source, spec.vocab_size)
    if spec.tied_head:
        embedding = head = p.matrix("embed", [part], width)
    else:
        embedding = p.table("embed", part, width)
        head_part = WeightPart("head", head_source, spec.vocab_size)
        head = p.matrix("head", [head_part], width)
    x = p.embed(embedding)
    if spec.embedding_scale != 1.0:
        # Gemma's and Granite's were trained with the factor rounded to the weights' type.
        p.scale(x, rounded(spec.embedding_scale, p.dtype))
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
) -> View:
    """The model's norm of x (after x += delta): an RMS norm or a layer norm, by its spec."""
    if spec.norm_form == "layer":
        return layer_norm(p, spec, x, source, delta)
    return rms_norm(p, spec, x, source, delta)


def layer_norm(
    p: ProgramBuilder,
    spec: ModelSpec,
    x: View,
    source: str,
    delta: View | None = None,
    *,
    dtype: DType | None = None,
) -> View:
    """Layer norm of x (after x += delta): `source`.weight and .bias where the model has them."""
    name = own_name(source)
    weight = bias = None
    if spec.norm_weight:
        weight = p.vector(name, [WeightPart("norm", f"{source}.weight", x.width)])
    if spec.norm_bias:
        bias = p.vector(f"{name}.bias", [WeightPart("norm", f"{source}.bias", x.width)])
    return p.norm(
        x, weight, eps=spec.norm_eps, delta=delta, form=NormForm.LAYER, bias=bias, dtype=dtype
    )


def rms_norm(
    p: ProgramBuilder,
    spec: ModelSpec,
    x: View,
    source: str,
    delta: View | None = None,
    *,
    dtype: DType | None = None,
) -> View:
    """RMS norm of x (after x += delta), its weight from tensor `source`.weight."""
    name = own_name(source)
    part = WeightPart("norm", f"{source}.weight", x.width)
    weight = p.vector(name, [part], offset=spec.norm_offset)
    return p.norm(x, weight, eps=spec.norm_eps, delta=delta, dtype=dtype)


def norm_heads(p: ProgramBuilder, spec: ModelSpec, x: View, source: str) -> View:
    """RMS norm of each head of x by itself, in place (q/k norm)."""
    name = own_name(source)
    part = WeightPart("norm", f"{source}.weight", spec.head_dim)
    weight = p.vector(name, [part], offset=spec.norm_offset)
    return p.norm_heads(x, weight, eps=spec.norm_eps, head_dim=spec.head_dim)


def qkv(
    p: ProgramBuilder, spec: ModelSpec, h: View, layer: int, *, source: str = ""
) -> tuple[View, View, View]:
    """Queries [T, heads * D], keys and values [T, kv_heads * D]: one product of three tensors.

    source: how their names begin, where not "model.layers.N.self_attn.".
    """
    source = source or f"model.layers.{layer}.self_attn."
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    weight = p.matrix(
        f"layers.{layer}.qkv",
        [WeightPart(name, f"{source}{name}_proj.weight", n) for name, n in rows.items()],
        h.width,
    )
    bias = None
    if spec.qkv_bias:
        bias = p.vector(
            f"layers.{layer}.qkv.bias",
            [WeightPart(name, f"{source}{name}_proj.bias", n) for name, n in rows.items()],
        )
    q, k, v = p.parts(p.linear(h, weight, bias=bias, out_name="qkv"), weight)
    return q, k, v


def rotate(
    p: ProgramBuilder, spec: ModelSpec, q: View, k: View, layer: int, angles: Ropes
) -> tuple[View, View]:
    """q and k turned by their positions' angles, in place, where the layer has any."""
    if layer not in spec.unrotated_layers:
        rope = angles.windowed if spec.window(layer) else angles.everywhere
        p.rope(q, rope, heads=spec.num_heads, head_dim=spec.head_dim)
        p.rope(k, rope, heads=spec.num_kv_heads, head_dim=spec.head_dim)
    return q, k


def attend(p: ProgramBuilder, spec: ModelSpec, q: View, k: View, v: View, layer: int) -> View:
    """Store keys and values, then attend [T, heads * D] as far back as the layer sees."""
    p.store_kv(k, v, layer=layer)
    return p.attention(
        q,
        layer=layer,
        heads=spec.num_heads,
        scale=spec.score_scale(layer),
        window=spec.window(layer),
        soft_cap=spec.attention_soft_cap,
    )


def attention_out(
    p: ProgramBuilder, spec: ModelSpec, attended: View, layer: int, *, dtype: DType | None = None
) -> View:
    """What attention adds to the residual stream [T, H], in the program's dtype or `dtype`."""
    source = f"model.layers.{layer}.self_attn.o_proj"
    name = f"layers.{layer}.o"
    return product(p, spec, attended, name, source, has_bias=spec.output_bias, dtype=dtype)


def gated_mlp(
    p: ProgramBuilder, spec: ModelSpec, h: View, layer: int, *, dtype: DType | None = None
) -> View:
    """What the gated feed-forward half adds [T, H], in the program's dtype or `dtype`."""
    source = f"model.layers.{layer}.mlp."
    parts = ("gate", "up")
    weight = p.matrix(
        f"layers.{layer}.gate_up",
        [WeightPart(n, f"{source}{n}_proj.weight", spec.intermediate_size) for n in parts],
        h.width,
    )
    bias = None
    if spec.mlp_bias:
        bias = p.vector(
            f"layers.{layer}.gate_up.bias",
            [WeightPart(n, f"{source}{n}_proj.bias", spec.intermediate_size) for n in parts],
        )
    gate, up = p.parts(p.linear(h, weight, bias=bias, out_name="gate_up"), weight)
    activated = p.activation(gate, up, form=ActivationForm(spec.activation))  # [T, I]
    name = f"layers.{layer}.down"
    down = f"{source}down_proj"
    return product(p, spec, activated, name, down, has_bias=spec.mlp_bias, dtype=dtype)


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
    """What a feed-forward half without a gate adds [T, H]; `up` and `down` name its tensors."""
    inner = spec.intermediate_size
    name = f"layers.{layer}.up"
    part = WeightPart("up", f"{up}.weight", inner, transposed=transposed)
    weight = p.matrix(name, [part], h.width)
    bias = None
    if spec.mlp_bias:
        bias = p.vector(f"{name}.bias", [WeightPart("up", f"{up}.bias", inner)])
    activated = p.activation(
        p.linear(h, weight, bias=bias, out_name="up"), form=ActivationForm(spec.activation)
    )
    name = f"layers.{layer}.down"
    return product(p, spec, activated, name, down, has_bias=spec.mlp_bias, transposed=transposed)


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
    """A product into the residual stream; its input is what is cut when the model is sharded."""
    last = name.rsplit(".", 1)[-1]
    part = WeightPart(last, f"{source}.weight", spec.hidden_size, transposed=transposed)
    weight = p.matrix(name, [part], x.width, shard="columns")
    bias = None
    if has_bias:
        bias = p.vector(f"{name}.bias", [WeightPart(last, f"{source}.bias", spec.hidden_size)])
    y = p.linear(x, weight, bias=bias, dtype=dtype, out_name=last)
    return y if spec.residual_scale == 1.0 else p.scale(y, spec.residual_scale)


def logits(p: ProgramBuilder, spec: ModelSpec, h: View, head: str) -> View:
    """The head's product [S, V] in f32, scaled and capped where the model says so."""
    y = p.linear(h, head, dtype=DType.F32, out_name="logits")
    if spec.logit_scale != 1.0:
        p.scale(y, spec.logit_scale)
    if spec.logit_soft_cap:
        p.soft_cap(y, spec.logit_soft_cap)
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
    """The last sum, the rows that sample, the last norm and the head; then the Program."""
    assert delta is not None, "a model has at least one layer"
    x = p.begin_head(p.add(x, delta))  # [S, H]
    logits(p, spec, norm(p, spec, x, norm_source), head)
    return p.build(vocab_size=spec.vocab_size, max_positions=max_positions)


def rounded(value: float, dtype: DType) -> float:
    """`value` as `dtype` holds it, ties to even."""
    single = np.float32(value)
    if dtype is DType.F32:
        return float(single)
    bits = int(single.view(np.uint32))
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(kept).view(np.float32))


def own_name(source: str) -> str:
    """The name of a weight by that of its tensor: without what all tensors of the file share."""
    return source.removeprefix("model.").removeprefix("decoder.").removeprefix("transformer.")


def parts_of(
    source: str, rows: Sequence[tuple[str, int]], *, transposed: bool = False
) -> list[WeightPart]:
    """Parts that lie one after another in a single fused tensor `source`."""
    total, first, parts = sum(n for _, n in rows), 0, []
    for name, n in rows:
        part = WeightPart(name, source, n, first_row=first, of_rows=total, transposed=transposed)
        parts.append(part)
        first += n
    return parts
