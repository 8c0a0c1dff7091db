"""The Llama family: Llama 2, 3, 3.1, 3.2 and checkpoints of the same architecture (SmolLM 1 and 2).

Read `build_llama` as a forward pass; it runs once and writes the program down. It is also the
builder of families that differ from Llama in what their ModelSpec says only.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.tensors import DType, View


def read_llama(config: ConfigReader, architecture: str) -> ModelSpec:
    """The spec; raises ConfigError with every problem of the file."""
    config.require("pretraining_tp", (1,), "sums split as in pretraining are not supported")
    config.require("sliding_window", (), "Llamas have no sliding window; only null is supported")
    has_bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config,
        architecture,
        model_type="llama",
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def build_llama(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """The program of a Llama; activations, products and cache in `dtype`, residual in f32."""
    p = layers.begin(spec, dtype)
    angles = layers.ropes(p, spec, max_positions)

    x, head = layers.embed(p, spec)  # [T, H]
    delta: View | None = None
    for layer in range(spec.num_layers):
        source = f"model.layers.{layer}."
        h = layers.norm(p, spec, x, f"{source}input_layernorm", delta)
        q, k, v = layers.qkv(p, spec, h, layer)
        if spec.head_norms:
            layers.norm_heads(p, spec, q, f"{source}self_attn.q_norm")
            layers.norm_heads(p, spec, k, f"{source}self_attn.k_norm")
        layers.rotate(p, spec, q, k, layer, angles)
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        delta = layers.attention_out(p, spec, attended, layer)  # [T, H]
        h = layers.norm(p, spec, x, f"{source}post_attention_layernorm", delta)
        delta = layers.gated_mlp(p, spec, h, layer)  # [T, H]
    return layers.finish(p, spec, x, delta, head, max_positions=max_positions)
