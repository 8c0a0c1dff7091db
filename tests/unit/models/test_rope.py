"""Rotary frequencies against their formulas in exact arithmetic, and the table of angles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quire.execute.rope_table import CHUNK_POSITIONS, RopeTable
from quire.models.rope import rope_spec
from quire.models.spec import RopeSettings
from quire.program.declarations import RopeSpec

F32_STEP = 2.0**-23


def plain(theta: float, head_dim: int) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def test_default_frequencies_are_powers_of_theta() -> None:
    spec = rope_spec(RopeSettings(theta=500_000.0), 96, 512)
    np.testing.assert_allclose(spec.inv_freq, plain(500_000.0, 96), rtol=1e-6)
    assert (spec.rotary_dim, spec.attention_scale) == (96, 1.0)


def test_linear_scaling_divides_every_frequency() -> None:
    spec = rope_spec(RopeSettings(kind="linear", factor=3.0), 16, 512)
    np.testing.assert_allclose(spec.inv_freq, np.array(plain(1e4, 16)) / 3, rtol=1e-6)


def test_llama3_keeps_short_waves_stretches_long_ones_and_interpolates() -> None:
    settings = RopeSettings(
        kind="llama3", factor=8.0, original_max_positions=64,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    base = plain(1e4, 32)
    found = rope_spec(settings, 32, 512).inv_freq
    kinds = set()
    for value, right in zip(found, base, strict=True):
        turns = 64 * right / (2 * math.pi)
        smooth = min(max((turns - 1) / (4 - 1), 0), 1)
        kinds.add("kept" if smooth == 1 else "stretched" if smooth == 0 else "blended")
        assert value == pytest.approx(right * (smooth + (1 - smooth) / 8), rel=1e-6)
    assert kinds == {"kept", "stretched", "blended"}


def test_yarn_ramps_between_kept_and_stretched_pairs() -> None:
    settings = RopeSettings(kind="yarn", factor=4.0, original_max_positions=64)
    found = np.array(rope_spec(settings, 32, 512).inv_freq) / plain(1e4, 32)
    assert found[0] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(0.25)
    assert (np.diff(found) <= 1e-6).all()


def test_yarn_scales_cosines_by_the_logarithm_of_its_factor() -> None:
    def scale(**changes: float) -> float:
        settings = RopeSettings(kind="yarn", factor=4.0, original_max_positions=64, **changes)
        return rope_spec(settings, 32, 512).attention_scale

    assert scale() == 0.1 * math.log(4) + 1
    assert scale(attention_factor=1.5) == 1.5
    assert scale(mscale=2.0) == scale()
    both = (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert scale(mscale=2.0, mscale_all_dim=0.5) == both


def test_dynamic_scaling_stretches_theta_by_the_served_length_beyond_the_original() -> None:
    settings = RopeSettings(kind="dynamic", factor=4.0, original_max_positions=128)
    for length in (1, 127, 128):
        assert rope_spec(settings, 32, length) == rope_spec(RopeSettings(), 32, length)
    for length in (129, 200, 512):
        theta = 1e4 * (4 * length / 128 - 3) ** (32 / 30)
        found = rope_spec(settings, 32, length)
        np.testing.assert_allclose(found.inv_freq, plain(theta, 32), rtol=1e-6)
        assert found.attention_scale == 1.0


def longrope(**changes: Any) -> RopeSettings:
    fields = {
        "kind": "longrope",
        "factor": 8.0,
        "original_max_positions": 64,
        "short_factors": (1.0, 1.5, 2.0, 2.5),
        "long_factors": (3.0, 6.0, 9.0, 12.0),
    }
    return RopeSettings(**(fields | changes))


def test_longrope_divides_by_its_short_list_up_to_the_original_length_and_then_by_the_long() -> (
    None
):
    for length, factors in ((1, (1.0, 1.5, 2.0, 2.5)), (64, (1.0, 1.5, 2.0, 2.5)),
                            (65, (3.0, 6.0, 9.0, 12.0)), (512, (3.0, 6.0, 9.0, 12.0))):  # fmt: skip
        found = rope_spec(longrope(), 8, length)
        np.testing.assert_allclose(found.inv_freq, np.array(plain(1e4, 8)) / factors, rtol=1e-6)


def test_longrope_scales_cosines_at_every_length_alike() -> None:
    for length in (10, 500):
        found = rope_spec(longrope(), 8, length).attention_scale
        assert found == math.sqrt(1 + math.log(8) / math.log(64))
        assert rope_spec(longrope(factor=0.5), 8, length).attention_scale == 1.0
        assert rope_spec(longrope(attention_factor=1.7), 8, length).attention_scale == 1.7


def test_partial_rotation_has_the_frequencies_of_a_smaller_head() -> None:
    share = rope_spec(RopeSettings(rotary_share=0.75), 32, 512)
    assert share == rope_spec(RopeSettings(), 24, 512)
    assert rope_spec(longrope(rotary_share=0.5), 16, 65) == rope_spec(longrope(), 8, 65)


def test_frequencies_are_exact_float32_values() -> None:
    for kind in ("default", "linear", "dynamic", "llama3", "yarn"):
        settings = RopeSettings(kind=kind, factor=2.5, original_max_positions=64)
        values = np.array(rope_spec(settings, 22, 512).inv_freq)
        assert np.array_equal(values, values.astype(np.float32))


def test_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(ValueError, match="rope kind 'odd'"):
        rope_spec(RopeSettings(kind="odd"), 16, 512)


SPEC = RopeSpec(tuple(float(np.float32(x)) for x in plain(1e4, 16)), 1.25)


def test_the_table_holds_cosine_and_sine_of_rounded_angles() -> None:
    table = RopeTable(SPEC)
    table.reserve(2_000)
    for position in (0, 1, 777, 1_023, 1_024, 1_999):
        for pair, frequency in enumerate(SPEC.inv_freq):
            angle = float(np.float32(position) * np.float32(frequency))
            for found, right in ((table.cos, math.cos(angle)), (table.sin, math.sin(angle))):
                assert found[position, pair] == pytest.approx(1.25 * right, abs=2 * F32_STEP)


def test_a_table_grows_in_whole_chunks_and_never_changes() -> None:
    slow, fast = RopeTable(SPEC), RopeTable(SPEC)
    for positions in (1, 5, 1_024, 1_025, 3_000, 10, 5_000):
        slow.reserve(positions)
        assert slow.num_positions % CHUNK_POSITIONS == 0
        assert slow.num_positions >= positions
    fast.reserve(5_000)
    assert fast.num_positions == slow.num_positions == 5 * CHUNK_POSITIONS
    assert np.array_equal(slow.cos, fast.cos)
    assert np.array_equal(slow.sin, fast.sin)
    assert slow.cos.dtype == slow.sin.dtype == np.float32
