"""StarCoder 2: a Llama with layer norms, biases everywhere and a feed-forward half without a gate.

All its layers see a window, where the configuration has one. Read `build_starcoder2` as a forward
pass; T token rows, H hidden width, D head width.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_POSITIONS, MIN_POSITIONS, read_decoder
from quire.models.layers import Ropes
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.forms import NormForm
from quire.program.program import Program
from quire.program.tensors import DType, View


def read_starcoder2(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.pass_over(["embedding_dropout", "residual_dropout"])  # which only training has
    config.require("mlp_type", ("default",), "only 'default' is supported")
    config.require("norm_type", ("layer_norm",), "only 'layer_norm' is supported")
    is_biased = config.flag("use_bias", default=True)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    window = config.whole("sliding_window", 1, 2**31, default=MAX_POSITIONS)
    return read_decoder(
        config,
        architecture,
        model_type="starcoder2",
        default_activation="gelu_tanh",
        default_tied=True,
        norm={
            "eps": config.number("norm_epsilon", 1e-12, 0.1, default=1e-5),
            "form": NormForm.LAYER,
            "has_bias": True,
        },
        attention={
            "qkv_bias": is_biased,
            "output_bias": is_biased,
            "windows": (window,) * num_layers if window < max_positions else (),
        },
        mlp={"bias": is_biased},
    )


def _layer(
    p: ProgramBuilder, spec: ModelSpec, x: View, delta: View | None, layer: int, ropes: Ropes
) -> View:
    source = f"model.layers.{layer}."
    h = layers.norm(p, spec, x, f"{source}input_layernorm", delta)
    delta = layers.self_attention(p, spec, layers.qkv(p, spec, h, layer), layer, ropes)
    h = layers.norm(p, spec, x, f"{source}post_attention_layernorm", delta)
    up, down = f"{source}mlp.c_fc", f"{source}mlp.c_proj"
    return layers.plain_mlp(p, spec, h, layer, up=up, down=down)


def build_starcoder2(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of a StarCoder 2."""
    return layers.decoder(spec, _layer, dtype=dtype, max_positions=max_positions)
