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
from quire.models.layers import Ropes
from quire.models.rope_reader import read_rope_by_layer
from quire.models.spec import ModelSpec, RotarySpec
from quire.program.builder import ProgramBuilder
from quire.program.program import Program
from quire.program.tensors import DType, View

OLMO3_THETA = 500_000.0  # where a configuration has none
OLMO3_WINDOW = 4_096
OLMO3_PATTERN = 4  # every fourth layer sees everything


def read_olmo2(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    has_bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config,
        architecture,
        model_type="olmo2",
        attention={"qkv_bias": has_bias, "output_bias": has_bias},
    )


def read_olmo3(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    has_bias = config.flag("attention_bias", default=False)
    config.require("rope_local_base_freq", (), "layers with a window turn by rope_theta too")
    theta = config.number("rope_theta", 2.0, 1e15, default=OLMO3_THETA)
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    everywhere, windowed = read_rope_by_layer(config, max_positions, theta=theta, local_theta=theta)
    return read_decoder(
        config,
        architecture,
        model_type="olmo3",
        attention={"qkv_bias": has_bias, "output_bias": has_bias, "windows": _read_windows(config)},
        rotary=RotarySpec(full=everywhere, windowed=windowed),
    )


def _layer(
    p: ProgramBuilder, spec: ModelSpec, x: View, delta: View | None, layer: int, ropes: Ropes
) -> View:
    source, f32 = f"model.layers.{layer}.", DType.F32
    h = p.rounded(x if delta is None else p.add(x, delta))
    q, k, v = layers.qkv(p, spec, h, layer)
    q = layers.norm(p, spec, q, f"{source}self_attn.q_norm")
    k = layers.norm(p, spec, k, f"{source}self_attn.k_norm")
    # The outputs of both halves are normed and added to the stream, not multiplied: f32.
    out = layers.self_attention(p, spec, (q, k, v), layer, ropes, dtype=f32)
    delta = layers.norm(p, spec, out, f"{source}post_attention_layernorm", dtype=f32)
    h = p.rounded(p.add(x, delta))
    out = layers.gated_mlp(p, spec, h, layer, dtype=f32)
    return layers.norm(p, spec, out, f"{source}post_feedforward_layernorm", dtype=f32)


def build_olmo(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of an OLMo 2 or 3."""
    return layers.decoder(spec, _layer, dtype=dtype, max_positions=max_positions)


def _read_windows(config: ConfigReader) -> tuple[int, ...]:
    """Return the window of each layer; the pattern of all OLMo 3 where layer_types is absent."""
    if config.has("layer_types"):
        return read_layer_windows(config)
    window = config.whole("sliding_window", 1, 2**27, default=OLMO3_WINDOW)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    return tuple(0 if (layer + 1) % OLMO3_PATTERN == 0 else window for layer in range(num_layers))
