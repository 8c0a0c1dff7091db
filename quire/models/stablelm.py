"""StableLM 2 of 1.6B, StableLM 3B and its Zephyr: Llamas with layer norms and partly turned heads.

Their ModelSpec says it all, so `build_llama` is their builder. (The 12B norms each head by a
weight of its own and computes both halves of a layer from one norm: it is refused by these keys.)
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_POSITIONS, MIN_POSITIONS, read_decoder
from quire.models.rope_reader import read_rope
from quire.models.spec import ModelSpec, RotarySpec
from quire.program.forms import NormForm

ROTARY_SHARE = 0.25  # where a configuration does not say


def read_stablelm(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.require("qk_layernorm", (False,), "norms on queries and keys are not supported here")
    config.require("use_parallel_residual", (False,), "halves side by side are not supported")
    num_heads = config.whole("num_attention_heads", 1, 2**16)
    config.require("num_heads", (num_heads,), "it must agree with num_attention_heads")
    config.require("head_dim", (), "it is hidden_size / num_attention_heads in a StableLM")
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    return read_decoder(
        config,
        architecture,
        model_type="stablelm",
        norm={
            "eps": config.number("layer_norm_eps", 1e-12, 0.1, default=1e-5),
            "form": NormForm.LAYER,
            "has_bias": True,
        },
        attention={"qkv_bias": config.flag("use_qkv_bias", default=False)},
        rotary=RotarySpec(full=read_rope(config, max_positions, partial=True, share=ROTARY_SHARE)),
    )
