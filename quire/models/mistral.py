"""Mistral: Llamas that may have a window in all layers (Mistral 7B, Nemo, Small; Zephyr).

Ministral is the same with a window in some layers. Their ModelSpec says it all, so `build_llama`
is their builder.
"""

from __future__ import annotations

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder, read_layer_windows
from quire.models.spec import ModelSpec

DEFAULT_WINDOW = 4_096  # where sliding_window is absent; null is none
MAX_WINDOW = 2**27


def read_mistral(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    windows = _read_window(config)
    if config.has("layer_types"):
        # transformers passes over layer_types in a Mistral: they may not say otherwise.
        wanted = "sliding_attention" if windows else "full_attention"
        types = config.take("layer_types")
        if not isinstance(types, list) or any(kind != wanted for kind in types):
            config.note(
                f"layer_types is {show(types)}: with this sliding_window all layers of a Mistral "
                f"are {wanted!r}; layers that differ make it a MinistralForCausalLM"
            )
    return _read(config, architecture, model_type="mistral", windows=windows)


def read_ministral(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    if config.has("layer_types"):
        windows = read_layer_windows(config)
    else:
        windows = _read_window(config)
    return _read(config, architecture, model_type="ministral", windows=windows)


def _read(
    config: ConfigReader, architecture: str, *, model_type: str, windows: tuple[int, ...]
) -> ModelSpec:
    if not config.has("num_key_value_heads"):
        config.note("num_key_value_heads is missing; it has no sensible default in a Mistral")
    attention = {"windows": windows}
    return read_decoder(config, architecture, model_type=model_type, attention=attention)


def _read_window(config: ConfigReader) -> tuple[int, ...]:
    """Return the window of each layer, the same for all; empty where sliding_window is null."""
    if config.is_null("sliding_window"):
        return ()
    window = config.whole("sliding_window", 1, MAX_WINDOW, default=DEFAULT_WINDOW)
    return (window,) * config.whole("num_hidden_layers", 1, 10_000)
