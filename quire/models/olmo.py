"""OLMo 2 and OLMo 3: norms after each half of a layer, none before it.

What goes into a product is the stream itself. Queries and keys are normed over their whole width,
all heads together, before they are rotated. Three layers of four of an OLMo 3 see a window only,
and their angles are never scaled. Read `build_olmo` as a forward pass.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import (
    MAX_POSITIONS,
    MIN_POSITIONS,
    read_decoder,
    read_layer_windows,
)
from quire.models.rope_reader import read_rope_by_layer
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.program import Program
from quire.program.tensors import DType, View

OLMO3_THETA = 500_000.0  # where a configuration has none
OLMO3_WINDOW = 4_096
OLMO3_PATTERN = 4  # every fourth layer sees everything


def read_olmo2(config: ConfigReader, architecture: str) -> ModelSpec:
    """The spec; raises ConfigError with every problem of the file."""
    has_bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config, architecture, model_type="olmo2", qkv_bias=has_bias, output_bias=has_bias
    )


def read_olmo3(config: ConfigReader, architecture: str) -> ModelSpec:
    """The spec; raises ConfigError with every problem of the file."""
    has_bias = config.flag("attention_bias", default=False)
    config.require("rope_local_base_freq", (), "layers with a window turn by rope_theta too")
    theta = config.number("rope_theta", 2.0, 1e15, default=OLMO3_THETA)
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    everywhere, windowed = read_rope_by_layer(config, max_positions, theta=theta, local_theta=theta)
    return read_decoder(
        config,
        architecture,
        model_type="olmo3",
        qkv_bias=has_bias,
        output_bias=has_bias,
        rope=everywhere,
        local_rope=windowed,
        windows=_read_windows(config),
    )


def build_olmo(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """The program of an OLMo 2 or 3; activations, products and cache in `dtype`, residual f32."""
    p = layers.begin(spec, dtype)
    angles = layers.ropes(p, spec, max_positions)

    x, head = layers.embed(p, spec)  # [T, H]
    delta: View | None = None
    for layer in range(spec.num_layers):
        source = f"model.layers.{layer}."
        h = p.rounded(x if delta is None else p.add(x, delta))
        q, k, v = layers.qkv(p, spec, h, layer)
        q = layers.rms_norm(p, spec, q, f"{source}self_attn.q_norm")
        k = layers.rms_norm(p, spec, k, f"{source}self_attn.k_norm")
        layers.rotate(p, spec, q, k, layer, angles)
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        out = layers.attention_out(p, spec, attended, layer, dtype=DType.F32)  # [T, H]
        delta = _normed(p, spec, out, f"{source}post_attention_layernorm")
        h = p.rounded(p.add(x, delta))
        out = layers.gated_mlp(p, spec, h, layer, dtype=DType.F32)  # [T, H]
        delta = _normed(p, spec, out, f"{source}post_feedforward_layernorm")
    return layers.finish(p, spec, x, delta, head, max_positions=max_positions)


def _normed(p: ProgramBuilder, spec: ModelSpec, out: View, source: str) -> View:
    """What a half of a layer adds to the stream [T, H]: it meets no product, so it is f32."""
    return layers.rms_norm(p, spec, out, source, dtype=DType.F32)


def _read_windows(config: ConfigReader) -> tuple[int, ...]:
    """The window of each layer; the pattern of all OLMo 3 where layer_types is absent."""
    if config.has("layer_types"):
        return read_layer_windows(config)
    window = config.whole("sliding_window", 1, 2**27, default=OLMO3_WINDOW)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    return tuple(0 if (layer + 1) % OLMO3_PATTERN == 0 else window for layer in range(num_layers))
