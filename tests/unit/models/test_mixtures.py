"""Configurations with experts: published checkpoints open; the rest is refused by name."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.models.config_reader import ConfigReader
from quire.models.expert_config import read_experts
from quire.models.registry import build_program, open_model
from quire.models.spec import ExpertsSpec, ExpertTensors
from quire.program.expert_ops import Experts, Route
from quire.program.forms import RouterScore, RoutingForm
from quire.program.program import Program
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from tests.cases import each_case
from tests.models.case import Case
from tests.models.cases_experts import DOTS1, OLMOE, QWEN2_MOE
from tests.models.generate import EXECUTORS, executor_of, logits_of
from tests.tiny_models import write_weights
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN15_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}
NORMALIZED = RoutingForm.NORMALIZED

# As transformers' class writes it, with the numbers of dots.llm1.
DOTS_LLM1: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}


def _program(folder: Path, config: dict[str, Any], **changes: Any) -> Program:
    spec = opened(folder, config, **changes)
    return build_program(spec, dtype=DType.BF16, max_positions=64)


@pytest.mark.parametrize(
    ("config", "experts", "parameters"),
    [
        (
            MIXTRAL_8X7B,
            ExpertsSpec(
                layers=frozenset(range(32)),
                num_experts=8,
                top_k=2,
                size=14336,
                normalized=True,
                tensors=ExpertTensors(
                    block="block_sparse_moe", gate_proj="w1", up_proj="w3", down_proj="w2"
                ),
            ),
            46_702_792_704,
        ),
        (
            QWEN3_30B,
            ExpertsSpec(
                layers=frozenset(range(48)), num_experts=128, top_k=8, size=768, normalized=True
            ),
            30_532_122_624,
        ),
        (
            QWEN15_MOE,
            ExpertsSpec(
                layers=frozenset(range(24)),
                num_experts=60,
                top_k=4,
                size=1408,
                shared_size=5632,
                has_shared_gate=True,
            ),
            14_315_784_192,
        ),
        (
            OLMOE_1B_7B,
            ExpertsSpec(layers=frozenset(range(16)), num_experts=64, top_k=8, size=1024),
            6_919_161_856,
        ),
    ],
    ids=["Mixtral 8x7B", "Qwen3 30B-A3B", "Qwen 1.5 MoE A2.7B", "OLMoE 1B-7B"],
)
def test_published_checkpoints_open_with_all_their_parameters(
    config: dict[str, Any], experts: ExpertsSpec, parameters: int, tmp_path: Path
) -> None:
    spec = opened(tmp_path, config)
    assert spec.experts == experts
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    assert sum(weight.size for weight in program.weights.values()) == parameters


def test_the_form_of_transformers_5_is_the_same_model(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN3_30B.items() if key != "num_experts"}
    found = opened(tmp_path, config, num_local_experts=128, mlp_only_layers=None)
    assert found == opened(tmp_path, QWEN3_30B)


def test_a_choice_by_sigmoid_has_its_bias_groups_and_factor(tmp_path: Path) -> None:
    program = _program(tmp_path, DOTS_LLM1, num_hidden_layers=2, n_group=8, topk_group=4)
    (route,) = (op for op in program.segments["trunk"] if isinstance(op, Route))
    assert (route.score, route.form, route.scale) == (RouterScore.SIGMOID, NORMALIZED, 2.5)
    assert (route.bias, route.groups, route.top_groups) == ("layers.1.router.bias", 8, 4)
    assert program.weights["layers.1.shared.down"].columns == 2 * 1408
    assert "layers.0.down" in program.weights


def test_dense_layers_stay_between_those_with_experts(tmp_path: Path) -> None:
    program = _program(
        tmp_path, QWEN15_MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    mixed = {name.split(".")[1] for name in program.weights if ".experts." in name}
    assert mixed == {"1", "5"}
    assert {name for name in program.weights if name.endswith(("0.down", "3.down"))} == {
        "layers.0.down",
        "layers.3.down",
    }


def test_a_shared_expert_is_a_layer_of_one_behind_a_sigmoid(tmp_path: Path) -> None:
    program = _program(tmp_path, QWEN15_MOE, num_hidden_layers=1)
    routes = [op for op in program.segments["trunk"] if isinstance(op, Route)]
    experts = [op for op in program.segments["trunk"] if isinstance(op, Experts)]
    assert [(op.x.width, op.top_k, op.score) for op in routes] == [
        (60, 4, RouterScore.SOFTMAX),
        (1, 1, RouterScore.SIGMOID),
    ]
    assert [program.weights[op.down].columns for op in experts] == [1408, 5632]


def _variant(folder: Path, config: dict[str, Any], **changes: Any) -> Program:
    """Return the program of a model with other fields in its spec."""
    spec = replace(opened(folder, config, num_hidden_layers=2), **changes)
    return build_program(spec, dtype=DType.BF16, max_positions=64)


@pytest.mark.parametrize("base", [OLMOE, QWEN2_MOE, DOTS1], ids=lambda base: base["model_type"])
def test_the_factor_on_sums_applies_once_to_what_experts_add(
    base: dict[str, Any], tmp_path: Path
) -> None:
    """A factor of 0.5 is the same, bit for bit, as halves of the weights that end each half."""
    folder = Case("whole", base=base).write(tmp_path / "whole")
    halved, source = shutil.copytree(folder, tmp_path / "halved"), open_checkpoint(folder)
    ends = re.compile(r"(o_proj|down_proj)\.weight$")
    tensors = {
        name: source.read_f32(name) * np.float32(0.5 if ends.search(name) else 1)
        for name in source.names
    }
    write_weights(halved, tensors, dtype="f32")
    spec, ids = open_model(folder), list(range(20))
    for kind in EXECUTORS:
        right, found, unscaled = (
            logits_of(executor_of(one, where, kind=kind), ids, max_positions=512)
            for one, where in (
                (spec, halved),
                (replace(spec, residual_scale=0.5), folder),
                (spec, folder),
            )
        )
        assert np.array_equal(found, right)
        assert not np.array_equal(unscaled, right)


def test_experts_with_biases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"biases of experts' products \(mlp_bias\)"):
        _variant(tmp_path, OLMOE_1B_7B, mlp=replace(opened(tmp_path, OLMOE_1B_7B).mlp, bias=True))


def test_a_family_may_call_its_router_and_its_counts_otherwise(tmp_path: Path) -> None:
    """As Granite and DeepSeek's first mixture of experts do."""
    names = {"num_experts_per_tok": "moe_k", "num_experts": "moe_num_experts"}
    values = {names.get(key, key): value for key, value in OLMOE_1B_7B.items()}
    found = read_experts(
        ConfigReader(values, where="config.json"),
        layers=frozenset(range(16)),
        normalized=False,
        size_key="intermediate_size",
        top_k_key="moe_k",
        count_keys=("moe_num_experts",),
    )
    assert found == opened(tmp_path, OLMOE_1B_7B).experts
    tensors = ExpertTensors(block="moe", router="router.layer", selection_bias="router.bias")
    experts = replace(found, tensors=tensors, has_selection_bias=True)
    sources = _variant(tmp_path, OLMOE_1B_7B, experts=experts).source_shapes()
    assert sources["model.layers.0.moe.router.layer.weight"] == (64, 2048)
    assert sources["model.layers.0.moe.router.bias"] == (64,)


@each_case(
    ("config", "changes", "said"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are 8 experts"),
        (MIXTRAL_8X7B, {"num_local_experts": None}, "num_experts is missing"),
        (MIXTRAL_8X7B, {"num_experts": 4}, "they must agree"),
        (MIXTRAL_8X7B, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (QWEN3_30B, {"use_sliding_window": True}, "which layers have a window differs"),
        (QWEN3_30B, {"mlp_only_layers": ["1"]}, "a list of layer numbers is allowed"),
        (QWEN3_30B, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_30B, {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (QWEN3_30B, {"n_shared_experts": 1}, "unknown key 'n_shared_experts'"),
        (QWEN15_MOE, {"shared_expert_intermediate_size": None}, "is missing"),
        (OLMOE_1B_7B, {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (DOTS_LLM1, {"n_group": 7}, "groups of equal size that hold enough experts are needed"),
        (DOTS_LLM1, {"n_group": 64}, "6 of 128 experts in 1 of 64 groups"),
        (DOTS_LLM1, {"scoring_func": "softmax"}, "scores are sigmoids"),
        (DOTS_LLM1, {"topk_method": "sigmoid"}, "only noaux_tc is, by a bias and by groups"),
        (DOTS_LLM1, {"moe_layer_freq": 2}, "all layers after the first ones have experts"),
        (DOTS_LLM1, {"n_shared_experts": None}, "n_shared_experts is missing"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    config: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, config, **changes)
