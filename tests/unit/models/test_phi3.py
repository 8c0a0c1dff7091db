"""Phi-3's configuration: published checkpoints open, and unsupported settings are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.models.registry import build_program, open_model
from quire.models.spec import (
    AttentionSpec,
    GenerationSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSettings,
    RotarySpec,
)
from quire.program.ops import Attention
from quire.program.tensors import DType
from tests.cases import each_case
from tests.unit.models.published_configs import (
    PHI_3_5_LONG,
    PHI_3_5_MINI,
    PHI_3_5_SHORT,
    PHI_3_GENERATION,
    PHI_3_MINI_4K,
    PHI_3_MINI_128K,
    PHI_4,
    PHI_4_MINI,
)


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Return the spec of `config` with changes (None drops a key)."""
    changed = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(changed))
    return open_model(folder)


def refused(folder: Path, config: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, config, **changes)
    return str(caught.value)


def test_phi_3_mini_has_a_window_and_unneeded_remote_code(tmp_path: Path) -> None:
    assert read(tmp_path, PHI_3_MINI_4K) == ModelSpec(
        architecture="Phi3ForCausalLM",
        vocab_size=32064,
        hidden_size=3072,
        mlp=MlpSpec(size=8192, activation="silu"),
        num_layers=32,
        attention=AttentionSpec(num_heads=32, num_kv_heads=32, head_dim=96, windows=(2047,) * 32),
        norm=NormSpec(eps=1e-5),
        max_positions=4096,
        rotary=RotarySpec(full=RopeSettings()),
        head=HeadSpec(is_tied=False),
        dtype="bf16",
        generation=GenerationSpec(bos_ids=(1,), eos_ids=(32000,)),
    )


def test_the_128k_models_have_longrope_under_either_name_and_no_effective_window(
    tmp_path: Path,
) -> None:
    spec = read(tmp_path, PHI_3_5_MINI)
    assert spec.rotary.full == RopeSettings(
        kind="longrope",
        factor=32.0,
        original_max_positions=4096,
        short_factors=tuple(PHI_3_5_SHORT),
        long_factors=tuple(PHI_3_5_LONG),
    )
    assert (spec.max_positions, spec.attention.windows) == (131072, ())
    assert read(tmp_path, PHI_3_MINI_128K) == spec


def test_phi_4_is_plain(tmp_path: Path) -> None:
    spec = read(tmp_path, PHI_4)
    assert (spec.attention.head_dim, spec.attention.num_kv_heads, spec.attention.windows) == (
        128,
        10,
        (),
    )
    assert spec.rotary.full == RopeSettings(theta=250_000.0)


def test_phi_4_mini_rotates_three_quarters_of_a_head_and_ties_its_head(tmp_path: Path) -> None:
    spec = read(tmp_path, PHI_4_MINI)
    assert (spec.rotary.full.kind, spec.rotary.full.rotary_share) == ("longrope", 0.75)
    assert (len(spec.rotary.full.long_factors), spec.attention.head_dim) == (48, 128)
    assert (spec.head.is_tied, spec.attention.num_kv_heads) == (True, 8)


def test_the_form_of_transformers_5_is_equal(tmp_path: Path) -> None:
    old = PHI_4_MINI["rope_scaling"]
    parameters = {
        "rope_type": old["type"],
        "type": old["type"],
        "long_factor": old["long_factor"],
        "short_factor": old["short_factor"],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
    }
    new = read(
        tmp_path,
        PHI_4_MINI,
        rope_scaling=None,
        rope_theta=None,
        partial_rotary_factor=None,
        rope_parameters=parameters,
    )
    assert new == read(tmp_path, PHI_4_MINI)


def test_the_published_end_ids_are_honoured(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(PHI_3_GENERATION))
    spec = read(tmp_path, PHI_3_MINI_4K)
    assert (spec.generation.eos_ids, spec.generation.defaults) == ((32000, 32001, 32007), {})


def test_fused_tensors_are_split_into_their_parts(tmp_path: Path) -> None:
    spec = read(tmp_path, PHI_4_MINI, num_hidden_layers=1)
    program = build_program(spec, dtype=DType.BF16, max_positions=4096)
    q, k, v = program.weights["layers.0.qkv"].parts
    assert {part.source for part in (q, k, v)} == {"model.layers.0.self_attn.qkv_proj.weight"}
    assert [(p.first_row, p.rows, p.of_rows) for p in (q, k, v)] == [
        (0, 3072, 5120),
        (3072, 1024, 5120),
        (4096, 1024, 5120),
    ]
    gate, up = program.weights["layers.0.gate_up"].parts
    assert [(p.first_row, p.rows, p.of_rows) for p in (gate, up)] == [
        (0, 8192, 16384),
        (8192, 8192, 16384),
    ]
    assert program.ropes[0].rotary_dim == 96


def test_the_served_length_selects_short_or_long_factors(
    tmp_path: Path,
) -> None:
    spec = read(tmp_path, PHI_3_5_MINI, num_hidden_layers=1)
    by_length = {
        length: build_program(spec, dtype=DType.BF16, max_positions=length).ropes[0]
        for length in (17, 4096, 4097, 131072)
    }
    assert by_length[17] == by_length[4096]
    assert by_length[4097] == by_length[131072]
    assert by_length[4096].inv_freq[-1] > by_length[4097].inv_freq[-1]
    assert by_length[4096].attention_scale == by_length[4097].attention_scale > 1


def test_a_window_as_long_as_the_model_is_none(tmp_path: Path) -> None:
    for window, windows in ((4095, (4095,) * 32), (4096, ()), (None, ())):
        assert read(tmp_path, PHI_3_MINI_4K, sliding_window=window).attention.windows == windows
    program = build_program(
        read(tmp_path, PHI_3_MINI_4K), dtype=DType.BF16, max_positions=4096
    ).segments["trunk"]
    assert {op.window for op in program if isinstance(op, Attention)} == {2047}


@each_case(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias is true: biases are not supported"),
        ({"lm_head_bias": True}, "lm_head_bias is true"),
        ({"full_attn_mod": 2}, "full_attn_mod is 2: only 1"),
        ({"interpolate_factor": 4}, "interpolate_factor is 4"),
        ({"rope_scaling": {"type": "yarn"}}, 'rope_type is "yarn", not supported; default, longr'),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor is null; a list of numbers"),
        ({"partial_rotary_factor": 0.5}, "short_factor has 48 numbers; one for each of the 24"),
        ({"partial_rotary_factor": 0.0105}, "1 columns of a head would be rotated"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2; a number from"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"sliding_window": 0}, "sliding_window is 0; a whole number"),
    ],
)
def test_unsupported_settings_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, PHI_3_5_MINI, **changes)


@each_case(
    ("changes", "said"),
    [
        ({"short_factor": [1.0] * 47}, "short_factor has 47 numbers; one for each of the 48"),
        ({"long_factor": []}, "long_factor is []; a list of numbers"),
        ({"long_factor": 3}, "long_factor is 3; a list"),
        ({"long_factor": [True] * 48}, "long_factor holds true"),
        ({"short_factor": [0] * 48}, "short_factor holds 0; numbers from 1e-06"),
        ({"short_factor": ["1"] * 48}, 'short_factor holds "1"'),
        ({"factor": 0}, "factor is 0; a number from"),
        ({"attention_factor": -1}, "attention_factor is -1"),
        ({"short_mscale": 1.2}, "unknown key 'short_mscale'"),
        ({"original_max_position_embeddings": 8192}, "is 8192, and 4096 at the top"),
        ({"rope_type": "default"}, 'type is "longrope" and rope_type "default"'),
    ],
)
def test_contradictory_longrope_is_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    scaling = PHI_3_5_MINI["rope_scaling"] | changes
    assert said in refused(tmp_path, PHI_3_5_MINI, rope_scaling=scaling)
