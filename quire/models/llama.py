"""The Llama family: Llama 2, 3, 3.1, 3.2 and checkpoints of the same architecture.

Read `build_llama` as a forward pass; it runs once and writes the program down. Source names are
those of transformers' LlamaForCausalLM. Letters: T token rows, S sample rows, H hidden width,
I inner width, V vocabulary.
"""

from __future__ import annotations

from quire.models.rope import rope_spec
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.ops import CacheSpec, DType, View, WeightPart
from quire.program.program import Program


def build_llama(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """The program of a Llama; activations, products and cache in `dtype`, residual in f32."""
    p = ProgramBuilder(spec.architecture, dtype=dtype)
    p.cache(CacheSpec("paged", spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype))
    rope = p.rope_spec(rope_spec(spec.rope, spec.head_dim))
    embedding, head = _ends(p, spec)

    x = p.embed(embedding)  # [T, H]
    delta = None
    for layer in range(spec.num_layers):
        source = f"model.layers.{layer}."
        h = _norm(p, spec, x, f"{source}input_layernorm", delta)
        attended = _attention(p, spec, h, layer, rope)  # [T, heads * head_dim]
        delta = _product(
            p, attended, "o", f"{source}self_attn.o_proj", spec.hidden_size, spec.attention_bias
        )
        h = _norm(p, spec, x, f"{source}post_attention_layernorm", delta)
        delta = _mlp(p, spec, h, layer)  # [T, H]
    assert delta is not None, "a model has at least one layer"
    x = p.add(x, delta)

    x = p.begin_head(x)  # [S, H]
    h = _norm(p, spec, x, "model.norm", None)
    p.output("logits", p.linear(h, head, dtype=DType.F32, out_name="logits"))  # [S, V]
    return p.build(vocab_size=spec.vocab_size, max_positions=max_positions)


def _attention(p: ProgramBuilder, spec: ModelSpec, h: View, layer: int, rope: int) -> View:
    source = f"model.layers.{layer}.self_attn."
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    weight = p.matrix(
        f"layers.{layer}.qkv",
        [WeightPart(name, f"{source}{name}_proj.weight", n) for name, n in rows.items()],
        spec.hidden_size,
    )
    bias = None
    if spec.attention_bias:
        bias = p.vector(
            f"layers.{layer}.qkv.bias",
            [WeightPart(name, f"{source}{name}_proj.bias", n) for name, n in rows.items()],
        )
    q, k, v = p.parts(p.linear(h, weight, bias=bias, out_name="qkv"), weight)
    p.rope(q, rope, heads=spec.num_heads, head_dim=spec.head_dim)
    p.rope(k, rope, heads=spec.num_kv_heads, head_dim=spec.head_dim)
    p.store_kv(k, v, layer=layer)
    return p.attention(q, layer=layer, heads=spec.num_heads, scale=spec.head_dim**-0.5)


def _mlp(p: ProgramBuilder, spec: ModelSpec, h: View, layer: int) -> View:
    source = f"model.layers.{layer}.mlp."
    parts = ("gate", "up")
    weight = p.matrix(
        f"layers.{layer}.gate_up",
        [WeightPart(n, f"{source}{n}_proj.weight", spec.intermediate_size) for n in parts],
        spec.hidden_size,
    )
    bias = None
    if spec.mlp_bias:
        bias = p.vector(
            f"layers.{layer}.gate_up.bias",
            [WeightPart(n, f"{source}{n}_proj.bias", spec.intermediate_size) for n in parts],
        )
    gate, up = p.parts(p.linear(h, weight, bias=bias, out_name="gate_up"), weight)
    activated = p.activation(gate, up, form=spec.activation)  # [T, I]
    return _product(p, activated, "down", f"{source}down_proj", spec.hidden_size, spec.mlp_bias)


def _product(p: ProgramBuilder, x: View, name: str, source: str, rows: int, has_bias: bool) -> View:
    """A linear of one part whose input is cut when the model is sharded (o, down)."""
    layer = source.split(".")[2]
    full_name = f"layers.{layer}.{name}"
    weight = p.matrix(
        full_name, [WeightPart(name, f"{source}.weight", rows)], x.width, shard="columns"
    )
    bias = None
    if has_bias:
        bias = p.vector(f"{full_name}.bias", [WeightPart(name, f"{source}.bias", rows)])
    return p.linear(x, weight, bias=bias, out_name=name)


def _norm(p: ProgramBuilder, spec: ModelSpec, x: View, source: str, delta: View | None) -> View:
    name = source.removeprefix("model.")
    weight = p.vector(name, [WeightPart("norm", f"{source}.weight", spec.hidden_size)])
    return p.norm(x, weight, eps=spec.norm_eps, delta=delta)


def _ends(p: ProgramBuilder, spec: ModelSpec) -> tuple[str, str]:
    """Embedding and head: one matrix where they are tied, else a table and a matrix."""
    source = "model.embed_tokens.weight"
    if spec.tied_head:
        part = WeightPart("embed", source, spec.vocab_size)
        embedding = p.matrix("embed", [part], spec.hidden_size)
        return embedding, embedding
    embedding = p.table("embed", source, spec.vocab_size, spec.hidden_size)
    part = WeightPart("head", "lm_head.weight", spec.vocab_size)
    return embedding, p.matrix("head", [part], spec.hidden_size)
