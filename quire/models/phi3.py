"""Phi-3, Phi-3.5 and Phi-4 (Phi3ForCausalLM): Llama's layers over fused tensors.

Queries, keys and values are one tensor of the checkpoint, gate and up another. Phi-4-mini rotates
three quarters of a head and ties its head; the 128k models stretch their angles (longrope). Which
of longrope's two lists counts is settled when the program is built, see rope.py.
"""

from __future__ import annotations

from types import MappingProxyType

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_POSITIONS, MIN_POSITIONS, read_decoder
from quire.models.rope_reader import KINDS, read_rope
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.ops import ActivationForm
from quire.program.program import Program
from quire.program.tensors import DType, View

# transformers reads "yarn" here as longrope; no published checkpoint says so, and it names
# something else everywhere else.
PHI3_KINDS = MappingProxyType({kind: KINDS[kind] for kind in ("default", "longrope", "su")})


def read_phi3(config: ConfigReader, architecture: str) -> ModelSpec:
    """The spec; raises ConfigError with every problem of the file."""
    config.pass_over(["embd_pdrop", "resid_pdrop"])  # dropout, which only training has
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.require(key, (False,), "biases are not supported for this architecture")
    for key in ("full_attn_mod", "interpolate_factor"):
        config.require(key, (1,), "only 1 is supported, which changes nothing")
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    window = config.whole("sliding_window", 1, 2**31, default=MAX_POSITIONS)
    return read_decoder(
        config,
        architecture,
        model_type="phi3",
        rope=read_rope(config, max_positions, partial=True, kinds=PHI3_KINDS),
        windows=(window,) * num_layers if window < max_positions else (),
    )


def build_phi3(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """The program of a Phi-3; activations, products and cache in `dtype`, residual in f32."""
    p = layers.begin(spec, dtype)
    angles = layers.ropes(p, spec, max_positions)

    x, head = layers.embed(p, spec)  # [T, H]
    delta: View | None = None
    for layer in range(spec.num_layers):
        source = f"model.layers.{layer}."
        h = layers.rms_norm(p, spec, x, f"{source}input_layernorm", delta)
        q, k, v = _fused_qkv(p, spec, h, layer)
        layers.rotate(p, spec, q, k, layer, angles)
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        delta = layers.attention_out(p, spec, attended, layer)  # [T, H]
        h = layers.rms_norm(p, spec, x, f"{source}post_attention_layernorm", delta)
        delta = _fused_mlp(p, spec, h, layer)  # [T, H]
    return layers.finish(p, spec, x, delta, head, max_positions=max_positions)


def _fused_qkv(p: ProgramBuilder, spec: ModelSpec, h: View, layer: int) -> tuple[View, View, View]:
    """Queries [T, heads * D], keys and values [T, kv_heads * D]."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    source = f"model.layers.{layer}.self_attn.qkv_proj.weight"
    parts = layers.parts_of(source, [("q", queries), ("k", keys), ("v", keys)])
    weight = p.matrix(f"layers.{layer}.qkv", parts, h.width)
    q, k, v = p.parts(p.linear(h, weight, out_name="qkv"), weight)
    return q, k, v


def _fused_mlp(p: ProgramBuilder, spec: ModelSpec, h: View, layer: int) -> View:
    """What the gated feed-forward half adds to the residual stream [T, H]."""
    source = f"model.layers.{layer}.mlp."
    halves = [("gate", spec.intermediate_size), ("up", spec.intermediate_size)]
    parts = layers.parts_of(f"{source}gate_up_proj.weight", halves)
    weight = p.matrix(f"layers.{layer}.gate_up", parts, h.width)
    gate, up = p.parts(p.linear(h, weight, out_name="gate_up"), weight)
    activated = p.activation(gate, up, form=ActivationForm(spec.activation))  # [T, I]
    name = f"layers.{layer}.down"
    return layers.product(p, spec, activated, name, f"{source}down_proj", has_bias=False)
