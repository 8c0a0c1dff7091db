"""OLMoE: a Llama with experts, and with queries and keys normed over all heads together.

Read `build_olmoe` as a forward pass.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder
from quire.models.expert_config import read_experts
from quire.models.expert_layers import feed_forward
from quire.models.layers import Ropes
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.program import Program
from quire.program.tensors import DType, View


def read_olmoe(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.require("clip_qkv", (), "queries, keys and values are not clipped; only null is allowed")
    has_bias = config.flag("attention_bias", default=False)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    experts = read_experts(
        config,
        size_key="intermediate_size",
        layers=frozenset(range(num_layers)),
        normalized=config.flag("norm_topk_prob", default=False),
    )
    return read_decoder(
        config,
        architecture,
        model_type="olmoe",
        attention={"qkv_bias": has_bias, "output_bias": has_bias},
        experts=experts,
    )


def _layer(
    p: ProgramBuilder, spec: ModelSpec, x: View, delta: View | None, layer: int, ropes: Ropes
) -> View:
    source = f"model.layers.{layer}."
    h = layers.norm(p, spec, x, f"{source}input_layernorm", delta)
    q, k, v = layers.qkv(p, spec, h, layer)
    q = layers.norm(p, spec, q, f"{source}self_attn.q_norm")
    k = layers.norm(p, spec, k, f"{source}self_attn.k_norm")
    delta = layers.self_attention(p, spec, (q, k, v), layer, ropes)
    h = layers.norm(p, spec, x, f"{source}post_attention_layernorm", delta)
    return feed_forward(p, spec, h, layer)


def build_olmoe(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of an OLMoE."""
    return layers.decoder(spec, _layer, dtype=dtype, max_positions=max_positions)
