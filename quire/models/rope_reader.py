"""Reads how a configuration scales its rotary angles, in the old form and in the new.

Old: `rope_theta` at the top and `rope_scaling` {"type" or "rope_type", "factor", ...} or null.
New (transformers 5): `rope_parameters` with theta inside, or with a part for each type of layer.
Either works; both at once, or values that disagree, are problems. Each kind of scaling has its
own keys; a key of another kind is unknown. Knows no formula (rope.py has them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.rope import yarn_attention_scale
from quire.models.spec import RopeSettings

# What the width of a head follows from.
HEAD_DIM_KEYS = ("head_dim", "hidden_size", "num_attention_heads")
# What a configuration calls a kind, and what it is here ("su" is what Phi-3 first called longrope).
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "default": "default",
        "linear": "linear",
        "dynamic": "dynamic",
        "llama3": "llama3",
        "yarn": "yarn",
        "longrope": "longrope",
        "su": "longrope",
    }
)
DEFAULT_THETA = 10_000.0
MIN_THETA, MAX_THETA = 2.0, 1e15
MAX_FACTOR = 1e6
MAX_LENGTH = 2**30


def read_rope(
    config: ConfigReader,
    max_positions: int,
    *,
    partial: bool = False,
    kinds: Mapping[str, str] = KINDS,
    theta: float = DEFAULT_THETA,
    share: float = 1.0,
) -> RopeSettings:
    """Return the settings; problems are noted in `config`.

    max_positions: max_position_embeddings. partial: the family rotates the part of a head that
    partial_rotary_factor says; others refuse any but the whole. kinds: those the family has.
    theta, share: where the configuration gives none.
    """
    share = _read_share(config, partial, share)
    theta = config.number("rope_theta", MIN_THETA, MAX_THETA, default=theta)
    original = _read_original_length(config, 0)
    section = _one_section(config)
    if section is None:
        return RopeSettings(theta=theta, rotary_share=share)
    theta = _read_theta(config, section, "rope_theta", theta)
    if section.has("partial_rotary_factor"):
        share = _read_share(section, partial, share)
    settings = _read_section(section, theta, max_positions, kinds, original)
    config.absorb(section)
    return replace(settings, rotary_share=share)


def read_rope_by_layer(
    config: ConfigReader, max_positions: int, *, theta: float, local_theta: float
) -> tuple[RopeSettings, RopeSettings]:
    """Return settings of layers that see everything, and of those with a window, as Gemma 3 has
    them.

    Old form: rope_theta and rope_scaling are the former's, rope_local_base_freq the latter's
    (which are never scaled). New form: rope_parameters {"full_attention", "sliding_attention"}.
    theta and local_theta stand where the configuration gives none.
    """
    everywhere = RopeSettings(
        theta=config.number("rope_theta", MIN_THETA, MAX_THETA, default=theta)
    )
    windowed = RopeSettings(
        theta=config.number("rope_local_base_freq", MIN_THETA, MAX_THETA, default=local_theta)
    )
    if not config.has("rope_parameters"):
        section = config.section("rope_scaling")
        if section is not None:
            everywhere = _read_section(section, everywhere.theta, max_positions, KINDS, 0)
            config.absorb(section)
        return everywhere, windowed
    by_layer = _one_section(config)
    if by_layer is None:
        return everywhere, windowed
    full, local = by_layer.section("full_attention"), by_layer.section("sliding_attention")
    if full is not None:
        theta = _read_theta(config, full, "rope_theta", everywhere.theta)
        everywhere = _read_section(full, theta, max_positions, KINDS, 0)
        by_layer.absorb(full)
    if local is not None:
        theta = _read_theta(config, local, "rope_local_base_freq", windowed.theta)
        windowed = _read_section(local, theta, max_positions, KINDS, 0)
        by_layer.absorb(local)
    config.absorb(by_layer)
    return everywhere, windowed


def check_rotated_columns(config: ConfigReader, rope: RopeSettings, head_dim: int) -> None:
    """Note where too little or an odd part of a head is rotated, or longrope's lists do not fit."""
    rotated = int(head_dim * rope.rotary_share)
    least = 4 if rope.kind == "dynamic" else 2
    if rotated < least or (rope.rotary_share != 1 and rotated % 2):
        config.note(
            f"{rotated} columns of a head would be rotated (head_dim {head_dim}, "
            f"partial_rotary_factor {rope.rotary_share:g}); an even number from {least} is needed",
            of=HEAD_DIM_KEYS,
        )
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and factors and len(factors) != rotated // 2:
            config.note(
                f"{name} has {len(factors)} numbers; one for each of the {rotated // 2} rotated "
                "pairs of a head is needed",
                of=HEAD_DIM_KEYS,
            )


def _one_section(config: ConfigReader) -> ConfigReader | None:
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    if old is not None and new is not None:
        config.note("rope_scaling and rope_parameters are both given; keep one")
    return new if new is not None else old


def _read_theta(config: ConfigReader, section: ConfigReader, top: str, theta: float) -> float:
    """rope_theta of the section where it has one, else `theta`, which `top` gave."""
    if not section.has("rope_theta"):
        return theta
    num_problems = len(section.problems)
    inner = section.number("rope_theta", MIN_THETA, MAX_THETA)
    if config.has(top) and inner != theta and len(section.problems) == num_problems:
        config.note(
            f"{top} is {theta:g} at the top and {inner:g} in {section.where}; they must agree",
            of=(top,),
        )
    return inner


def _read_share(config: ConfigReader, partial: bool, default: float) -> float:
    """partial_rotary_factor."""
    share = config.number("partial_rotary_factor", 1e-3, 1, default=default)
    if share != 1 and not partial:
        config.note(
            f"partial_rotary_factor is {share:g}: rotating a part of a head is not supported for "
            "this architecture; only 1.0 is",
            of=("partial_rotary_factor",),
        )
    return share


def _read_original_length(config: ConfigReader, default: int) -> int:
    """original_max_position_embeddings: the length of pretraining, before angles were scaled."""
    return config.whole("original_max_position_embeddings", 1, MAX_LENGTH, default=default)


def _read_section(
    section: ConfigReader,
    theta: float,
    max_positions: int,
    kinds: Mapping[str, str],
    original: int,
) -> RopeSettings:
    """original: the length of pretraining that the top of the configuration gives, or 0."""
    section.pass_over(["rope_theta", "partial_rotary_factor"])
    kind = _read_kind(section, kinds)
    if kind == "default":
        # Written there by transformers whatever the kind; only scalings look at it.
        section.pass_over(["original_max_position_embeddings"])
        return RopeSettings(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeSettings(
            kind=kind,
            theta=theta,
            factor=section.number("factor", 1, MAX_FACTOR),
            original_max_positions=max_positions if kind == "dynamic" else 0,
        )
    length = _read_original_length(section, original or max_positions)
    if original and length != original:
        section.note(
            f"original_max_position_embeddings is {length}, and {original} at the top; "
            "they must agree"
        )
    if kind == "llama3":
        return _read_llama3(section, theta, length)
    if kind == "longrope":
        return _read_longrope(section, theta, length, max_positions)
    return _read_yarn(section, theta, length, max_positions)


def _read_kind(section: ConfigReader, kinds: Mapping[str, str]) -> str:
    old, new = section.take("type"), section.take("rope_type")
    known = ", ".join(kinds)
    found = [kind for kind in (new, old) if kind is not None]
    if not found:
        section.note(f"rope_type is missing; one of {known} is needed")
        return "default"
    for kind in found:
        if not isinstance(kind, str) or kind not in kinds:
            section.note(f"rope_type is {show(kind)}, not supported; {known} are")
            # The other keys belong to an unknown kind: one problem is enough.
            section.pass_over_all()
            return "default"
    if len({kinds[kind] for kind in found}) > 1:
        section.note(f"type is {show(old)} and rope_type {show(new)}; they must agree")
    return kinds[found[0]]


def _read_llama3(section: ConfigReader, theta: float, length: int) -> RopeSettings:
    low = section.number("low_freq_factor", 1e-6, MAX_FACTOR)
    high = section.number("high_freq_factor", 1e-6, MAX_FACTOR)
    if not section.problems and high <= low:
        section.note(f"high_freq_factor is {high:g}, low_freq_factor {low:g}; it must be greater")
    return RopeSettings(
        kind="llama3",
        theta=theta,
        factor=section.number("factor", 1, MAX_FACTOR),
        original_max_positions=length,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_longrope(
    section: ConfigReader, theta: float, length: int, max_positions: int
) -> RopeSettings:
    if length < 2:
        section.note(f"original_max_position_embeddings is {length}; at least 2 is needed")
    return RopeSettings(
        kind="longrope",
        theta=theta,
        factor=section.number("factor", 1e-6, MAX_FACTOR, default=max_positions / length),
        original_max_positions=length,
        attention_factor=_read_attention_factor(section),
        short_factors=_read_factors(section, "short_factor"),
        long_factors=_read_factors(section, "long_factor"),
    )


def _read_factors(section: ConfigReader, key: str) -> tuple[float, ...]:
    """Return a list of positive numbers; its length is checked where head_dim is known."""
    listed = section.take(key)
    if isinstance(listed, list) and listed:
        for factor in listed:
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not is_number or not 1e-6 <= factor <= MAX_FACTOR:
                section.note(f"{key} holds {show(factor)}; numbers from 1e-06 to 1e+06 are allowed")
                return ()
        return tuple(float(factor) for factor in listed)
    section.note(f"{key} is {show(listed)}; a list of numbers, one a rotated pair, is needed")
    return ()


def _read_yarn(
    section: ConfigReader, theta: float, length: int, max_positions: int
) -> RopeSettings:
    section.pass_over(["finetuned"])
    section.require("extrapolation_factor", (1, 1.0), "only 1, which changes nothing, is supported")
    factor = section.number("factor", 1, MAX_FACTOR, default=max(1.0, max_positions / length))
    settings = RopeSettings(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=length,
        beta_fast=section.number("beta_fast", 1e-6, MAX_FACTOR, default=32.0),
        beta_slow=section.number("beta_slow", 1e-6, MAX_FACTOR, default=1.0),
        attention_factor=_read_yarn_attention_factor(section, factor),
        mscale=section.number("mscale", 0, MAX_FACTOR, default=0.0),
        mscale_all_dim=section.number("mscale_all_dim", 0, MAX_FACTOR, default=0.0),
        truncate=section.flag("truncate", default=True),
    )
    if settings.beta_fast < settings.beta_slow:
        section.note(
            f"beta_fast is {settings.beta_fast:g}, below beta_slow {settings.beta_slow:g}; "
            "it must not be",
            of=("beta_fast", "beta_slow"),
        )
    return settings


def _read_yarn_attention_factor(section: ConfigReader, factor: float) -> float | None:
    """attention_factor; or attn_factor, which multiplies what follows from `factor` alone.

    The latter is YaRN's own word (https://github.com/jquesnel/yarn), which DeepSeek's distilled
    Qwen 3 uses to switch the factor off; transformers passes over it and keeps the factor.
    """
    if not section.has("attn_factor"):
        return _read_attention_factor(section)
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        section.require(key, (), "attn_factor says what it says; keep one of the two")
    return section.number("attn_factor", 1e-6, MAX_FACTOR) * yarn_attention_scale(factor)


def _read_attention_factor(section: ConfigReader) -> float | None:
    """Return the factor on cos and sin, None where it follows from the other settings."""
    if not section.has("attention_factor"):
        return None
    return section.number("attention_factor", 1e-6, MAX_FACTOR)
