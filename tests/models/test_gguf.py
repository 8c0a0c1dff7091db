"""A model from GGUF equals the model of its checkpoint: the same spec and logits, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.registry import open_model
from quire.models.spec import ExpertsSpec
from quire.program.tensors import DType
from tests.cases import each_case
from tests.gguf_convert import ARCHITECTURES, write_gguf_of
from tests.models.case import Case
from tests.models.cases import CASES
from tests.models.generate import EXECUTORS, logits_of, open_executor

# Properties that GGUF cannot express are changed: Gemma's query scale becomes that of its head
# width, numbers become float32.
CHANGES: dict[str, dict[str, Any]] = {
    "mistral_no_window": {},
    "gemma2_caps": {"query_pre_attn_scalar": 16},
    "gemma2_untied": {"query_pre_attn_scalar": 16, "attention_bias": False},
    "gemma3_mqa": {"query_pre_attn_scalar": 16},
    "gemma3_bf16": {"query_pre_attn_scalar": 16},
    "phi3_longrope_short": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.05, 1.1, 1.3, 1.6, 2.0],
            "long_factor": [1.1, 1.8, 3.3, 6.0, 11.0, 20.5],
        }
    },
    "starcoder2_unbiased_untied": {"rope_theta": 1e6},
    "starcoder2_bf16": {"rope_theta": 1e6, "sliding_window": None},
}
AS_THEY_ARE = (
    "mqa_untied", "mha_untied", "gqa_tied", "biases", "rope_linear", "rope_llama3", "rope_yarn",
    "stored_f16", "stored_bf16", "stored_bf16_tied", "qwen2_tied", "qwen2_untied_mha",
    "qwen2_yarn", "qwen3_mqa", "qwen3_biases_untied", "qwen3_default_head_dim", "qwen3_bf16",
    "smollm3_interval", "phi3_mqa_window", "phi3_longrope_long",
    "phi3_partial_tied", "phi3_bf16", "gemma_mqa_tied", "gemma_bf16", "gemma3_linear_wide_heads",
    "gpt2_to_the_last_position", "gpt2_bf16", "gpt2_bf16_untied", "granite_gqa_tied",
    "granite_biases_untied", "granite_bf16", "olmo2_gqa", "olmo2_biases_tied", "olmo2_bf16",
    "olmo3_every_fourth", "olmo3_bf16", "mixtral", "mixtral_bf16", "qwen3_moe", "qwen3_moe_bf16",
    "olmoe", "olmoe_bf16",
)  # fmt: skip
SAID = [case for case in CASES if case.name in {*AS_THEY_ARE, *CHANGES}]
KIND = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def both(case: Case, folder: Path, kind: str = "") -> tuple[Path, Path]:
    """Return the case's checkpoint and the GGUF file made of it."""
    changed = replace(case, changes=case.changes | CHANGES.get(case.name, {}))
    checkpoint = changed.write(folder / "checkpoint")
    if case.name == "mistral_no_window":
        config = json.loads((checkpoint / "config.json").read_text()) | {"sliding_window": None}
        (checkpoint / "config.json").write_text(json.dumps(config))
    path = folder / f"{case.name}.gguf"
    return checkpoint, write_gguf_of(checkpoint, path, kind=kind or KIND[case.stored])


def test_the_cases_cover_every_supported_architecture() -> None:
    assert {ARCHITECTURES[case.config.get("model_type", "llama")] for case in SAID} == set(
        ARCHITECTURES.values()
    )
    assert len(SAID) == len({*AS_THEY_ARE, *CHANGES})


def _stacked(experts: ExpertsSpec) -> ExpertsSpec:
    return replace(experts, tensors=replace(experts.tensors, stacked=True))


@each_case("case", SAID, ids=lambda case: case.name)
def test_the_spec_is_that_of_the_checkpoint(case: Case, tmp_path: Path) -> None:
    checkpoint, path = both(case, tmp_path)
    found, right = open_model(path), open_model(checkpoint)
    assert found == replace(
        right,
        norm=replace(right.norm, offset=0.0),
        # A Mistral without a window equals a Llama.
        architecture="LlamaForCausalLM" if "mistral" in case.name else right.architecture,
        experts=None if right.experts is None else _stacked(right.experts),
    )


@each_case("kind", EXECUTORS)
@each_case("case", SAID, ids=lambda case: case.name)
def test_logits_equal_those_of_the_checkpoint_bit_for_bit(
    case: Case, kind: str, tmp_path: Path
) -> None:
    checkpoint, path = both(case, tmp_path)
    dtype = DType.BF16 if case.stored == "bf16" else DType.F32
    found, right = (
        logits_of(
            open_executor(where, kind=kind, dtype=dtype),
            case.token_ids,
            max_positions=open_model(where).max_positions,
        )
        for where in (path, checkpoint)
    )
    np.testing.assert_array_equal(found.view(np.uint32), right.view(np.uint32))
