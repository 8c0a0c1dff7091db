"""Gemma 3's language models (Gemma3ForCausalLM): Gemma 2 with norms on queries and keys.

Five layers of six see a window only, and turn by angles of their own; caps are gone from the
scores. The checkpoints that also see pictures are another architecture.
"""

from __future__ import annotations

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
from quire.models.spec import ModelSpec, RotarySpec

WINDOW_PATTERN = 6
THETA, LOCAL_THETA = 1e6, 1e4


def read_gemma3(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
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
        mlp={
            "activation": config.choice("hidden_activation", GEMMA_ACTIVATIONS, default="gelu_tanh")
        },
        attention={
            "windows": read_windows(config, pattern=pattern),
            "scale": read_query_scale(config),
            "head_norms": True,
        },
        rotary=RotarySpec(full=everywhere, windowed=windowed),
        head={"soft_cap": read_soft_cap(config, "final_logit_softcapping", 0.0)},
    )
