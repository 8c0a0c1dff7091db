"""A draft model: compared with the model and counted before loading, then used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import CapacityError, ModelError, SettingError, WeightsError
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.config.flags import engine_config
from quire.config.machine import MachineMemory
from quire.config.memory import plan_memory
from quire.engine.assembly.draft_files import draft_folder
from quire.engine.assembly.draft_model import check_vocabulary, sized_draft
from quire.engine.assembly.sizing import memory_needs, step_limits
from quire.execute.native import NativeExecutor
from quire.models.model_folder import draft_box_path
from quire.models.registry import open_model
from quire.speculative.control import AdaptiveControl
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.drafter import Drafter
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama

PROMPTS = [[5, 6, 7, 8, 9] * 4, [20, 21, 22], [5, 6, 7, 8]]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=30, seed=3, frequency_penalty=0.4),
    SamplingParams(temperature=0.7, max_tokens=30, seed=4, min_tokens=9, top_k=3),
]
OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of another size with the same tokenizer, and a shorter context."""
    folder = tmp_path_factory.mktemp("drafts") / "small"
    return write_tiny_llama(
        folder, seed=4, num_hidden_layers=1, hidden_size=48, max_position_embeddings=30
    )


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Verify all drafts, whatever they cost on this machine, and count them."""
    counts, verified = {"drafted": 0, "accepted": 0}, Drafter.verified

    def watched(self: Drafter, index: Any, drafted: Any, accepted: Any) -> None:
        counts["drafted"] += int(drafted.sum())
        counts["accepted"] += int(accepted.sum())
        verified(self, index, drafted, accepted)

    monkeypatch.setattr(Drafter, "verified", watched)
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    return counts


def answers(llm: LLM, terms: SchedulingParams | None = None) -> list[tuple[object, ...]]:
    return [
        (answer.token_ids, [token.logprob for token in answer.logprobs], answer.finish_reason)
        for (answer,) in (one.outputs for one in llm.generate(PROMPTS, SAMPLING, terms=terms))
    ]


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_a_model_that_drafts_for_itself_is_always_right(
    model: Path, all_drafts: dict[str, int], executor: str
) -> None:
    settings = {"threads": 1, "max_num_seqs": 4, "executor": executor, "max_model_len": 64}
    with LLM(model, speculate="draft", draft_model=str(model), **settings) as llm:
        plain = answers(llm, OFF)
        assert all_drafts["drafted"] == 0
        assert answers(llm) == plain
        assert all_drafts["accepted"] == all_drafts["drafted"] > 40


def test_another_model_drafts_within_its_context_with_two_plans_in_flight(
    model: Path, other: Path, all_drafts: dict[str, int]
) -> None:
    settings = {"threads": 1, "max_num_seqs": 4, "plans_in_flight": 2, "max_model_len": 64}
    with LLM(model, draft_model=str(other), **settings) as llm:
        plain = answers(llm)
        assert all_drafts["drafted"] == 0  # speculate is off
        asked = SchedulingParams(speculation=SpeculationParams(is_on=True))
        assert answers(llm, asked) == plain
        assert all_drafts["drafted"] > 30
        assert llm.card.max_draft_tokens == 8


def test_the_built_in_model_has_a_draft_model_and_others_need_one(model: Path) -> None:
    assert draft_folder(engine_config({"speculate": "draft"}), "draft") == draft_box_path()
    with pytest.raises(SettingError, match="no draft model is given; give --draft-model"):
        draft_folder(engine_config({"model": str(model), "speculate": "draft"}), "draft")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculate": "ngram"}, "draft_model is x and speculate is ngram, so that it would never"),
        ({"max_draft_tokens": 0}, "draft_model is x and max_draft_tokens is 0"),
        ({"draft_model": ""}, "draft_model is empty"),
    ],
)
def test_contradictions_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        engine_config({"model": "m", "draft_model": "x"} | settings)


def test_differences_of_tokens_are_listed_before_anything_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    changed = write_tiny_llama(tmp_path / "changed", seed=4)
    file = changed / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token, id_ in vocabulary.items() if id_ in (40, 41)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    (changed / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"in 2 of \d+ ids: id 40 is .*; id 41 is .*same family"):
        LLM(model, speculate="draft", draft_model=str(changed))


def test_padding_of_the_table_is_no_difference_but_more_tokens_are(
    model: Path, tmp_path: Path
) -> None:
    padded = write_tiny_llama(tmp_path / "padded", seed=4, vocab_size=320)
    check_vocabulary(model, 307, padded, 320)
    (padded / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has 320 token ids, .* has 307, and their tokens cannot"):
        check_vocabulary(model, 307, padded, 320)


def test_tokens_are_not_taken_as_equal_where_the_drafts_tokenizer_cannot_be_read(
    model: Path, tmp_path: Path
) -> None:
    damaged = write_tiny_llama(tmp_path / "damaged", seed=4)
    file = damaged / "tokenizer.json"
    file.write_text(file.read_text()[:200])
    with pytest.raises(
        ModelError, match=r"cannot be compared \(.*damaged.*cannot be read as a tokenizer"
    ):
        check_vocabulary(model, 307, damaged, 307)
    file.unlink()
    with pytest.raises(ModelError, match=r"cannot be compared \(.*damaged.*no tokenizer"):
        check_vocabulary(model, 307, damaged, 307)
    check_vocabulary(damaged, 307, model, 307)


def test_a_gguf_file_drafts_for_a_directory(
    model: Path, tmp_path: Path, all_drafts: dict[str, int]
) -> None:
    file = write_gguf_of(model, tmp_path / "draft.gguf")
    check_vocabulary(model, 307, file, 307)
    settings = {"threads": 1, "max_num_seqs": 4, "max_model_len": 64}
    with LLM(model, speculate="draft", draft_model=str(file), **settings) as llm:
        assert answers(llm) == answers(llm, OFF)
    assert all_drafts["accepted"] == all_drafts["drafted"] > 40


def test_settings_that_the_draft_model_cannot_have_name_it(model: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    even = write_tiny_llama(tmp_path / "even", **shape)
    file = write_gguf_of(even, tmp_path / "draft.gguf", kind="Q8_0")
    config = engine_config({"model": str(even), "draft_model": str(file), "quantization": "int4"})
    with pytest.raises(SettingError, match=r"^draft model .*draft.gguf: .*quantized already"):
        sized_draft(config, open_model(even), NativeExecutor)


def test_weights_are_compared_with_the_configuration_before_anything_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_tiny_llama(tmp_path / "draft", seed=4)
    values = json.loads((draft / "config.json").read_text())
    changed = {**values, "intermediate_size": values["intermediate_size"] + 32}
    (draft / "config.json").write_text(json.dumps(changed))
    monkeypatch.setattr(NativeExecutor, "__init__", None)
    with pytest.raises(
        WeightsError, match=r"(?s)draft: weights and config.json disagree.*gate_proj"
    ):
        LLM(model, speculate="draft", draft_model=str(draft))
    (draft / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"draft: there is neither model.safetensors nor"):
        LLM(model, speculate="draft", draft_model=str(draft))


def test_the_sum_of_memory_contains_the_draft_model(model: Path, other: Path) -> None:
    config = engine_config(
        {
            **{"model": str(model), "draft_model": str(other), "speculate": "draft"},
            **{"max_num_seqs": 4, "kv_cache_memory": "1MiB", "max_model_len": 64},
        }
    )
    spec = open_model(model)
    draft = sized_draft(config, spec, NativeExecutor)
    assert "its context is 30 tokens, shorter than max-model-len 64" in draft.notes(64)[0]
    limits = step_limits(config, NativeExecutor)
    needs = memory_needs(
        config,
        draft.program,
        NativeExecutor,
        limits,
        model_max_len=64,
        device_is_own=False,
        draft=draft.needs,
    )
    memory = MachineMemory(available_bytes=2**30, limit="free memory")
    plan = plan_memory(needs, memory)
    assert plan.draft_blocks == 4 * 2  # 30 tokens of 4 requests, in blocks of 16
    assert sum(line.num_bytes for line in plan.lines[:-1]) == plan.lines[-1].num_bytes
    by_name = {line.what: -line.num_bytes for line in plan.lines}
    kv_bytes = 8 * 16 * draft.needs.token_bytes
    assert by_name["draft model: KV cache (8 blocks of 16 tokens)"] == kv_bytes
    large = replace(draft.needs, weights_bytes=2**31)
    with pytest.raises(
        CapacityError,
        match=r"2048.0 MiB draft model: weights, .*KV block of the draft model, 256.*or leave the",
    ):
        plan_memory(replace(needs, draft=large), memory)
    all_left_bytes = plan.kv_bytes + plan.lines[-1].num_bytes
    greedy = replace(needs, kv_cache_memory_bytes=all_left_bytes)
    assert plan_memory(greedy, memory).draft_blocks == 8
    greedy = replace(needs, kv_cache_memory_bytes=all_left_bytes + 1)
    with pytest.raises(CapacityError, match="for 8 KV blocks of the draft model"):
        plan_memory(greedy, memory)
