"""Rotary frequencies: default, linear, dynamic, llama3, yarn, longrope, as `transformers` has them.

The steps are those of transformers' modeling_rope_utils, in float32 and in the same order; only
the power is taken in float64 and rounded once, so that the values depend on no CPU. (PyTorch's
own float32 power differs from the rounded value in the last bit for about one value in a
hundred.) Frequencies depend on the configuration and on the longest length that is served,
never on a request's own: dynamic and longrope, which `transformers` computes anew from each
sequence's length, take that length once and for all. So a token's answer never depends on how
its sequence was cut, batched or cached. Sources: RoPE (arXiv 2104.09864), YaRN (arXiv
2309.00071), LongRoPE (arXiv 2402.13753), llama3 (meta-llama/llama-models).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.models.spec import RopeSettings
from quire.program.declarations import RopeSpec

Float32s = NDArray[np.float32]


def rope_spec(settings: RopeSettings, head_dim: int, max_positions: int) -> RopeSpec:
    """Return the angles of a head's rotated columns, for requests of up to `max_positions`."""
    head_dim = int(head_dim * settings.rotary_share)
    theta = settings.theta
    if settings.kind == "dynamic":
        theta = _dynamic_theta(settings, head_dim, max_positions)
    powers = _powers(theta, head_dim)
    scale = 1.0
    if settings.kind in ("default", "dynamic"):
        inv_freq = np.float32(1) / powers
    elif settings.kind == "linear":
        inv_freq = np.float32(1) / powers / np.float32(settings.factor)
    elif settings.kind == "llama3":
        inv_freq = _llama3(np.float32(1) / powers, settings)
    elif settings.kind == "yarn":
        inv_freq = _yarn(powers, settings, head_dim)
        scale = _yarn_attention_scale(settings)
    elif settings.kind == "longrope":
        is_long = max_positions > settings.original_max_positions
        factors = settings.long_factors if is_long else settings.short_factors
        inv_freq = np.float32(1) / (np.array(factors, np.float32) * powers)
        scale = _longrope_attention_scale(settings)
    else:
        known = "default, linear, dynamic, llama3, yarn and longrope"
        raise ValueError(f"rope kind {settings.kind!r}; {known} exist")
    return RopeSpec(tuple(float(value) for value in inv_freq), scale)


def _powers(theta: float, head_dim: int) -> Float32s:
    """theta ** (2 i / head_dim) for each pair i, f32 [head_dim / 2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.array([math.pow(theta, float(e)) for e in exponents], np.float32)


def _dynamic_theta(settings: RopeSettings, head_dim: int, max_positions: int) -> float:
    """theta stretched for `max_positions`: unchanged up to the length of pretraining."""
    length, factor = settings.original_max_positions, settings.factor
    if max_positions <= length:
        return settings.theta
    times = np.float32(factor) * np.float32(max_positions) / np.float32(length)
    stretch = float(times - np.float32(factor - 1))
    power = np.float32(math.pow(stretch, head_dim / (head_dim - 2)))
    return float(np.float32(settings.theta) * power)


def _llama3(inv_freq: Float32s, settings: RopeSettings) -> Float32s:
    """Long waves are stretched by factor, short ones kept, those between blended."""
    length = settings.original_max_positions
    low, high = settings.low_freq_factor, settings.high_freq_factor
    wave = np.float32(2 * math.pi) / inv_freq
    stretched = inv_freq / np.float32(settings.factor)
    is_long = wave > np.float32(length / low)
    is_short = wave < np.float32(length / high)
    kept = np.where(is_long, stretched, inv_freq)
    smooth = (np.float32(length) / wave - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * kept / np.float32(settings.factor) + smooth * kept
    return np.where(~is_long & ~is_short, blended, kept).astype(np.float32)


def _yarn(powers: Float32s, settings: RopeSettings, head_dim: int) -> Float32s:
    """Pairs that turn often are kept, those that turn seldom stretched, with a ramp between."""
    low = _yarn_pair(settings.beta_fast, settings, head_dim)
    high = _yarn_pair(settings.beta_slow, settings, head_dim)
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    kept = np.float32(1) - ramp
    extrapolated = np.float32(1) / powers
    interpolated = np.float32(1) / (np.float32(settings.factor) * powers)
    blended: Float32s = interpolated * (np.float32(1) - kept) + extrapolated * kept
    return blended


def _yarn_pair(turns: float, settings: RopeSettings, head_dim: int) -> float:
    """Return the pair (a fraction) that makes `turns` full turns over the original length."""
    length = settings.original_max_positions
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(settings.theta))


def _yarn_attention_scale(settings: RopeSettings) -> float:
    if settings.attention_factor is not None:
        return settings.attention_factor
    if settings.mscale and settings.mscale_all_dim:
        above = yarn_attention_scale(settings.factor, settings.mscale)
        return above / yarn_attention_scale(settings.factor, settings.mscale_all_dim)
    return yarn_attention_scale(settings.factor)


def yarn_attention_scale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor on cos and sin that YaRN gives angles stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope_attention_scale(settings: RopeSettings) -> float:
    if settings.attention_factor is not None:
        return settings.attention_factor
    if settings.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(settings.factor) / math.log(settings.original_max_positions))
