"""Gemma 2 (Gemma2ForCausalLM): norms before and after each half of a layer, windows, soft caps.

Every second layer sees a window only, the first among them; scores and logits are held below
caps by tanh; queries are scaled by a number of their own.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.gemma import (
    GEMMA_ACTIVATIONS,
    read_any_gemma,
    read_query_scale,
    read_soft_cap,
    read_windows,
)
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.tensors import DType, View

ATTENTION_SOFT_CAP, LOGIT_SOFT_CAP = 50.0, 30.0


def read_gemma2(config: ConfigReader, architecture: str) -> ModelSpec:
    """The spec; raises ConfigError with every problem of the file."""
    config.pass_over(["hidden_act"])  # hidden_activation is what counts
    # A second name of the window in some files; nothing reads it, but it must not say otherwise.
    window = config.take("sliding_window")
    config.require("sliding_window_size", (window,), "it must agree with sliding_window")
    return read_any_gemma(
        config,
        architecture,
        model_type="gemma2",
        activation=config.choice("hidden_activation", GEMMA_ACTIVATIONS, default="gelu_tanh"),
        windows=read_windows(config, pattern=2),
        attention_scale=read_query_scale(config),
        attention_soft_cap=read_soft_cap(config, "attn_logit_softcapping", ATTENTION_SOFT_CAP),
        logit_soft_cap=read_soft_cap(config, "final_logit_softcapping", LOGIT_SOFT_CAP),
    )


def build_gemma2(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """The program of a Gemma 2; activations, products and cache in `dtype`, residual in f32."""
    p = layers.begin(spec, dtype)
    angles = layers.ropes(p, spec, max_positions)

    x, head = layers.embed(p, spec)  # [T, H]
    delta: View | None = None
    for layer in range(spec.num_layers):
        source = f"model.layers.{layer}."
        h = layers.rms_norm(p, spec, x, f"{source}input_layernorm", delta)
        q, k, v = layers.qkv(p, spec, h, layer)
        layers.rotate(p, spec, q, k, layer, angles)
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        out = layers.attention_out(p, spec, attended, layer)  # [T, H]
        delta = layers.rms_norm(p, spec, out, f"{source}post_attention_layernorm")
        h = layers.rms_norm(p, spec, x, f"{source}pre_feedforward_layernorm", delta)
        out = layers.gated_mlp(p, spec, h, layer)  # [T, H]
        delta = layers.rms_norm(p, spec, out, f"{source}post_feedforward_layernorm")
    return layers.finish(p, spec, x, delta, head, max_positions=max_positions)
