"""Mixtral: a Mistral with a mixture of experts in each layer.

Two of eight experts are chosen by softmax, and their weights add up to 1. `build_llama` is the
builder.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_POSITIONS, MIN_POSITIONS, read_decoder
from quire.models.expert_config import read_experts
from quire.models.rope_reader import read_rope
from quire.models.spec import ExpertTensors, ModelSpec, RotarySpec

THETA = 1e6  # where a configuration has none
TENSORS = ExpertTensors(block="block_sparse_moe", gate_proj="w1", up_proj="w3", down_proj="w2")


def read_mixtral(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    windows: tuple[int, ...] = ()
    if config.has("sliding_window"):
        windows = (config.whole("sliding_window", 1, 2**27),) * num_layers
    if not config.has("num_key_value_heads"):
        config.note("num_key_value_heads is missing; it has no sensible default in a Mixtral")
    experts = read_experts(
        config,
        size_key="intermediate_size",
        layers=frozenset(range(num_layers)),
        normalized=True,
    )
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    return read_decoder(
        config,
        architecture,
        model_type="mixtral",
        attention={"windows": windows},
        experts=replace(experts, tensors=TENSORS),
        rotary=RotarySpec(full=read_rope(config, max_positions, theta=THETA)),
    )
