"""Reads how a configuration scales its rotary angles, in the old form and in the new.

Old: `rope_theta` at the top and `rope_scaling` {"type" or "rope_type", "factor", ...} or null.
New (transformers 5): `rope_parameters` with theta inside. Either works; both at once, or values
that disagree, are problems. Each kind of scaling has its own keys; a key of another kind is
unknown. Knows no formula (rope.py has them).
"""

from __future__ import annotations

from dataclasses import replace

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.spec import RopeSettings

KINDS = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0
MIN_THETA, MAX_THETA = 2.0, 1e15
MAX_FACTOR = 1e6
MAX_LENGTH = 2**30


def read_rope(config: ConfigReader, max_positions: int, *, partial: bool = False) -> RopeSettings:
    """The settings; problems are noted in `config`.

    partial: the family rotates the part of a head that partial_rotary_factor says; others refuse
    any but the whole.
    """
    share = _read_share(config, partial)
    theta = config.number("rope_theta", MIN_THETA, MAX_THETA, default=DEFAULT_THETA)
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    if old is not None and new is not None:
        config.note("rope_scaling and rope_parameters are both given; keep one")
    section = new if new is not None else old
    if section is None:
        return RopeSettings(theta=theta, rotary_share=share)
    if section.has("rope_theta"):
        inner = section.number("rope_theta", MIN_THETA, MAX_THETA)
        if config.has("rope_theta") and inner != theta:
            config.note(
                f"rope_theta is {theta:g} at the top and {inner:g} in {section.where}; "
                "they must agree"
            )
        theta = inner
    if section.has("partial_rotary_factor"):
        share = _read_share(section, partial)
    settings = _read_section(section, theta, max_positions)
    config.absorb(section)
    return replace(settings, rotary_share=share)


def _read_share(config: ConfigReader, partial: bool) -> float:
    """partial_rotary_factor, 1 where it is absent."""
    share = config.number("partial_rotary_factor", 1e-3, 1, default=1.0)
    if share != 1 and not partial:
        config.note(
            f"partial_rotary_factor is {share:g}: rotating a part of a head is not supported for "
            "this architecture; only 1.0 is"
        )
    return share


def _read_section(section: ConfigReader, theta: float, max_positions: int) -> RopeSettings:
    section.pass_over(["rope_theta", "partial_rotary_factor"])
    kind = _read_kind(section)
    if kind == "default":
        return RopeSettings(theta=theta)
    if kind == "linear":
        return RopeSettings(kind=kind, theta=theta, factor=section.number("factor", 1, MAX_FACTOR))
    length = section.whole("original_max_position_embeddings", 1, MAX_LENGTH, default=max_positions)
    if kind == "llama3":
        return _read_llama3(section, theta, length)
    return _read_yarn(section, theta, length, max_positions)


def _read_kind(section: ConfigReader) -> str:
    old, new = section.take("type"), section.take("rope_type")
    if old is not None and new is not None and old != new:
        section.note(f"type is {show(old)} and rope_type {show(new)}; they must agree")
    kind = new if new is not None else old
    if kind is None:
        section.note(f"rope_type is missing; one of {', '.join(KINDS)} is needed")
        return "default"
    if kind not in KINDS:
        section.note(f"rope_type is {show(kind)}, not supported; {', '.join(KINDS)} are")
        # The other keys belong to a kind nobody here knows: one problem is enough.
        section.pass_over_all()
        return "default"
    return str(kind)


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


def _read_yarn(
    section: ConfigReader, theta: float, length: int, max_positions: int
) -> RopeSettings:
    section.pass_over(["finetuned"])
    has_attention_factor = section.has("attention_factor")
    attention_factor = section.number("attention_factor", 1e-6, MAX_FACTOR, default=1.0)
    settings = RopeSettings(
        kind="yarn",
        theta=theta,
        factor=section.number("factor", 1, MAX_FACTOR, default=max(1.0, max_positions / length)),
        original_max_positions=length,
        beta_fast=section.number("beta_fast", 1e-6, MAX_FACTOR, default=32.0),
        beta_slow=section.number("beta_slow", 1e-6, MAX_FACTOR, default=1.0),
        attention_factor=attention_factor if has_attention_factor else None,
        mscale=section.number("mscale", 0, MAX_FACTOR, default=0.0),
        mscale_all_dim=section.number("mscale_all_dim", 0, MAX_FACTOR, default=0.0),
        truncate=section.flag("truncate", default=True),
    )
    if settings.beta_fast < settings.beta_slow:
        section.note(
            f"beta_fast is {settings.beta_fast:g}, below beta_slow {settings.beta_slow:g}; "
            "it must not be"
        )
    return settings
