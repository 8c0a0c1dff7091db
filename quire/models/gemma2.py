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
from quire.models.layers import Ropes
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.program import Program
from quire.program.tensors import DType, View

ATTENTION_SOFT_CAP, LOGIT_SOFT_CAP = 50.0, 30.0


def read_gemma2(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.pass_over(["hidden_act"])  # hidden_activation is what counts
    # A second name of the window in some files; nothing reads it, but it must not say otherwise.
    window = config.take("sliding_window")
    config.require("sliding_window_size", (window,), "it must agree with sliding_window")
    return read_any_gemma(
        config,
        architecture,
        model_type="gemma2",
        mlp={
            "activation": config.choice("hidden_activation", GEMMA_ACTIVATIONS, default="gelu_tanh")
        },
        attention={
            "windows": read_windows(config, pattern=2),
            "scale": read_query_scale(config),
            "soft_cap": read_soft_cap(config, "attn_logit_softcapping", ATTENTION_SOFT_CAP),
        },
        head={"soft_cap": read_soft_cap(config, "final_logit_softcapping", LOGIT_SOFT_CAP)},
    )


def _layer(
    p: ProgramBuilder, spec: ModelSpec, x: View, delta: View | None, layer: int, ropes: Ropes
) -> View:
    source = f"model.layers.{layer}."
    h = layers.norm(p, spec, x, f"{source}input_layernorm", delta)
    out = layers.self_attention(p, spec, layers.qkv(p, spec, h, layer), layer, ropes)
    delta = layers.norm(p, spec, out, f"{source}post_attention_layernorm")
    h = layers.norm(p, spec, x, f"{source}pre_feedforward_layernorm", delta)
    out = layers.gated_mlp(p, spec, h, layer)
    return layers.norm(p, spec, out, f"{source}post_feedforward_layernorm")


def build_gemma2(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of a Gemma 2 or 3."""
    return layers.decoder(spec, _layer, dtype=dtype, max_positions=max_positions)
