"""How a GGUF file says its angles are made, in the words of a config.json.

linear and yarn are metadata. Llama 3's scaling is not: the converter computes what each pair's
frequency is divided by and writes those divisors as a tensor, so the settings are found by trying
those that models were published with; where none gives the file's divisors, they count themselves.
Phi-3's two lists (longrope) are tensors too. Source: conversion/llama.py, conversion/phi.py and
llama-model.cpp (ggml-org/llama.cpp).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.gguf_model import GgufModel
from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.gguf_values import decimal
from quire.models.spec import RopeSettings

FREQUENCY_DIVISORS = "rope_freqs.weight"
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
MAX_PAIRS = 1 << 15
LLAMA3_BANDS = (1.0, 4.0)  # low and high frequency factors of every published Llama
LLAMA3_LENGTHS = tuple(1 << power for power in range(4, 21))
# Divisors are float32 and were computed in it: equal settings agree to a few roundings.
CLOSE = 1e-5

_SCALING = "rope.scaling."


def read_scaling(config: ConfigReader, model: GgufModel) -> dict[str, Any] | None:
    """Return the rope_scaling of a config.json, None where angles are plain; problems are noted."""
    config.pass_over([f"{_SCALING}finetuned", f"{_SCALING}original_context_length"])
    old = config.number("rope.scale_linear", 1, 1e6, default=1.0)
    kinds = {"none": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
    kind = config.choice(f"{_SCALING}type", kinds, default="linear")
    factor = config.number(f"{_SCALING}factor", 0, 1e6, default=old) or 1.0
    if kind == "yarn":
        return _read_yarn(config, factor)
    if kind == "longrope" and LONG_DIVISORS not in model.tensors:
        config.note(f"{_SCALING}type is longrope, but there is no tensor {LONG_DIVISORS}")
    if kind == "linear" and factor != 1:
        return {"rope_type": "linear", "factor": factor}
    return None


def _read_yarn(config: ConfigReader, factor: float) -> dict[str, Any]:
    config.require(
        f"{_SCALING}yarn_ext_factor", (1.0, -1.0), "only 1, the usual ramp, is supported"
    )
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": config.whole(
            f"{_SCALING}original_context_length", 1, 2**30
        ),
    }
    for name in ("beta_fast", "beta_slow"):
        if config.has(f"{_SCALING}yarn_{name}"):
            scaling[name] = config.number(f"{_SCALING}yarn_{name}", 1e-6, 1e6)
    return scaling


def llama3_scaling(
    divisors: NDArray[np.float32], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """Return the settings that give these divisors, None where no published ones do."""
    low, high = LLAMA3_BANDS
    factor = decimal(float(divisors.max()))
    if not math.isfinite(factor) or factor <= 1:
        return None
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for length in LLAMA3_LENGTHS:
        smooth = np.clip((length / waves - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if expected.shape == divisors.shape and np.allclose(expected, divisors, CLOSE, 0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    return None


def divided(divisors: NDArray[np.float32], theta: float, max_positions: int) -> RopeSettings:
    """Return angles with frequencies divided by `divisors`, whatever made them."""
    factors = tuple(float(divisor) for divisor in divisors)
    return RopeSettings(
        kind="longrope",
        theta=theta,
        original_max_positions=max_positions,
        attention_factor=1.0,
        short_factors=factors,
        long_factors=factors,
    )


def read_divisors(
    config: ConfigReader, model: GgufModel, name: str, num_pairs: int
) -> NDArray[np.float32] | None:
    """Return the positive numbers of a tensor of divisors, None where it is absent or of no use."""
    stored = model.tensors.get(name)
    if stored is None:
        return None
    if stored.type.name != "F32" or stored.shape != (num_pairs,) or num_pairs > MAX_PAIRS:
        config.note(
            f"tensor {name} is {stored.type.name} {list(stored.shape)}; F32 [{num_pairs}], one a "
            "rotated pair, is needed"
        )
        return None
    values = model.holder(name).raw(stored).view("<f4").astype(np.float32)
    if not bool(np.all((values >= 1e-6) & (values <= 1e6))):
        config.note(f"tensor {name} holds {show(values.tolist())}; numbers from 1e-6 to 1e6 are")
        return None
    return values


def read_longrope(
    config: ConfigReader, model: GgufModel, num_pairs: int, max_positions: int
) -> dict[str, Any] | None:
    """Phi-3's rope_scaling, None where the file has no lists; problems are noted."""
    long = read_divisors(config, model, LONG_DIVISORS, num_pairs)
    short = read_divisors(config, model, SHORT_DIVISORS, num_pairs)
    original = config.whole(f"{_SCALING}original_context_length", 1, 2**30, default=max_positions)
    factor = config.number(f"{_SCALING}attn_factor", 1e-6, 1e6, default=1.0)
    if long is None or short is None:
        if (long is None) != (short is None):
            config.note(f"{LONG_DIVISORS} and {SHORT_DIVISORS} belong together; one is there")
        return None
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [decimal(float(value)) for value in long],
        "short_factor": [decimal(float(value)) for value in short],
        "original_max_position_embeddings": original,
    }
    if not _follows(factor, max_positions, original):
        scaling["attention_factor"] = factor
    return scaling


def _follows(factor: float, max_positions: int, original: int) -> bool:
    """Return whether longrope's factor on cos and sin is the one that follows from the lengths."""
    stretched = max_positions / original
    usual = 1.0
    if stretched > 1 and original > 1:
        usual = math.sqrt(1 + math.log(stretched) / math.log(original))
    return bool(np.float32(factor) == np.float32(usual))
