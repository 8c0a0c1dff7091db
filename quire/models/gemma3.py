"""Gemma 3's language models (Gemma3ForCausalLM): Gemma 2 with norms on queries and keys.

Five layers of six see a window only, and turn by angles of their own; caps are gone from the
scores. The checkpoints that also see pictures are another architecture.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_POSITIONS, MIN_POSITIONS
from quire.models.gemma import (
    GEMMA_ACTIVATIONS,
    read_any_gemma,
    read_query_scale,
    read_soft_cap,
    read_windows,
)
from quire.models.rope_reader import read_rope_by_layer
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.tensors import DType, View

WINDOW_PATTERN = 6
THETA, LOCAL_THETA = 1e6, 1e4


def read_gemma3(config: ConfigReader, architecture: str) -> ModelSpec:
    """The spec; raises ConfigError with every problem of the file."""
    config.pass_over(["hidden_act"])  # hidden_activation is what counts
    config.require(
        "attn_logit_softcapping", (), "Gemma 3 has no cap on scores; only null is supported"
    )
    # The underlined name is a note that transformers leaves for itself beside layer_types.
    pattern = config.whole("sliding_window_pattern", 1, 10_000, default=WINDOW_PATTERN)
    if config.has("layer_types"):
        config.pass_over(["_sliding_window_pattern"])
    else:
        reason = "without layer_types it must agree with sliding_window_pattern (6 where absent)"
        config.require("_sliding_window_pattern", (pattern,), reason)
    everywhere, windowed = read_rope_by_layer(
        config,
        config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS),
        theta=THETA,
        local_theta=LOCAL_THETA,
    )
    return read_any_gemma(
        config,
        architecture,
        model_type="gemma3_text",
        activation=config.choice("hidden_activation", GEMMA_ACTIVATIONS, default="gelu_tanh"),
        windows=read_windows(config, pattern=pattern),
        rope=everywhere,
        local_rope=windowed,
        attention_scale=read_query_scale(config),
        logit_soft_cap=read_soft_cap(config, "final_logit_softcapping", 0.0),
    )


def build_gemma3(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """The program of a Gemma 3; activations, products and cache in `dtype`, residual in f32."""
    p = layers.begin(spec, dtype)
    angles = layers.ropes(p, spec, max_positions)

    x, head = layers.embed(p, spec)  # [T, H]
    delta: View | None = None
    for layer in range(spec.num_layers):
        source = f"model.layers.{layer}."
        h = layers.rms_norm(p, spec, x, f"{source}input_layernorm", delta)
        q, k, v = layers.qkv(p, spec, h, layer)
        layers.norm_heads(p, spec, q, f"{source}self_attn.q_norm")
        layers.norm_heads(p, spec, k, f"{source}self_attn.k_norm")
        layers.rotate(p, spec, q, k, layer, angles)
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        out = layers.attention_out(p, spec, attended, layer)  # [T, H]
        delta = layers.rms_norm(p, spec, out, f"{source}post_attention_layernorm")
        h = layers.rms_norm(p, spec, x, f"{source}pre_feedforward_layernorm", delta)
        out = layers.gated_mlp(p, spec, h, layer)  # [T, H]
        delta = layers.rms_norm(p, spec, out, f"{source}post_feedforward_layernorm")
    return layers.finish(p, spec, x, delta, head, max_positions=max_positions)
