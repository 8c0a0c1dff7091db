"""Granite 3: a Llama that multiplies embeddings, scores, sums and logits by constants.

Its ModelSpec says all of that, so `build_llama` is its builder. (Granite 4 is another family.)
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder
from quire.models.spec import ModelSpec

LEAST, MOST = 1e-6, 1e6  # multipliers beyond these are mistakes


def read_granite(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    has_bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config,
        architecture,
        model_type="granite",
        attention={
            "qkv_bias": has_bias,
            "output_bias": has_bias,
            "scale": config.number("attention_multiplier", LEAST, MOST, default=1.0),
        },
        mlp={"bias": config.flag("mlp_bias", default=False)},
        embedding={"scale": config.number("embedding_multiplier", LEAST, MOST, default=1.0)},
        residual_scale=config.number("residual_multiplier", LEAST, MOST, default=1.0),
        head={"scale": 1 / config.number("logits_scaling", LEAST, MOST, default=1.0)},
    )
