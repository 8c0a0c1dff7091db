"""Models built and saved by transformers load here and compute the same (marked `parity`).

Each uses the library's own configuration class with small sizes, written by save_pretrained:
config.json in its present form, generation_config.json, tensor names, tied tensors, shards. Keys
not in a case have the class's default. Also the classes' defaults themselves, without weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.models.registry import FAMILIES, open_model
from tests.models.generate import EXECUTORS, logits_of, open_executor
from tests.models.record import relative_error, transformers_logits

pytestmark = pytest.mark.parity

F32_ERROR = 1e-4
LENGTH = 60  # beyond the windows of 9 and the 32 original positions of some ropes

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 131}
OPT_SIZES = {
    "hidden_size": 48,
    "ffn_dim": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 48,
}
PHI3_SIZES = {key: SIZES[key] for key in SIZES if key != "head_dim"} | {
    "original_max_position_embeddings": 256
}
EXPERT_SIZES = SIZES | {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 20}
QWEN2_MOE_SIZES = {key: EXPERT_SIZES[key] for key in EXPERT_SIZES if key != "head_dim"}
CLASSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", SIZES),
    "MistralForCausalLM": ("MistralConfig", SIZES),
    "MinistralForCausalLM": ("MinistralConfig", SIZES),
    "Qwen2ForCausalLM": ("Qwen2Config", SIZES),
    "Qwen3ForCausalLM": ("Qwen3Config", SIZES),
    "SmolLM3ForCausalLM": ("SmolLM3Config", SIZES),
    "Phi3ForCausalLM": ("Phi3Config", PHI3_SIZES),
    "GemmaForCausalLM": ("GemmaConfig", SIZES),
    "Gemma2ForCausalLM": ("Gemma2Config", SIZES),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", SIZES),
    "GraniteForCausalLM": ("GraniteConfig", SIZES),
    "GPT2LMHeadModel": ("GPT2Config", GPT2_SIZES),
    "Olmo2ForCausalLM": ("Olmo2Config", SIZES),
    "Olmo3ForCausalLM": ("Olmo3Config", SIZES),
    "OPTForCausalLM": ("OPTConfig", OPT_SIZES),
    "StableLmForCausalLM": (
        "StableLmConfig",
        {key: SIZES[key] for key in SIZES if key != "head_dim"} | {"hidden_size": 64},
    ),
    "Starcoder2ForCausalLM": ("Starcoder2Config", SIZES),
    "MixtralForCausalLM": (
        "MixtralConfig",
        SIZES | {"num_experts_per_tok": 2, "num_local_experts": 6},
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        QWEN2_MOE_SIZES | {"shared_expert_intermediate_size": 28},
    ),
    "Dots1ForCausalLM": (
        "Dots1Config",
        {key: value for key, value in EXPERT_SIZES.items() if key != "num_experts"}
        | {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", EXPERT_SIZES),
    "OlmoeForCausalLM": (
        "OlmoeConfig",
        {key: QWEN2_MOE_SIZES[key] for key in QWEN2_MOE_SIZES if key != "moe_intermediate_size"},
    ),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0}
OLD_LINEAR = {"rope_theta": 40000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
LONG = {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [2.1] * 6}
MIXED = ["full_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A model of an architecture: its configuration beyond sizes, and its dtype."""

    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def name(self) -> str:
        words = [f"{key}={self.settings[key]}"[:40] for key in self.settings]
        return "-".join([self.architecture, *words, self.dtype])

    def save(self, folder: Path, **options: Any) -> Path:
        """Build it with random weights, norms included, and save it by transformers."""
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        name, sizes = CLASSES[self.architecture]
        if not hasattr(transformers, name):
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        settings = copy.deepcopy({**sizes, **self.settings})
        config = getattr(transformers, name)(**settings)
        torch.manual_seed(1)
        model = getattr(transformers, self.architecture)(config)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
        model.to(getattr(torch, self.dtype)).save_pretrained(folder, **options)
        return folder


def variants(architectures: str, *settings: Mapping[str, Any]) -> list[Saved]:
    return [Saved(f"{name}", one) for name in architectures.split() for one in settings]


SAVED = [
    *[Saved(name) for name in CLASSES],
    *[Saved(name, {"tie_word_embeddings": True}) for name in CLASSES],
    *[Saved(name, {"tie_word_embeddings": False}, "bfloat16") for name in CLASSES],
    *variants(
        "LlamaForCausalLM Qwen3ForCausalLM GraniteForCausalLM Starcoder2ForCausalLM",
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LINEAR},
        OLD_LINEAR,
    ),
    *variants(
        "LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM SmolLM3ForCausalLM Olmo2ForCausalLM "
        "Gemma2ForCausalLM",
        {"rope_parameters": YARN},
    ),
    *variants(
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4, "hidden_act": "gelu"},
    ),
    Saved("LlamaForCausalLM", {"rope_parameters": LLAMA3}, "float16"),
    *variants("MistralForCausalLM", {"sliding_window": None}, {"sliding_window": 9}),
    *variants("MinistralForCausalLM", {"sliding_window": 9, "layer_types": MIXED}),
    *variants(
        "Qwen2ForCausalLM Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": MIXED},
    ),
    *variants("Qwen3ForCausalLM", {"attention_bias": True}),
    *variants(
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True},
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2},
    ),
    *variants(
        "Phi3ForCausalLM",
        {"sliding_window": 9},
        {"original_max_position_embeddings": 32, "rope_scaling": LONG},
        {
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_scaling": LONG,
        },
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONG | {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    *variants("GemmaForCausalLM", {"attention_bias": True}, {"hidden_act": "gelu"}),
    *variants(
        "Gemma2ForCausalLM",
        {"sliding_window": 9, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
        {"sliding_window": 9, "layer_types": MIXED, "final_logit_softcapping": None},
        {"attn_logit_softcapping": None, "attention_bias": True},
    ),
    *variants(
        "Gemma3ForCausalLM",
        {"sliding_window": 9, "num_hidden_layers": 7, "final_logit_softcapping": 5.0},
        {"sliding_window": 9, "layer_types": MIXED, "attention_bias": True},
        {"sliding_window": 9, "rope_theta": 5000.0, "rope_local_base_freq": 300.0},
        {
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    *variants(
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.02,
            "residual_multiplier": 0.3,
            "logits_scaling": 8.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    *variants(
        "GPT2LMHeadModel",
        {"scale_attn_weights": False, "n_inner": 70},
        {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
        {"reorder_and_upcast_attn": True},
    ),
    *variants("Olmo2ForCausalLM", {"attention_bias": True}),
    *variants(
        "Olmo3ForCausalLM",
        {"sliding_window": 9, "num_hidden_layers": 5, "rope_scaling": YARN},
        {"sliding_window": 9, "layer_types": MIXED, "attention_bias": True},
        {"sliding_window": 9, "num_hidden_layers": 5, "rope_theta": 777.0},
    ),
    *variants(
        "OPTForCausalLM",
        {"do_layer_norm_before": False},
        {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
        {"enable_bias": False, "activation_function": "gelu"},
        {"layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ),
    *variants(
        "StableLmForCausalLM",
        {"use_qkv_bias": True, "rope_parameters": LINEAR},
        {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    ),
    *variants("Starcoder2ForCausalLM", {"use_bias": False, "sliding_window": 9}),
]


def test_every_family_is_covered() -> None:
    assert set(CLASSES) == set(FAMILIES)


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: saved.name)
def test_a_model_saved_by_transformers_computes_the_same(saved: Saved, tmp_path: Path) -> None:
    agrees(saved.save(tmp_path))
    assert open_model(tmp_path).dtype == {"float32": "f32", "bfloat16": "bf16"}.get(
        saved.dtype, "f16"
    )


def test_shards_saved_by_transformers_compute_the_same(tmp_path: Path) -> None:
    saved = Saved("Qwen3ForCausalLM", {"tie_word_embeddings": True})
    agrees(saved.save(tmp_path, max_shard_size="40KB"))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2


# Of Dots1Config the number of experts is None by default.
@pytest.mark.parametrize("architecture", [name for name in CLASSES if name != "Dots1ForCausalLM"])
def test_the_defaults_of_a_configuration_class_load(architecture: str, tmp_path: Path) -> None:
    """With sizes of billions: no weights are created."""
    transformers = pytest.importorskip("transformers")
    name, _ = CLASSES[architecture]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, name)()
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    spec = open_model(tmp_path)
    assert (spec.hidden_size, spec.vocab_size) == (config.hidden_size, config.vocab_size)
    assert spec.head.is_tied == config.tie_word_embeddings


def agrees(folder: Path) -> None:
    """Compare logits of every row, in f32, on every executor."""
    token_ids = np.random.default_rng(3).integers(0, 131, LENGTH).tolist()
    right = transformers_logits(folder, token_ids)
    for kind in EXECUTORS:
        executor = open_executor(folder, kind=kind)
        found = logits_of(executor, token_ids, max_positions=256, chunk=37)
        assert relative_error(found, right) <= F32_ERROR, kind
