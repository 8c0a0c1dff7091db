"""Metadata of GGUF files: its meaning, and rejections by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ConfigError, ModelError
from quire.base.sampling_params import SamplingParams
from quire.models.gguf_config import MEANINGS
from quire.models.gguf_ends import ENDS
from quire.models.gguf_rope import divided
from quire.models.gguf_values import decimal
from quire.models.registry import build_program, compute_dtype, open_model
from quire.models.rope import rope_spec
from quire.models.spec import ModelSpec
from quire.program.tensors import DType
from quire.weights.gguf_names import NAMES
from tests.cases import each_case
from tests.gguf_convert import gguf_of, write_gguf_of
from tests.gguf_writer import F32, U64, Typed, write_gguf
from tests.models.cases import CASES
from tests.tiny_models import write_tiny_llama

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def spec_of(folder: Path, path: Path, **changes: Any) -> ModelSpec:
    return open_model(write_gguf_of(folder, path, **changes))


def refused(folder: Path, path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        spec_of(folder, path, **changes)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_both_packages_read_the_same_architectures() -> None:
    assert set(MEANINGS) == set(NAMES)


@each_case("number", [1e-5, 1e-6, 0.22, 12.0, 0.0078125, 1e6, 500000.0, 0.1, 3.5])
def test_a_decimal_stored_as_float32_is_restored(number: float) -> None:
    assert decimal(float(np.float32(number))) == number
    assert decimal(number) == number


@pytest.mark.parametrize("number", [1e300, -1e300, math.inf, 0.1 + 1e-15, 999999.4420358813, 0.0])
def test_a_number_that_was_no_float32_is_unchanged(number: float) -> None:
    assert decimal(number) == number


@each_case(
    ("changes", "said"),
    [
        ({"general__architecture": "mamba"}, 'general.architecture is "mamba", which is not read'),
        ({"general__architecture": None}, "is null, which is not read from GGUF; these are: llama"),
        ({"llama__block_count": None}, "block_count is missing; a whole number from 1"),
        ({"llama__block_count": 2**31}, "block_count is 2147483648"),
        ({"llama__embedding_length": "x"}, 'embedding_length is "x"'),
        ({"llama__context_length": 0}, "context_length is 0"),
        ({"llama__context_length": 1}, "context_length is 1; a whole number from 2"),
        ({"llama__attention__head_count": [5, 4]}, "only layers that are all alike"),
        ({"llama__attention__head_count": []}, "only layers that are all alike"),
        ({"llama__attention__value_length": 8}, "values as wide as keys (16) are supported"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "is NaN"),
        ({"llama__vocab_size": 300}, "token_embd.weight has 307 rows; they must agree"),
        ({"llama__rope__dimension_count": 8}, "rotating a part of a head"),
        ({"llama__rope__scaling__type": "fancy"}, 'rope.scaling.type is "fancy"'),
        ({"llama__rope__scaling__type": "longrope"}, "no tensor rope_factors_long.weight"),
        ({"llama__rope__scaling__type": "yarn"}, "original_context_length is missing"),
        ({"llama__rope__scaling__yarn_attn_factor": 2.0}, "'rope.scaling.yarn_attn_factor'"),
        ({"llama__expert_count": 8}, "expert_used_count is missing"),
        ({"llama__attention__sliding_window": 64}, "unknown key 'attention.sliding_window'"),
        ({"llama__attention__causal": False}, "attention.causal is false"),
        ({"llama__logit_scale": 2.0}, "unknown key 'logit_scale' (value 2.0): it might change"),
        ({"tokenizer__ggml__eos_token_id": 400}, "an id from 0 to 306"),
        ({"general__sampling__mirostat": 3}, "mirostat is 3"),
        ({"general__sampling__sequence": "top_k;infill"}, 'sequence is "top_k;infill"'),
        ({"general__sampling__sequence": "top_k;top-k"}, "each once"),
        ({"general__sampling__sequence": ";"}, "each once"),
        ({"general__sampling__sequence": 7}, "sequence is 7"),
        (
            {
                "general__sampling__sequence": "top_k;penalties",
                "general__sampling__penalty_repeat": Typed(F32, 1.5),
            },
            "sequence has penalties after top_k, and penalty_repeat is 1.5",
        ),
        ({"general__sampling__temp": -1.0}, "temp is -1.0"),
        ({"general__sampling__fancy": 1}, "unknown key 'fancy'"),
    ],
)
def test_unsupported_metadata_is_rejected(
    changes: dict[str, Any], said: str, tiny: Path, tmp_path: Path
) -> None:
    assert said in refused(tiny, tmp_path / "m.gguf", **changes)


def test_all_problems_are_reported_together(tiny: Path, tmp_path: Path) -> None:
    said = refused(tiny, tmp_path / "m.gguf", llama__context_length=0, llama__odd=1)
    assert said.count("\n  - ") == 2


def test_keys_without_effect_are_ignored(tiny: Path, tmp_path: Path) -> None:
    plain = spec_of(tiny, tmp_path / "a.gguf")
    assert plain == spec_of(
        tiny,
        tmp_path / "b.gguf",
        general__license="mit",
        general__file_type=7,
        llama__expert_count=0,
        llama__tensor_data_layout="Meta AI original pth",
        llama__rope__scaling__type="none",
        llama__attention__head_count=[5, 5],
        llama__attention__head_count_kv=[1, 1],
        llama__feed_forward_length=[97, 97],
        llama__vocab_size=None,
        llama__attention__key_length=Typed(U64, 16),
    )


def test_missing_numbers_have_the_formats_defaults(tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(
        write_tiny_llama(tmp_path / "mha", head_dim=None, num_key_value_heads=5),
        tmp_path / "m.gguf",
        llama__attention__head_count_kv=None,
        llama__rope__freq_base=None,
        llama__rope__dimension_count=None,
    )
    assert (spec.attention.num_kv_heads, spec.attention.head_dim) == (5, 12)
    assert spec.rotary is not None
    assert spec.rotary.full.theta == 10_000


# ---- rope


def test_unpublished_divisors_are_used_directly(tmp_path: Path) -> None:
    metadata, tensors = gguf_of(BY_NAME["rope_llama3"].write(tmp_path / "ck"))
    divisors = tensors["rope_freqs.weight"] * np.float32(1.3)
    tensors["rope_freqs.weight"] = divisors
    typed = {name: (values, "F32") for name, values in tensors.items()}
    spec = open_model(write_gguf(tmp_path / "m.gguf", metadata, typed))
    assert spec.rotary.full == divided(divisors, 500_000.0, 512)
    found = np.array(rope_spec(spec.rotary.full, 32, 512).inv_freq)
    powers = 500_000.0 ** (np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(found, 1 / (powers * divisors), rtol=1e-6)
    assert rope_spec(spec.rotary.full, 32, 512).attention_scale == 1
    assert build_program(spec, dtype=DType.F32, max_positions=512).ropes


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("rope_freqs.weight", [1.0, 2.0], "rope_freqs.weight is F32 [2]; F32 [8]"),
        ("rope_freqs.weight", [math.inf] * 8, "numbers from 1e-6 to 1e6 are"),
        ("rope_freqs.weight", [0.0] * 8, "numbers from 1e-6 to 1e6 are"),
    ],
)
def test_invalid_divisors_are_rejected(
    name: str, values: list[float], said: str, tiny: Path, tmp_path: Path
) -> None:
    metadata, tensors = gguf_of(tiny)
    tensors[name] = np.array(values, np.float32)
    typed = {key: (content, "F32") for key, content in tensors.items()}
    with pytest.raises(ConfigError) as caught:
        open_model(write_gguf(tmp_path / "m.gguf", metadata, typed))
    assert said in str(caught.value)


def test_divisors_beside_another_scaling_are_rejected(tmp_path: Path) -> None:
    folder = BY_NAME["rope_llama3"].write(tmp_path / "ck")
    said = refused(folder, tmp_path / "m.gguf", llama__rope__scaling__factor=2.0)
    assert "rope_freqs.weight is there beside other angles" in said


def test_only_one_of_phi_3s_lists_is_rejected(tmp_path: Path) -> None:
    metadata, tensors = gguf_of(BY_NAME["phi3_longrope_long"].write(tmp_path / "ck"))
    del tensors["rope_factors_short.weight"]
    typed = {name: (values, "F32") for name, values in tensors.items()}
    with pytest.raises(ConfigError, match="belong together; one is there"):
        open_model(write_gguf(tmp_path / "m.gguf", metadata, typed))


def test_a_nonstandard_factor_of_phi_3_is_kept(tmp_path: Path) -> None:
    folder = BY_NAME["phi3_longrope_long"].write(tmp_path / "ck")
    usual = spec_of(folder, tmp_path / "a.gguf").rotary.full
    own = spec_of(folder, tmp_path / "b.gguf", phi3__rope__scaling__attn_factor=1.5).rotary.full
    assert usual is not None
    assert own is not None
    assert (usual.attention_factor, own.attention_factor) == (None, 1.5)


# ---- what GGUF leaves to the reader


@pytest.mark.parametrize(
    ("name", "layers", "scalar"), [("gemma2_caps", 46, 12), ("gemma3_mqa", 62, 12)]
)
def test_the_largest_gemmas_scale_queries_by_their_width(
    name: str, layers: int, scalar: int, tmp_path: Path
) -> None:
    folder = BY_NAME[name].write(tmp_path / "ck")
    architecture = name.split("_")[0]
    one = spec_of(folder, tmp_path / "a.gguf")
    big = spec_of(folder, tmp_path / "b.gguf", **{f"{architecture}__block_count": layers})
    assert (one.attention.scale, big.attention.scale) == (16**-0.5, 1 / math.sqrt(scalar))


def test_a_gemma_3_without_a_window_has_none(tmp_path: Path) -> None:
    folder = BY_NAME["gemma3_mqa"].write(tmp_path / "ck")
    spec = spec_of(folder, tmp_path / "m.gguf", gemma3__attention__sliding_window=None)
    assert spec.attention.windows == ()
    pattern = {"gemma3__attention__sliding_window_pattern": 3}
    every_third = spec_of(folder, tmp_path / "m.gguf", **pattern)
    assert [bool(window) for window in every_third.attention.windows] == [True, True, False] * 2 + [
        True
    ]
    said = refused(folder, tmp_path / "m.gguf", gemma3__attention__sliding_window=None, **pattern)
    assert "it needs attention.sliding_window" in said
    flags = {"gemma3__attention__sliding_window_pattern": [True, False]}
    assert "a flag for each of 7 layers" in refused(folder, tmp_path / "m.gguf", **flags)


def test_a_granite_without_a_scale_has_llama_cpps(tmp_path: Path) -> None:
    folder = BY_NAME["granite_gqa_tied"].write(tmp_path / "ck")
    spec = spec_of(folder, tmp_path / "m.gguf", granite__attention__scale=None)
    assert spec.attention.scale == 16**-0.5
    said = refused(folder, tmp_path / "m.gguf", granite__rope__scaling__finetuned=False)
    assert "a Granite without angles is not supported" in said


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", DType.F32), ("F16", DType.F32), ("BF16", DType.BF16), ("Q8_0", DType.BF16)],
)
def test_the_computing_dtype_follows_the_matrices(kind: str, dtype: DType, tmp_path: Path) -> None:
    wide = write_tiny_llama(
        tmp_path / "ck", hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4
    )
    assert compute_dtype(spec_of(wide, tmp_path / "m.gguf", kind=kind)) is dtype


# ---- end tokens and sampling


def test_all_end_ids_count(tiny: Path, tmp_path: Path) -> None:
    metadata, tensors = gguf_of(tiny)
    typed = {name: (values, "F32") for name, values in tensors.items()}
    metadata["tokenizer.ggml.eot_token_id"] = 4
    metadata["tokenizer.ggml.eom_token_id"] = 2
    assert open_model(write_gguf(tmp_path / "m.gguf", metadata, typed)).generation.eos_ids == (
        1,
        4,
        2,
    )
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[3], tokens[10] = "<|im_end|>", "<|eot_id|>"  # the latter is no special token
    metadata["tokenizer.ggml.tokens"] = tokens
    spec = open_model(write_gguf(tmp_path / "m.gguf", metadata, typed))
    assert spec.generation.eos_ids == (1, 4, 2, 3)
    assert spec.generation.bos_ids == (0,)
    assert b"<|im_end|>" in ENDS


@each_case(
    ("given", "found"),
    [
        (
            {"temp": Typed(F32, 0.6), "top_k": 20, "top_p": Typed(F32, 0.95), "mirostat": 0},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        (
            {"penalty_repeat": Typed(F32, 1.1), "penalty_last_n": 128},
            {"repetition_penalty": 1.1, "repeat_last_n": 128},
        ),
        (
            {"xtc_probability": Typed(F32, 0.5), "xtc_threshold": Typed(F32, 0.2)},
            {"xtc_probability": 0.5, "xtc_threshold": 0.2},
        ),
        # Mirostat replaces filters, order and penalties.
        (
            {
                **{"mirostat": 2, "mirostat_tau": Typed(F32, 4.0), "temp": Typed(F32, 0.6)},
                **{"top_k": 20, "penalty_last_n": 64, "penalty_repeat": Typed(F32, 1.1)},
                "sequence": "top_k;temperature",
            },
            {"mirostat": 2, "mirostat_tau": 4.0, "temperature": 0.6},
        ),
        ({"mirostat_tau": Typed(F32, 4.0)}, {}),
        # The likeliest token leaves no choice to mirostat and XTC.
        ({"temp": Typed(F32, 0.0), "mirostat": 1}, {"temperature": 0.0}),
        (
            {"temp": Typed(F32, 0.0), "xtc_probability": Typed(F32, 0.5)},
            {"temperature": 0.0},
        ),
        # A sequence switches off the steps that it leaves out.
        (
            {
                **{
                    "sequence": "penalties;dry;top-k;typical;TEMP",
                    "top_k": 20,
                    "penalty_last_n": 9,
                },
                **{"top_p": Typed(F32, 0.9), "temp": Typed(F32, 0.6)},
                "xtc_probability": Typed(F32, 0.5),
            },
            {
                **{"top_k": 20, "temperature": 0.6, "repeat_last_n": 9},
                "samplers": ("top_k", "typical_p", "temperature"),
            },
        ),
        (
            {"sequence": "top_k", "top_k": 20, "penalty_repeat": Typed(F32, 1.1)},
            {"top_k": 20, "samplers": ("top_k",)},
        ),
        ({"sequence": "top_k;penalties", "top_k": 5}, {"top_k": 5, "samplers": ("top_k",)}),
        ({"sequence": ""}, {}),
        # No noise could change what is chosen, so that nothing may be drawn by it.
        ({"temp": 1e-13, "mirostat": 2}, {"temperature": 1e-13}),
    ],
)
def test_recommended_sampling_of_a_file_is_the_default(
    given: dict[str, Any], found: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    keys = {f"general__sampling__{name}": value for name, value in given.items()}
    spec = spec_of(tiny, tmp_path / "m.gguf", **keys)
    assert spec.generation.defaults == found
    SamplingParams(**found)  # they are allowed together


def test_a_corrupt_file_is_reported_when_a_model_is_opened(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "m.gguf", tmp_path / "absent.gguf"):
        with pytest.raises(ModelError):
            open_model(path)
