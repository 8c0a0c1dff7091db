"""SmolLM 3: a Llama with some layers that have no rotary angles. (SmolLM 1 and 2 are Llamas.)

Its ModelSpec says which, so `build_llama` is its builder.
"""

from __future__ import annotations

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import (
    MAX_POSITIONS,
    MIN_POSITIONS,
    read_decoder,
    read_layer_windows,
)
from quire.models.rope_reader import read_rope
from quire.models.spec import ModelSpec, RotarySpec

THETA = 2e6  # where a configuration has none
INTERVAL = 4  # every fourth layer is not rotated, likewise


def read_smollm3(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.pass_over(["pretraining_tp", "max_window_layers"])  # left over from other families
    if not config.has("num_key_value_heads"):
        config.note("num_key_value_heads is missing; it has no sensible default in a SmolLM 3")
    has_bias = config.flag("attention_bias", default=False)
    unrotated = _read_unrotated(config)
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    return read_decoder(
        config,
        architecture,
        model_type="smollm3",
        default_tied=True,
        rotary=RotarySpec(
            full=read_rope(config, max_positions, theta=THETA), unrotated_layers=unrotated
        ),
        attention={
            "windows": _read_windows(config, unrotated),
            "qkv_bias": has_bias,
            "output_bias": has_bias,
        },
        mlp={"bias": config.flag("mlp_bias", default=False)},
    )


def _read_unrotated(config: ConfigReader) -> frozenset[int]:
    """Return layers without angles: zeros of no_rope_layers, else every
    no_rope_layer_interval'th."""
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    interval = config.whole("no_rope_layer_interval", 1, 10_000, default=INTERVAL)
    listed = config.take("no_rope_layers")
    if listed is None:
        return frozenset(range(interval - 1, num_layers, interval))
    fine = isinstance(listed, list) and all(type(one) is int and one in (0, 1) for one in listed)
    if not fine or len(listed) < num_layers:
        config.note(
            f"no_rope_layers is {show(listed)}; a list of a 1 (rotated) or 0 for each of "
            f"num_hidden_layers {num_layers} is allowed"
        )
        return frozenset()
    return frozenset(layer for layer in range(num_layers) if not listed[layer])


def _read_windows(config: ConfigReader, unrotated: frozenset[int]) -> tuple[int, ...]:
    """Return the window of each layer: of unrotated ones, where layer_types does not say
    otherwise."""
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    if not config.flag("use_sliding_window", default=False):
        plain = ["full_attention"] * num_layers
        config.require(
            "layer_types", (plain,), "without use_sliding_window no layer may have a window"
        )
        config.pass_over(["sliding_window"])
        return ()
    if config.has("layer_types"):
        return read_layer_windows(config)
    window = config.whole("sliding_window", 1, 2**27, default=0)
    windows = tuple(window if layer in unrotated else 0 for layer in range(num_layers))
    return windows if any(windows) else ()
