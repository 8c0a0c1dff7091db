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
from quire.models.layers import Ropes
from quire.models.rope_reader import KINDS, read_rope
from quire.models.spec import ModelSpec, RotarySpec
from quire.program.builder import ProgramBuilder
from quire.program.program import Program
from quire.program.tensors import DType, View

# transformers reads "yarn" here as longrope; no published checkpoint says so, and it names
# something else everywhere else.
PHI3_KINDS = MappingProxyType({kind: KINDS[kind] for kind in ("default", "longrope", "su")})


def read_phi3(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
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
        rotary=RotarySpec(full=read_rope(config, max_positions, partial=True, kinds=PHI3_KINDS)),
        attention={"windows": (window,) * num_layers if window < max_positions else ()},
    )


def _layer(
    p: ProgramBuilder, spec: ModelSpec, x: View, delta: View | None, layer: int, ropes: Ropes
) -> View:
    source = f"model.layers.{layer}."
    h = layers.norm(p, spec, x, f"{source}input_layernorm", delta)
    delta = layers.self_attention(p, spec, _fused_qkv(p, spec, h, layer), layer, ropes)
    h = layers.norm(p, spec, x, f"{source}post_attention_layernorm", delta)
    return _fused_mlp(p, spec, h, layer)


def build_phi3(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of a Phi-3."""
    return layers.decoder(spec, _layer, dtype=dtype, max_positions=max_positions)


def _fused_qkv(p: ProgramBuilder, spec: ModelSpec, h: View, layer: int) -> tuple[View, View, View]:
    """Return queries [T, heads * D], keys and values [T, kv_heads * D]."""
    queries, keys = spec.attention.query_size, spec.attention.kv_size
    source = f"model.layers.{layer}.self_attn.qkv_proj.weight"
    parts = layers.parts_of(source, [("q", queries), ("k", keys), ("v", keys)])
    weight = p.matrix(f"layers.{layer}.qkv", parts, h.width)
    q, k, v = p.parts(p.linear(h, weight, out_name="qkv"), weight)
    return q, k, v


def _fused_mlp(p: ProgramBuilder, spec: ModelSpec, h: View, layer: int) -> View:
    """Return what the gated feed-forward half adds to the residual stream [T, H]."""
    source = f"model.layers.{layer}.mlp."
    halves = [("gate", spec.mlp.size), ("up", spec.mlp.size)]
    parts = layers.parts_of(f"{source}gate_up_proj.weight", halves)
    weight = p.matrix(f"layers.{layer}.gate_up", parts, h.width)
    gate, up = p.parts(p.linear(h, weight, out_name="gate_up"), weight)
    return layers.mlp_out(p, spec, p.activation(gate, up, form=spec.mlp.activation), layer)
