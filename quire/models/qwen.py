"""Qwen 1.5, 2 and 2.5 (Qwen2ForCausalLM) and Qwen 3 (Qwen3ForCausalLM), the dense ones.

The former are Llamas with biases on queries, keys and values; the latter norm each head's query
and key before they turn. Layers from max_window_layers on may see a window only. Their ModelSpec
says all of that, so `build_llama` is their builder.
"""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder, read_layer_windows
from quire.models.spec import ModelSpec

QWEN3_HEAD_DIM = 128
DEFAULT_WINDOW, DEFAULT_WINDOW_LAYERS = 4_096, 28


def read_qwen2(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    return _read(config, architecture, model_type="qwen2", attention={"qkv_bias": True})


def read_qwen3(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    has_bias = config.flag("attention_bias", default=False)
    return _read(
        config,
        architecture,
        model_type="qwen3",
        default_head_dim=QWEN3_HEAD_DIM,
        attention={"qkv_bias": has_bias, "output_bias": has_bias, "head_norms": True},
    )


def _read(
    config: ConfigReader, architecture: str, *, attention: dict[str, Any], **own: Any
) -> ModelSpec:
    config.require("use_mrope", (False,), "angles of three axes are for pictures; only false is")
    config.require(
        "dual_chunk_attention_config",
        (),
        "attention in chunks, which the checkpoints for a million tokens use, is not supported; "
        "remove it and lower max_position_embeddings to the length before: nothing else differs",
    )
    if not config.has("num_key_value_heads"):
        config.note("num_key_value_heads is missing; it has no sensible default in a Qwen")
    attention = attention | {"windows": _read_windows(config)}
    return read_decoder(config, architecture, attention=attention, **own)


def _read_windows(config: ConfigReader) -> tuple[int, ...]:
    """Return the window of each layer: none without use_sliding_window, whatever else is
    written."""
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    if not config.flag("use_sliding_window", default=False):
        plain = ["full_attention"] * num_layers
        config.require(
            "layer_types", (plain,), "without use_sliding_window no layer may have a window"
        )
        config.pass_over(["sliding_window", "max_window_layers"])
        return ()
    if config.has("layer_types"):
        config.pass_over(["max_window_layers"])
        return read_layer_windows(config)
    first = config.whole("max_window_layers", 0, 10_000, default=DEFAULT_WINDOW_LAYERS)
    if config.is_null("sliding_window"):
        return ()
    window = config.whole("sliding_window", 1, 2**27, default=DEFAULT_WINDOW)
    windows = tuple(window if layer >= first else 0 for layer in range(num_layers))
    return windows if any(windows) else ()
