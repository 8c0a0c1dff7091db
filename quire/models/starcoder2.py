"""StarCoder 2: a Llama with layer norms, biases everywhere and a feed-forward half without a gate.

All its layers see a window, where the configuration has one. Read `build_starcoder2` as a forward
pass; T token rows, H hidden width, D head width.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_POSITIONS, MIN_POSITIONS, read_decoder
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.tensors import DType, View


def read_starcoder2(config: ConfigReader, architecture: str) -> ModelSpec:
    """The spec; raises ConfigError with every problem of the file."""
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
        norm_eps=config.number("norm_epsilon", 1e-12, 0.1, default=1e-5),
        norm_form="layer",
        norm_bias=True,
        qkv_bias=is_biased,
        output_bias=is_biased,
        mlp_bias=is_biased,
        windows=(window,) * num_layers if window < max_positions else (),
    )


def build_starcoder2(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """The program of a StarCoder 2; activations, products and cache in `dtype`, residual in f32."""
    p = layers.begin(spec, dtype)
    angles = layers.ropes(p, spec, max_positions)

    x, head = layers.embed(p, spec)  # [T, H]
    delta: View | None = None
    for layer in range(spec.num_layers):
        source = f"model.layers.{layer}."
        h = layers.norm(p, spec, x, f"{source}input_layernorm", delta)
        q, k, v = layers.qkv(p, spec, h, layer)
        layers.rotate(p, spec, q, k, layer, angles)
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        delta = layers.attention_out(p, spec, attended, layer)  # [T, H]
        h = layers.norm(p, spec, x, f"{source}post_attention_layernorm", delta)
        up, down = f"{source}mlp.c_fc", f"{source}mlp.c_proj"
        delta = layers.plain_mlp(p, spec, h, layer, up=up, down=down)  # [T, H]
    return layers.finish(p, spec, x, delta, head, max_positions=max_positions)
