"""config.json and generation_config.json: what is honoured, and what is rejected by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.models.model_folder import box_path
from quire.models.registry import FAMILIES, build_program, open_model
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
from quire.program.tensors import DType
from tests.cases import each_case
from tests.data import outside
from tests.fp8_checkpoints import KINDS, config_of
from tests.tiny_models import tiny_config, write_tiny_llama

HUGE = 10**30


def read(folder: Path, **changes: Any) -> ModelSpec:
    """Return the spec of a tiny config with changes (None drops a key); write no weights."""
    return read_text(folder, json.dumps(tiny_config(**changes)))


def read_text(folder: Path, text: str) -> ModelSpec:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    return open_model(folder)


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, **changes)
    assert str(folder / "config.json") in str(caught.value)
    return str(caught.value)


def generation(folder: Path, content: Any, **changes: Any) -> ModelSpec:
    (folder / "generation_config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return read(folder, **changes)


def generation_refused(folder: Path, content: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        generation(folder, content)
    assert "generation_config.json" in str(caught.value)
    return str(caught.value)


# ---- what is read


def test_every_field_of_the_spec_comes_from_its_key(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu_new",
        torch_dtype="bfloat16",
        eos_token_id=[7, 3, 7],
    )
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=307,
        hidden_size=60,
        mlp=MlpSpec(size=97, activation="gelu_tanh", bias=True),
        num_layers=2,
        attention=AttentionSpec(
            num_heads=5, num_kv_heads=1, head_dim=16, qkv_bias=True, output_bias=True
        ),
        norm=NormSpec(eps=1e-5),
        max_positions=512,
        rotary=RotarySpec(full=RopeSettings()),
        head=HeadSpec(is_tied=True),
        dtype="bf16",
        generation=GenerationSpec(bos_ids=(0,), eos_ids=(7, 3)),
    )


def test_absent_and_null_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    optional = (
        "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "mlp_bias",
        "tie_word_embeddings", "rope_theta", "bos_token_id", "eos_token_id", "architectures",
    )  # fmt: skip
    absent = read(tmp_path, **dict.fromkeys(optional))
    config = tiny_config() | dict.fromkeys(optional)
    assert read_text(tmp_path, json.dumps(config)) == absent
    assert (absent.attention.num_kv_heads, absent.attention.head_dim, absent.mlp.activation) == (
        5,
        12,
        "silu",
    )
    assert (absent.attention.qkv_bias, absent.mlp.bias, absent.head.is_tied) == (
        False,
        False,
        False,
    )
    assert (absent.rotary.full.theta, absent.generation.bos_ids, absent.generation.eos_ids) == (
        10_000.0,
        (),
        (),
    )


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "f32"),
        ({"torch_dtype": "float16"}, "f16"),
        ({"dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float32", "torch_dtype": "float32"}, "f32"),
    ],
)
def test_the_dtype_is_read_under_its_old_and_its_new_name(
    keys: dict[str, str], dtype: str, tmp_path: Path
) -> None:
    assert read(tmp_path, **keys).dtype == dtype


def test_keys_without_effect_are_ignored(tmp_path: Path) -> None:
    plain = read(tmp_path)
    noise = {
        "use_cache": False,
        "initializer_range": 0.5,
        "attention_dropout": 0.3,
        "pad_token_id": -1,
        "_name_or_path": "x",
        "transformers_version": "99",
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "is_llama_config": True,
    }
    assert read(tmp_path, **noise) == plain


def test_real_configurations_are_read(tmp_path: Path) -> None:
    spec = open_model(outside("stories260K"))
    assert (spec.hidden_size, spec.attention.num_kv_heads, spec.head.is_tied) == (64, 4, True)
    assert open_model(box_path()).architecture == "LlamaForCausalLM"


# ---- rope


def test_rope_scaling_is_read_in_its_old_and_its_new_form(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64, "rope_type": "llama3"}  # fmt: skip
    old = read(tmp_path, rope_theta=500000.0, rope_scaling=scaling)
    parameters = scaling | {"rope_theta": 500000.0}
    new = read(tmp_path, rope_theta=None, rope_parameters=parameters)
    both = read(tmp_path, rope_theta=500000.0, rope_parameters=parameters)
    assert old == new == both
    assert old.rotary.full == RopeSettings(
        kind="llama3", theta=500000.0, factor=8.0, original_max_positions=64,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip


def test_attn_factor_multiplies_yarns_attention_scale(tmp_path: Path) -> None:
    """As in DeepSeek's distilled Qwen 3, where the product is 1."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    attn = {"attn_factor": 0.8782488562869419}
    spec = read(tmp_path, rope_scaling=scaling | attn | {"extrapolation_factor": 1.0})
    assert spec.rotary is not None
    assert spec.rotary.full.attention_factor == pytest.approx(1.0, rel=1e-9)
    message = refused(
        tmp_path, rope_scaling=scaling | attn | {"mscale": 1.0, "extrapolation_factor": 2}
    )
    assert "rope_scaling: mscale is 1.0: attn_factor says what it says" in message
    assert "extrapolation_factor is 2: only 1" in message


def test_yarn_without_a_factor_derives_it_from_the_lengths(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 128}
    assert read(tmp_path, rope_scaling=scaling).rotary.full.factor == 4.0


@each_case(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, 'rope_type is "ntk", not supported; d'),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2}}, 'rope_type is ["yarn"]'),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; a number from 1"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, 'factor is "2"'),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "key 'beta_fast'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "must agree"),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear"; an object is allowed'),
        ({"rope_scaling": []}, "rope_scaling is []; an object is allowed"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor is 4, low_freq_factor 4",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}},
            "beta_fast is 1, below beta_slow 2",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
            "rope_theta is 10000 at the top and 5000 in rope_parameters",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            "rope_scaling and rope_parameters are both given",
        ),
        ({"rope_theta": 0}, "rope_theta is 0; a number from 2"),
        ({"rope_theta": -10000.0}, "rope_theta is -10000.0"),
    ],
)
def test_unsupported_rope_settings_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, **changes)


# ---- rejections


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "vocab_size", "max_position_embeddings", "rms_norm_eps"],
)  # fmt: skip
def test_a_missing_size_is_named(key: str, tmp_path: Path) -> None:
    assert f"{key} is missing" in refused(tmp_path, **{key: None})


@each_case("value", [0, -1, HUGE, 2.5, "64", True, [64], {}])
@each_case(
    "key",
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"],
)  # fmt: skip
def test_an_invalid_size_is_rejected(key: str, value: Any, tmp_path: Path) -> None:
    assert f"{key} is {json.dumps(value)}; a whole number from" in refused(tmp_path, **{key: value})


def test_a_context_without_room_for_an_answer_is_rejected(tmp_path: Path) -> None:
    assert "max_position_embeddings is 1; a whole number from 2" in refused(
        tmp_path, max_position_embeddings=1
    )


@pytest.mark.parametrize("value", [0, -1e-5, 2.0, 1e300, "1e-5", False])
def test_a_norm_epsilon_out_of_range_is_rejected(value: Any, tmp_path: Path) -> None:
    assert f"rms_norm_eps is {json.dumps(value)}; a number from" in refused(
        tmp_path, rms_norm_eps=value
    )


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_invalid_numbers_are_rejected(text: str, tmp_path: Path) -> None:
    config = json.dumps(tiny_config()).replace("1e-05", text)
    with pytest.raises(ConfigError, match=f"holds {text}, which is not JSON"):
        read_text(tmp_path, config)


def test_numbers_too_large_for_a_float_are_rejected(tmp_path: Path) -> None:
    config = json.dumps(tiny_config()).replace("1e-05", "1e999")
    with pytest.raises(ConfigError, match="rms_norm_eps is Infinity"):
        read_text(tmp_path, config)
    with pytest.raises(ConfigError, match="number of 5000 digits"):
        read_text(tmp_path, config.replace("1e999", "1" * 5000))


@each_case("key", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
@each_case("value", [1, 0, "true", []])
def test_a_flag_is_true_or_false(key: str, value: Any, tmp_path: Path) -> None:
    assert f"{key} is {json.dumps(value)}; true or false is allowed" in refused(
        tmp_path, **{key: value}
    )


@each_case(
    ("changes", "said"),
    [
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"rope_interleaved": True}, "rope_interleaved is true"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "code that comes with a model is never run"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"model_type": "mistral"}, 'model_type is "mistral"'),
        ({"hidden_act": "mish"}, 'hidden_act is "mish"; one of silu'),
        ({"torch_dtype": "int8"}, 'torch_dtype is "int8"; one of float32'),
        (
            {"dtype": "float16", "torch_dtype": "bfloat16"},
            "torch_dtype says bf16 and dtype says f16",
        ),
        ({"num_key_value_heads": 2}, "num_attention_heads is 5, not a multiple of num_key_value_h"),
        ({"num_key_value_heads": 10}, "not a multiple of num_key_value_heads 10"),
        ({"head_dim": 15}, "head_dim is 15; rotary angles need an even number"),
        ({"head_dim": None, "hidden_size": 62}, "not a multiple of num_attention_heads 5"),
        ({"eos_token_id": -1}, "eos_token_id is -1; an id from 0 to 306"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is -1"),
        ({"bos_token_id": "1"}, 'bos_token_id is "1"'),
        ({"eos_token_id": [True]}, "eos_token_id is [true]"),
    ],
)
def test_contradictory_or_unsupported_values_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": None, "num_key_value_heads": 2}, "num_attention_heads is missing"),
        ({"num_attention_heads": 0, "num_key_value_heads": 2}, "num_attention_heads is 0"),
        ({"hidden_size": None, "head_dim": None}, "hidden_size is missing"),
        ({"head_dim": 1, "rope_scaling": None}, "head_dim is 1"),
    ],
)
def test_a_made_up_value_leads_to_no_further_problem(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    message = refused(tmp_path, **changes)
    assert said in message
    assert message.count("\n  - ") == 1


@pytest.mark.parametrize(
    ("of_config", "of_generation", "warnings"),
    [
        (1, None, []),
        (999, None, ["config.json: eos_token_id holds 999, and the model has ids from 0 to 306 "]),
        (999, 1, []),
        (1, 999, ["generation_config.json: eos_token_id holds 999, and the model has ids from 0"]),
        (1, [5, 999], ["so answers end with 5 only; correct eos_token_id"]),
        (999, 998, ["holds 998", "so no token ends an answer: it goes on to max_tokens"]),
    ],
)
def test_end_ids_past_the_vocabulary_are_warned_of(
    tmp_path: Path, of_config: Any, of_generation: Any, warnings: list[str]
) -> None:
    if of_generation is None:
        spec = read(tmp_path, eos_token_id=of_config)
    else:
        spec = generation(tmp_path, {"eos_token_id": of_generation}, eos_token_id=of_config)
    found = "\n".join(spec.generation.warnings)
    assert all(warning in found for warning in warnings)
    assert bool(found) is bool(warnings)


def test_end_ids_past_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    """As in a small GPT-2 with a vocabulary without id 50256."""
    spec = read(tmp_path, bos_token_id=50256, eos_token_id=[307, 5])
    assert (spec.generation.bos_ids, spec.generation.eos_ids) == ((), (5,))
    spec = generation(tmp_path, {"bos_token_id": 50256, "eos_token_id": 50256}, eos_token_id=5)
    assert spec.generation.eos_ids == (5,)


def test_keys_of_other_libraries_are_ignored(tmp_path: Path) -> None:
    left_over = {
        "_attn_implementation": "sdpa",
        "_flash_attn_2_enabled": True,
        "attn_implementation": "flash_attention_2",
        "finetuning_task": "chat",
        "keys_to_ignore_at_inference": ["past_key_values"],
        "max_sequence_length": 2048,
        "model_max_length": 2048,
        "tokenizer_padding_side": "right",
        "unk_token_id": 0,
        "hidden_dropout": 0.1,
        "activation": "swiglu",
    }
    sampling = {
        "do_sample": False,
        "early_stopping": False,
        "length_penalty": 1.0,
        "max_length": 20,
        "min_length": 0,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "temperature": 1,
        "top_k": 50,
        "top_p": 1.0,
        "bad_words_ids": None,
    }
    assert read(tmp_path, **left_over, **sampling) == read(tmp_path)


def test_sampling_settings_in_the_wrong_file_are_rejected(tmp_path: Path) -> None:
    message = refused(tmp_path, temperature=0.7, top_k=40, activation="relu6")
    assert "temperature is 0.7: settings for sampling belong into generation_config" in message
    assert "top_k is 40" in message
    assert 'activation is "relu6"' in message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "quantized (awq)"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantized (gptq)"),
        ("quantization_config", {"quant_method": "fbgemm_fp8"}, "quantized (fbgemm_fp8)"),
        (
            "quantization_config",
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "quantized (compressed-tensors)",
        ),
        ("quantization_config", {"load_in_8bit": True}, "quantized (load_in_8bit)"),
        ("quantization_config", {"bits": 4}, "quantized (a way of its own)"),
        ("quantization_config", "yes", "quantized (a way of its own)"),
        ("quantization", {"group_size": 64, "bits": 4}, "quantized (MLX's way)"),
    ],
)
def test_quantized_checkpoints_are_rejected_by_method_with_alternatives(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    message = refused(tmp_path, **{key: value})
    assert said in message
    assert "take the checkpoint they were made from" in message


@pytest.mark.parametrize("style", ["fp8", "compressed"])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_is_read_as_in_public_checkpoints(kind: str, style: str, tmp_path: Path) -> None:
    assert read(tmp_path, quantization_config=config_of(kind, style)) == read(tmp_path)


@pytest.mark.parametrize("style", ["fp8", "compressed"])
@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_static_activation_scales_are_part_of_the_spec(
    kind: str, style: str, tmp_path: Path
) -> None:
    spec = read(tmp_path, quantization_config=config_of(kind, style, is_static=True))
    assert spec == replace(read(tmp_path), static_activations=True)


def test_static_scales_are_one_number_for_all_tokens_in_all_groups(tmp_path: Path) -> None:
    said = refused(tmp_path, quantization_config=config_of("block", "fp8", is_static=True))
    assert 'activation_scheme is "static"; beside blocks dynamic is read' in said
    config = config_of("tensor", "compressed", is_static=True)
    groups = config["config_groups"]
    groups["group_1"] = config_of("tensor", "compressed")["config_groups"]["group_0"]
    assert "dynamic in one group and fixed in another" in refused(
        tmp_path, quantization_config=config
    )
    groups.pop("group_1")
    groups["group_0"]["input_activations"]["strategy"] = "token"
    said = refused(tmp_path, quantization_config=config)
    assert 'strategy is "token": a scale that is fixed is one for all tokens' in said


@pytest.mark.parametrize(
    ("style", "changes", "said"),
    [
        ("fp8", {"fmt": "e5m2"}, 'fmt is "e5m2": weights of e4m3 are read'),
        ("fp8", {"weight_block_size": [64, 64]}, "weight_block_size is [64, 64]; blocks of [128,"),
        ("fp8", {"activation_scheme": "none"}, 'activation_scheme is "none"; dynamic or static'),
        ("fp8", {"odd": 1}, "unknown key 'odd' (value 1)"),
        ("compressed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        ("compressed", {"sparsity_config": {"format": "dense"}}, "sparsity_config is"),
        ("compressed", {"config_groups": None}, "config_groups is null; an object of objects"),
    ],
)
def test_fp8_of_another_kind_is_rejected_with_the_supported_ones(
    style: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    message = refused(tmp_path, quantization_config=config_of("channel", style) | changes)
    assert "quantization_config: " in message
    assert said in message


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("weights", {"num_bits": 4}, "num_bits is 4: 8 bits are read"),
        ("weights", {"strategy": "group"}, 'strategy is "group": a scale a tensor, channel or'),
        ("input_activations", {"type": "int"}, 'type is "int": floats are read'),
        ("input_activations", None, "input_activations is missing; both weights and"),
    ],
)
def test_compressed_tensors_are_read_if_both_factors_are_fp8(
    part: str, changes: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    config = config_of("channel", "compressed")
    group = config["config_groups"]["group_0"]
    group[part] = None if changes is None else group[part] | changes
    message = refused(tmp_path, quantization_config=config)
    assert "config_groups.group_0: " in message
    assert said in message


def test_unknown_keys_are_rejected_by_name_with_their_value(tmp_path: Path) -> None:
    message = refused(tmp_path, logit_scale=0.5, embedding_multiplier=12)
    assert "unknown key 'logit_scale' (value 0.5)" in message
    assert "unknown key 'embedding_multiplier' (value 12)" in message


def test_unknown_keys_that_are_null_are_ignored(tmp_path: Path) -> None:
    config = tiny_config() | {"layer_types": None, "logit_scale": None}
    assert read_text(tmp_path, json.dumps(config)) == read(tmp_path)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    message = refused(
        tmp_path,
        hidden_size=-1,
        vocab_size=None,
        odd_key=1,
        rope_scaling={"type": "linear", "factor": 0, "odd": 1},
    )
    for said in ("hidden_size is -1", "vocab_size is missing", "'odd_key'", "factor is 0", "'odd'"):
        assert said in message


@each_case(
    "text",
    ["", "[]", "null", "{", '"x"', "{} {}", "\udcff\udcfe", "[" * 100_000, '{"a": 1, "a": 2}'],
)
def test_a_config_that_is_no_json_object_is_rejected(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_text(tmp_path, text)


def test_a_config_of_many_megabytes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 4194304 are allowed"):
        read_text(tmp_path, "{" + " " * (5 << 20) + "}")


# ---- model selection


@pytest.mark.parametrize(
    "names", [["GPTNeoXForCausalLM"], ["GPTNeoXModel"], [], "LlamaForCausalLM", [1],
              ["LlamaForCausalLM", "Other"]],
)  # fmt: skip
def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    names: Any, tmp_path: Path
) -> None:
    message = refused(tmp_path, architectures=names)
    assert json.dumps(names) in message
    assert "these run:\n" in message
    assert all(name in message for name in FAMILIES)


def test_a_config_without_architecture_and_a_foreign_type_is_rejected(tmp_path: Path) -> None:
    message = refused(tmp_path, architectures=None, model_type="gpt_neox")
    assert 'model_type is "gpt_neox"' in message


def test_a_path_without_a_model_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, said in (
        (tmp_path / "nowhere", "no such file or directory"),
        (tmp_path / "file", "this is a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_model(path)
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        open_model(tmp_path)


@pytest.mark.parametrize("positions", [0, -1, 513])
def test_a_program_longer_than_the_model_is_rejected(positions: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"is {positions}; this model allows 1 to 512"):
        build_program(read(tmp_path), dtype=DType.F32, max_positions=positions)


# ---- generation_config.json


def test_generation_defaults_are_those_of_the_file(tmp_path: Path) -> None:
    content = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.25,
        "max_new_tokens": 99,
        "bos_token_id": 2,
        "eos_token_id": [3, 4],
        "pad_token_id": 0,
        "max_length": 4096,
        "transformers_version": "4.31.0",
        "_from_model_config": True,
        "num_beams": 1,
    }
    spec = generation(tmp_path, content)
    assert spec.generation.defaults == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.25,
        "max_new_tokens": 99,
    }
    assert (spec.generation.bos_ids, spec.generation.eos_ids) == ((2,), (3, 4))


def test_rare_filters_and_banned_tokens_of_the_file_are_kept(tmp_path: Path) -> None:
    content = {
        "typical_p": 0.95,
        "epsilon_cutoff": 3e-4,
        "eta_cutoff": 0.0,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [9, 7, 9],
        "bad_words_ids": [[7], [5, 6], [3]],
        "eos_token_id": 3,
    }
    spec = generation(tmp_path, content)
    assert spec.generation.defaults == {
        "typical_p": 0.95,
        "epsilon_cutoff": 3e-4,
        "eta_cutoff": 0.0,
        "no_repeat_ngram_size": 3,
    }
    assert spec.generation.banned_sequences == (
        (9,),
        (7,),
        (5, 6),
    )  # an end of text alone is not banned


def test_without_the_file_there_are_no_defaults(tmp_path: Path) -> None:
    assert read(tmp_path).generation.defaults == {}


def test_ids_missing_in_the_file_stay_those_of_the_config(tmp_path: Path) -> None:
    spec = generation(tmp_path, {}, eos_token_id=[5, 6])
    assert (spec.generation.eos_ids, spec.generation.defaults) == ((5, 6), {})


def test_a_file_without_sampling_makes_greedy_the_default(tmp_path: Path) -> None:
    spec = generation(tmp_path, {"do_sample": False, "temperature": 0.7})
    assert spec.generation.defaults["temperature"] == 0.0


@each_case(
    ("content", "said"),
    [
        ({"num_beams": 4}, "num_beams is 4"),
        ({"penalty_alpha": 0.5}, "penalty_alpha is 0.5"),
        ({"typical_p": 0}, "typical_p is 0"),
        ({"no_repeat_ngram_size": 51}, "no_repeat_ngram_size is 51"),
        ({"begin_suppress_tokens": [1]}, "begin_suppress_tokens is [1]"),
        ({"suppress_tokens": [5000]}, "suppress_tokens is 5000"),
        ({"bad_words_ids": [[1, 5000]]}, "bad_words_ids holds [1, 5000]"),
        ({"bad_words_ids": [[]]}, "bad_words_ids holds []"),
        ({"bad_words_ids": [3]}, "bad_words_ids holds 3"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, 'temperature is "hot"'),
        ({"top_p": 0}, "top_p is 0; a number from"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"min_new_tokens": 3}, "min_new_tokens is 3"),
        ({"do_sample": 1}, "do_sample is 1; true or false"),
        ({"odd": 1}, "unknown key 'odd'"),
        ("[]", "an object is expected"),
        ('{"temperature": NaN}', "holds NaN"),
    ],
)
def test_unsupported_generation_settings_are_rejected(
    content: Any, said: str, tmp_path: Path
) -> None:
    assert said in generation_refused(tmp_path, content)


def test_a_tiny_checkpoint_opens_with_its_end_of_text(tmp_path: Path) -> None:
    assert open_model(write_tiny_llama(tmp_path)).generation.eos_ids == (1,)
