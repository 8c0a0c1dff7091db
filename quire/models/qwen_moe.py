"""Qwen 1.5 and 2 with experts (Qwen2MoeForCausalLM), and Qwen 3 (Qwen3MoeForCausalLM).

Attention is that of the dense Qwens. The former have an expert that every token passes, behind a
gate, beside the chosen ones. Layers in mlp_only_layers, and those that decoder_sparse_step leaves
out, are dense. Their ModelSpec says all of that, so `build_llama` is their builder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder
from quire.models.expert_config import MAX_SIZE, read_experts, read_layer_list
from quire.models.spec import ExpertsSpec, ModelSpec


def read_qwen2_moe(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    shared_size = config.whole("shared_expert_intermediate_size", 1, MAX_SIZE)
    return _read(
        config,
        architecture,
        replace(_read_sparse(config), shared_size=shared_size, has_shared_gate=True),
        model_type="qwen2_moe",
        attention={"qkv_bias": config.flag("qkv_bias", default=True)},
    )


def read_qwen3_moe(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    has_bias = config.flag("attention_bias", default=False)
    return _read(
        config,
        architecture,
        _read_sparse(config),
        model_type="qwen3_moe",
        attention={"qkv_bias": has_bias, "output_bias": has_bias, "head_norms": True},
    )


def _read_sparse(config: ConfigReader) -> ExpertsSpec:
    """Return the experts of the layers that are not dense."""
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    dense = read_layer_list(config, "mlp_only_layers")
    step = config.whole("decoder_sparse_step", 1, 10_000, default=1)
    return read_experts(
        config,
        size_key="moe_intermediate_size",
        layers=frozenset(range(step - 1, num_layers, step)) - dense,
        normalized=config.flag("norm_topk_prob", default=False),
    )


def _read(config: ConfigReader, architecture: str, experts: ExpertsSpec, **own: Any) -> ModelSpec:
    config.require(
        "use_sliding_window",
        (False,),
        "which layers have a window differs between versions of transformers; only false is "
        "supported",
    )
    config.pass_over(["sliding_window", "max_window_layers"])
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    plain = ["full_attention"] * num_layers
    config.require("layer_types", (plain,), "no layer may have a window")
    if not config.has("num_key_value_heads"):
        config.note("num_key_value_heads is missing; it has no sensible default in a Qwen")
    return read_decoder(config, architecture, experts=experts, **own)
