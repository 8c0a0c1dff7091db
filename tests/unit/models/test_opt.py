"""OPT's configuration: published checkpoints open; unsupported settings are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.models.registry import build_program
from quire.models.spec import AttentionSpec, GenerationSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec
from quire.program.forms import NormForm
from quire.program.ops import Copy, GatherRows, Linear, Norm
from quire.program.tensors import DType
from tests.cases import each_case
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
OPT_125M: dict[str, Any] = {
    "_name_or_path": "facebook/opt-125m",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M = OPT_125M | {
    "_name_or_path": "opt-350m",
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "transformers_version": "4.20.0.dev0",
    "word_embed_proj_dim": 512,
}
OPT_13B = OPT_125M | {
    "_name_or_path": "facebook/opt-13b",
    "_remove_final_layer_norm": False,
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "output_projection": True,
    "word_embed_proj_dim": 5120,
}
OPT_GENERATION: dict[str, Any] = {
    "_from_model_config": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "transformers_version": "4.26.0.dev0",
}
SAVED_ANEW = OPT_125M | {
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
    "tie_word_embeddings": True,
}


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return build_program(spec, dtype=DType.F32, max_positions=100).source_shapes()


# ---- published checkpoints


def test_opt_125m_is_pre_norm_with_2048_learned_positions(tmp_path: Path) -> None:
    assert opened(tmp_path, OPT_125M, OPT_GENERATION) == ModelSpec(
        architecture="OPTForCausalLM",
        vocab_size=50272,
        hidden_size=768,
        mlp=MlpSpec(size=3072, activation="relu", bias=True),
        num_layers=12,
        attention=AttentionSpec(
            num_heads=12, num_kv_heads=12, head_dim=64, qkv_bias=True, output_bias=True
        ),
        norm=NormSpec(eps=1e-5, form=NormForm.LAYER, has_bias=True),
        max_positions=2048,
        rotary=None,
        head=HeadSpec(is_tied=True),
        dtype="f16",
        generation=GenerationSpec(bos_ids=(2,), eos_ids=(2,)),
    )


def test_opt_350m_is_post_norm_with_narrow_embeddings(tmp_path: Path) -> None:
    spec = opened(tmp_path, OPT_350M, OPT_GENERATION)
    assert (spec.norm.on_sums, spec.norm.has_final, spec.embedding.size) == (True, False, 512)
    shapes = shapes_of(spec)
    assert shapes["model.decoder.embed_tokens.weight"] == (50272, 512)
    assert shapes["model.decoder.project_in.weight"] == (1024, 512)
    assert shapes["model.decoder.project_out.weight"] == (512, 1024)
    assert "model.decoder.final_layer_norm.weight" not in shapes


def test_opt_350m_saved_anew_opens_too(tmp_path: Path) -> None:
    saved = OPT_350M | {"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}
    assert opened(tmp_path, saved) == opened(tmp_path, OPT_350M)


def test_opt_13b_states_that_its_head_is_a_projection(tmp_path: Path) -> None:
    assert opened(tmp_path, OPT_13B).num_layers == 40


def test_an_opt_saved_by_transformers_5_is_equal(tmp_path: Path) -> None:
    assert opened(tmp_path, SAVED_ANEW) == opened(tmp_path, OPT_125M)


# ---- meaning of keys


def test_the_first_two_rows_of_the_position_table_are_never_read(tmp_path: Path) -> None:
    spec = opened(tmp_path, OPT_125M)
    program = build_program(spec, dtype=DType.F32, max_positions=2048)
    (part,) = program.weights["positions"].parts
    assert (part.first_row, part.rows, part.of_rows) == (2, 2048, 2050)


def test_biases_and_the_weights_of_norms_can_be_missing(tmp_path: Path) -> None:
    spec = opened(tmp_path, OPT_125M, enable_bias=False, layer_norm_elementwise_affine=False)
    program = build_program(spec, dtype=DType.F32, max_positions=10)
    names = program.source_shapes()
    assert not [name for name in names if name.endswith(".bias") or "norm" in name]
    norms = [op for ops in program.segments.values() for op in ops if isinstance(op, Norm)]
    assert {op.weight for op in norms} == {None}
    assert len(norms) == 25


def test_the_last_norm_can_be_absent_and_then_the_stream_is_rounded(tmp_path: Path) -> None:
    spec = opened(tmp_path, OPT_125M, _remove_final_layer_norm=True)
    program = build_program(spec, dtype=DType.BF16, max_positions=10)
    kinds = [type(op) for op in program.segments["head"]]
    assert kinds == [GatherRows, Copy, Linear]


def test_the_stream_stays_in_f32_though_its_sums_are_normed(tmp_path: Path) -> None:
    program = build_program(opened(tmp_path, OPT_350M), dtype=DType.BF16, max_positions=10)
    sums = [op.outputs[1] for op in program.segments["trunk"] if isinstance(op, Norm)]
    assert {view.dtype for view in sums} == {DType.F32}
    assert program.outputs["hidden"].dtype is DType.F32


def test_a_width_not_divisible_by_heads_is_rejected(tmp_path: Path) -> None:
    message = refused(tmp_path, OPT_125M, hidden_size=766)
    assert "hidden_size is 766, not a multiple of num_attention_heads 12" in message


@each_case(
    ("key", "value"),
    [
        ("ffn_dim", None),
        ("hidden_size", None),
        ("max_position_embeddings", None),
        ("word_embed_proj_dim", 0),
        ("do_layer_norm_before", "yes"),
        ("activation_function", "tanh"),
        ("intermediate_size", 3072),
        ("num_key_value_heads", 12),
        ("rope_theta", 1e4),
        ("learned_embeddings", False),
        ("scale_embeddings", True),
    ],
)
def test_required_and_unsupported_settings_of_opt(key: str, value: Any, tmp_path: Path) -> None:
    assert key in refused(tmp_path, OPT_125M, **{key: value})
