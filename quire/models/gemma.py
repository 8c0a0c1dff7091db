"""Gemma and CodeGemma (GemmaForCausalLM), and what the configurations of all Gemmas share.

The first Gemma is a Llama with embeddings scaled by the square root of the hidden width, and norms
that add 1 to their stored weights; its builder is Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder, read_layer_windows
from quire.models.spec import ModelSpec

HEAD_DIM = 256  # of every Gemma, unless its configuration gives one
# "gelu" in a Gemma's configuration has always meant its approximation by tanh.
GEMMA_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


def read_gemma(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    activation = config.choice("hidden_act", GEMMA_ACTIVATIONS, default="gelu_tanh")
    # The key that replaced hidden_act for a while, null in most files: it must not disagree.
    config.choice("hidden_activation", GEMMA_ACTIVATIONS, default="gelu_tanh")
    mlp = {"activation": activation}
    return read_any_gemma(config, architecture, model_type="gemma", mlp=mlp)


def read_any_gemma(
    config: ConfigReader,
    architecture: str,
    *,
    model_type: str,
    attention: Mapping[str, Any] = MappingProxyType({}),
    **own: Any,
) -> ModelSpec:
    """Return the spec with what all Gemmas have in common; `own` are fields one generation has
    read."""
    config.pass_over(["cache_implementation"])
    config.require(
        "use_bidirectional_attention", (False,), "a model that sees ahead cannot generate text"
    )
    if not config.has("num_key_value_heads"):
        config.note("num_key_value_heads is missing; it has no sensible default in a Gemma")
    has_bias = config.flag("attention_bias", default=False)
    hidden_size = config.whole("hidden_size", 1, 2**20)
    return read_decoder(
        config,
        architecture,
        model_type=model_type,
        default_tied=True,
        default_head_dim=HEAD_DIM,
        attention={"qkv_bias": has_bias, "output_bias": has_bias} | dict(attention),
        norm={"offset": 1.0},
        embedding={"scale": hidden_size**0.5},
        **own,
    )


def read_windows(config: ConfigReader, *, pattern: int) -> tuple[int, ...]:
    """By layer_types; where there are none, each layer has a window but every `pattern`th."""
    if config.has("layer_types"):
        return read_layer_windows(config)
    window = config.whole("sliding_window", 1, 2**27)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    windows = tuple(window if (layer + 1) % pattern else 0 for layer in range(num_layers))
    return windows if any(windows) else ()


def read_soft_cap(config: ConfigReader, key: str, default: float) -> float:
    """Return the cap, 0 where null switches it off; `default` where the key is absent."""
    if config.is_null(key):
        config.pass_over([key])
        return 0.0
    return config.number(key, 1e-3, 1e6, default=default)


def read_query_scale(config: ConfigReader) -> float:
    """Return the factor on q.k: query_pre_attn_scalar stands where others have head_dim."""
    return 1 / math.sqrt(config.number("query_pre_attn_scalar", 1e-3, 1e6, default=256.0))
