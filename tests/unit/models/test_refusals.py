"""Unsupported models are rejected by kind; code of a checkpoint is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.models.refusals import gguf_kind, with_head
from quire.models.registry import FAMILIES
from tests.cases import each_case
from tests.models.cases import CASES
from tests.tiny_models import tiny_config
from tests.unit.models.config_folder import opened, refused


@each_case(
    ("architecture", "keys", "said"),
    [
        ("BertModel", {}, "an encoder or a classifier (BertModel)"),
        ("RobertaForMaskedLM", {}, "an encoder or a classifier"),
        ("ModernBertForMaskedLM", {}, "an encoder or a classifier"),
        ("LlamaForSequenceClassification", {}, "an encoder or a classifier"),
        ("Qwen2ForRewardModel", {}, "an encoder or a classifier"),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "an encoder with a decoder"),
        ("BartForConditionalGeneration", {}, "an encoder with a decoder"),
        ("Odd", {"is_encoder_decoder": True}, "an encoder with a decoder (is_encoder_decoder)"),
        ("Gemma3ForConditionalGeneration", {"vision_config": {"a": 1}}, "reads images or audio"),
        ("Gemma3ForConditionalGeneration", {}, "reads images or audio"),
        ("LlavaForConditionalGeneration", {}, "reads images or audio"),
        ("Qwen2VLForConditionalGeneration", {}, "reads images or audio"),
        ("Qwen2_5_VLForConditionalGeneration", {}, "reads images or audio"),
        ("WhisperForConditionalGeneration", {"is_encoder_decoder": True}, "images or audio"),
        ("Odd", {"vision_config": {"a": 1}}, "reads images or audio (vision_config)"),
        ("LlamaForCausalLM", {"vision_config": {"a": 1}}, "reads images or audio"),
        ("DbrxForCausalLM", {}, "a mixture of experts (DbrxForCausalLM)"),
        ("ErnieMoeForCausalLM", {"num_experts": 128}, "a mixture of experts (num_experts)"),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 256}, "a mixture of experts"),
        ("GptOssForCausalLM", {"num_local_experts": 32}, "a mixture of experts"),
        ("MambaForCausalLM", {}, "state-space or recurrent layers"),
        ("JambaForCausalLM", {"num_experts": 16}, "state-space or recurrent layers"),
        ("RecurrentGemmaForCausalLM", {}, "state-space or recurrent layers"),
        ("CLIPModel", {}, "reads images or audio"),
        ("SiglipModel", {}, "reads images or audio"),
        ("Odd", {"_class_name": "UNet2DConditionModel"}, "makes images (UNet2DConditionModel)"),
        ("GPTNeoXForCausalLM", {}, "or add this one: docs/recipes/add-a-family.md"),
    ],
)
def test_an_unsupported_model_is_rejected_by_its_kind(
    architecture: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    message = refused(tmp_path, tiny_config(architectures=[architecture], **keys))
    assert said in message


def test_an_unknown_architecture_is_named_with_a_list_of_short_lines(tmp_path: Path) -> None:
    message = refused(tmp_path, tiny_config(architectures=["FalconForCausalLM"]))
    said = 'architectures is ["FalconForCausalLM"], which is not supported: take a checkpoint of a '
    assert (
        f"{said}family that runs, or add this one: docs/recipes/add-a-family.md; these" in message
    )
    listed = message.splitlines()[1:]
    assert ", ".join(line.strip() for line in listed).replace(",,", ",").split(", ") == sorted(
        FAMILIES, key=str.lower
    )
    assert max(map(len, listed)) <= 88


def test_an_unsupported_mixture_names_those_that_run(tmp_path: Path) -> None:
    message = refused(tmp_path, tiny_config(architectures=["DbrxForCausalLM"]))
    mixtures = [case.config["architectures"][0] for case in CASES if case.base and case.has_experts]
    named = {name for name, family in FAMILIES.items() if family.has_experts}
    assert named == set(mixtures)
    listed = ", ".join(name for name in FAMILIES if name in named)
    assert f"of a family that does not run yet; {listed} do; these run" in message


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("qwen2moe", "not read from GGUF; take its checkpoint in safetensors"),
        ("dots1", "not read from GGUF; take its checkpoint in safetensors"),
        ("deepseek2", "latent keys and values (MLA)"),
        ("gpt2", ""),
    ],
)
def test_what_is_not_read_from_gguf_is_named(architecture: str, said: str) -> None:
    assert said in gguf_kind(architecture)


def test_code_of_an_unknown_architecture_is_rejected_with_reason_and_alternatives(
    tmp_path: Path,
) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}
    config = tiny_config(architectures=["InternLM2ForCausalLM"], auto_map=auto_map)
    message = refused(tmp_path, config)
    for words in (
        "asks for code of its own",
        "could do anything on this machine",
        "nor is there a trust_remote_code",
        "add-a-family.md",
        "these run:",
    ):
        assert words in message


def test_code_of_a_supported_architecture_is_ignored(tmp_path: Path) -> None:
    auto_map = {
        "AutoConfig": "configuration_llama.LlamaConfig",
        "AutoModel": "someone/else--modeling_llama.LlamaModel",
        "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
        "AutoTokenizer": ["tokenization_odd.OddTokenizer", None],
    }
    (tmp_path / "modeling_llama.py").write_text("raise SystemExit('this was run')")
    spec = opened(tmp_path, tiny_config(auto_map=auto_map))
    assert spec == opened(tmp_path, tiny_config())
    assert opened(tmp_path, tiny_config(auto_map={})) == spec


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoModelForCausalLM": "modeling_yarn.YarnLlamaForCausalLM"},
        {"AutoConfig": "x.LlamaConfig", "AutoModel": "x.Y"},
        {"AutoModel": 5},
        ["x"],
        "x",
    ],
)
def test_code_under_another_name_is_rejected_even_for_a_supported_architecture(
    auto_map: Any, tmp_path: Path
) -> None:
    message = refused(tmp_path, tiny_config(auto_map=auto_map))
    assert "it asks for code that is not Llama's" in message
    assert "code that comes with a model is never run" in message
    assert "remove auto_map" in message


@pytest.mark.parametrize(
    ("name", "with_its_head"),
    [
        ("Qwen2Model", "Qwen2ForCausalLM"),
        ("GPT2Model", "GPT2LMHeadModel"),
        ("Gemma3TextModel", "Gemma3ForCausalLM"),
        ("BertModel", None),
        ("CLIPModel", None),
        ("Qwen2", None),
        (7, None),
    ],
)
def test_a_decoder_saved_alone_counts_as_the_model_with_its_head(
    name: object, with_its_head: str | None
) -> None:
    assert with_head(name, FAMILIES) == with_its_head
