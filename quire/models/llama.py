"""The Llama family: Llama 2, 3, 3.1, 3.2 and checkpoints of the same architecture (SmolLM 1 and 2).

Read `build_llama` as a forward pass; it runs once and writes the program down. It is also the
builder of families that differ from Llama in what their ModelSpec says only.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder
from quire.models.expert_layers import feed_forward
from quire.models.layers import Ropes
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.program import Program
from quire.program.tensors import DType, View


def read_llama(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.require("pretraining_tp", (1,), "sums split as in pretraining are not supported")
    config.require("sliding_window", (), "Llamas have no sliding window; only null is supported")
    has_bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config,
        architecture,
        model_type="llama",
        attention={"qkv_bias": has_bias, "output_bias": has_bias},
        mlp={"bias": config.flag("mlp_bias", default=False)},
    )


def _layer(
    p: ProgramBuilder, spec: ModelSpec, x: View, delta: View | None, layer: int, ropes: Ropes
) -> View:
    source = f"model.layers.{layer}."
    h = layers.norm(p, spec, x, f"{source}input_layernorm", delta)
    delta = layers.self_attention(p, spec, layers.qkv(p, spec, h, layer), layer, ropes)
    h = layers.norm(p, spec, x, f"{source}post_attention_layernorm", delta)
    return feed_forward(p, spec, h, layer)


def build_llama(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of a Llama."""
    return layers.decoder(spec, _layer, dtype=dtype, max_positions=max_positions)
