"""Drafting by the first layers: the same answers, sized and refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import SettingError
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.config.flags import engine_config
from quire.config.machine import MachineMemory
from quire.config.memory import plan_memory
from quire.engine.assembly import self_draft, self_draft_trial
from quire.engine.assembly.programs import engine_program
from quire.engine.assembly.proposers import sized_proposer
from quire.engine.assembly.self_draft import sized_self_draft
from quire.engine.assembly.self_draft_trial import Trial, _affordable, tried
from quire.engine.assembly.sizing import memory_needs, step_limits
from quire.execute.native import NativeExecutor
from quire.models.registry import open_model
from quire.speculative.control import AdaptiveControl
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.drafter import Drafter
from quire.speculative.self_draft import SelfProposer
from quire.train.tensor_file import read_tensors, write_tensors
from tests.tiny_models import write_tiny_llama

PROMPTS = [[5, 6, 7, 8, 9] * 4, [20, 21, 22], [5, 6, 7, 8]]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=30, seed=3, frequency_penalty=0.4, n=2),
    SamplingParams(temperature=0.7, max_tokens=30, seed=4, min_tokens=9, top_k=3),
]
SETTINGS = {"threads": 1, "max_num_seqs": 4, "max_model_len": 64, "speculate": "self"}
OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of six layers, of which the last add little."""
    folder = tmp_path_factory.mktemp("self") / "deep"
    return write_tiny_llama(folder, seed=4, num_hidden_layers=6)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
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
        for one in llm.generate(PROMPTS, SAMPLING, terms=terms)
        for answer in one.outputs
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"executor": "reference"},
        {"plans_in_flight": 2},
        {"executor": "reference", "plans_in_flight": 2},
        {"kv_cache_dtype": "int8", "block_size": 4},
        {"quantization": "int8", "kv_cache_memory": "64KiB"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())) or "native",
)
def test_answers_are_those_without_drafts(
    deep: Path, drafts: dict[str, int], settings: dict[str, Any]
) -> None:
    with LLM(deep, self_draft_layers=5, **{**SETTINGS, **settings}) as llm:
        plain = answers(llm, OFF)
        assert drafts["drafted"] == 0
        assert answers(llm) == plain
        assert drafts["drafted"] > 40
        assert drafts["accepted"] > 4


def test_layers_without_speculate_draft_for_requests_that_ask(
    deep: Path, drafts: dict[str, int]
) -> None:
    with LLM(deep, self_draft_layers=3, **{**SETTINGS, "speculate": "off"}) as llm:
        plain = answers(llm)
        assert drafts["drafted"] == 0
        asked = SchedulingParams(speculation=SpeculationParams(is_on=True))
        assert answers(llm, asked) == plain
        assert drafts["drafted"] > 40


def test_a_pass_that_raises_costs_the_drafts_only(
    deep: Path, drafts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(deep, self_draft_layers=3, **SETTINGS) as llm:
        plain = answers(llm, OFF)

        def fails(*_: object) -> None:
            raise RuntimeError("no pass")

        monkeypatch.setattr(SelfProposer, "_draft", fails)
        assert answers(llm) == plain
        assert drafts["drafted"] == 0


def test_how_many_layers_draft_is_open_until_it_is_measured(deep: Path) -> None:
    config = engine_config({"model": str(deep), **SETTINGS})
    program = engine_program(config, open_model(deep), None)
    draft = sized_self_draft(config, program, NativeExecutor)
    assert sorted(draft.choices) == [1, 2, 4, 5]
    assert draft.notes(64) == [
        "drafts: first layers of the model, 1, 2, 4 or 5, as measured, at most 4 requests a pass"
    ]
    assert draft.limits.max_tokens == draft.limits.max_sequences == 4
    assert draft.program.name == "LlamaForCausalLM, first 1 of 6 layers"  # where it is not


def test_a_given_number_leaves_nothing_open(deep: Path) -> None:
    config = engine_config({"model": str(deep), **SETTINGS, "self_draft_layers": 2})
    program = engine_program(config, open_model(deep), None)
    draft = sized_self_draft(config, program, NativeExecutor)
    assert not draft.choices
    assert draft.program.name == "LlamaForCausalLM, first 2 of 6 layers"


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of six layers, of which those after the second add nothing."""
    folder = tmp_path_factory.mktemp("self") / "early"
    write_tiny_llama(
        folder, seed=4, num_hidden_layers=6, num_key_value_heads=2, num_attention_heads=6
    )
    file = folder / "model.safetensors"
    tensors, _ = read_tensors(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")) and int(name.split(".")[2]) >= 2:
            tensors[name][:] = 0.0
    write_tensors(file, tensors, {})
    return folder


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial | None]:
    """Return what was measured when engines were loaded."""
    found: list[Trial | None] = []

    def watched(*given: Any, **named: Any) -> Trial | None:
        found.append(tried(*given, **named))
        return found[-1]

    monkeypatch.setattr(self_draft, "tried", watched)
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"executor": "reference"},
        {"tensor_parallel_size": 2, "threads": 2},
        {"pipeline_parallel_size": 2, "threads": 2},
        {"context_parallel_size": 2, "threads": 2, "kv_cache_memory": "8MiB"},
    ],
    ids=lambda given: next(iter(given), "native"),
)
def test_what_is_measured_is_what_drafts_are_accepted(
    early: Path, drafts: dict[str, int], trials: list[Trial | None], given: dict[str, Any]
) -> None:
    settings = {**SETTINGS, "kv_cache_memory": "512KiB", "max_num_seqs": 8, **given}
    with LLM(early, **settings) as llm:
        plain = answers(llm, OFF)
        assert answers(llm) == plain
    (trial,) = trials
    assert trial is not None
    assert [one.num for one in trial.measured] == [1, 2, 4, 5]
    assert trial.num_tokens == 8 * 24
    shares = [one.first for one in trial.measured]
    assert shares[0] < 0.9
    assert shares[1:] == [1.0] * 3
    assert drafts["drafted"] > 40


@pytest.mark.parametrize(
    ("step_ms", "nums", "num_tokens"),
    [
        (1.0, [3, 6, 13, 19, 26], 24),
        (100.0, [3, 6, 13, 19, 26], 16),
        (400.0, [3, 6, 13, 19, 26], 4),
        (700.0, [3, 6, 13], 4),  # fewer candidates before fewer tokens than four
        (1100.0, [3], 4),
        (1200.0, [], 0),
    ],
)
def test_what_is_measured_depends_on_the_time_of_a_step(
    step_ms: float, nums: list[int], num_tokens: int
) -> None:
    shares = {num: num / 32 for num in (3, 6, 13, 19, 26)}
    assert _affordable(shares, step_ms) == (nums, num_tokens)


def test_a_machine_that_is_too_slow_to_measure_takes_a_fifth(
    early: Path, trials: list[Trial | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_draft_trial, "MAX_MS", 0.0)
    with LLM(early, **SETTINGS) as llm:
        assert llm.generate(PROMPTS[:1], SAMPLING[0])[0].outputs[0].token_ids
    assert trials == [None]


def test_shorter_texts_of_fewer_candidates_are_measured_where_time_is_short(
    early: Path, trials: list[Trial | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_draft_trial, "_affordable", lambda shares, step_ms: ([1, 2], 5))
    with LLM(early, block_size=4, **SETTINGS) as llm:
        assert llm.generate(PROMPTS[:1], SAMPLING[0])
    (trial,) = trials
    assert trial is not None
    assert [one.num for one in trial.measured] == [1, 2]
    assert trial.measured[1].agrees.shape == (4, 5)
    assert trial.measured[1].first == 1.0


def test_a_context_that_is_too_short_to_measure_takes_a_fifth(
    early: Path, trials: list[Trial | None]
) -> None:
    with LLM(early, **{**SETTINGS, "max_model_len": 4}) as llm:
        assert llm.generate([[5, 6]], replace(SAMPLING[0], max_tokens=2))
    assert trials == [None]


def test_one_block_of_kv_cache_is_enough_to_measure(
    early: Path, trials: list[Trial | None]
) -> None:
    settings = {**SETTINGS, "max_num_seqs": 1, "max_model_len": 16, "block_size": 16}
    with LLM(early, kv_cache_memory="50KiB", **settings) as llm:
        assert llm.generate([[5, 6, 7]], replace(SAMPLING[0], max_tokens=4))
    (trial,) = trials
    assert trial is not None
    assert trial.num_tokens == 15


def test_buffers_of_passes_are_all_that_the_memory_plan_adds(deep: Path) -> None:
    config = engine_config({"model": str(deep), **SETTINGS, "kv_cache_memory": "1MiB"})
    spec = open_model(deep)
    program = engine_program(config, spec, None)
    needs = sized_proposer(config, spec, program, None, NativeExecutor).needs
    assert (needs.weights_bytes, needs.token_bytes) == (0, 0)
    assert needs.step_bytes > 0
    sized = memory_needs(
        config,
        program,
        NativeExecutor,
        step_limits(config, NativeExecutor),
        model_max_len=64,
        device_is_own=False,
        draft=needs,
    )
    plan = plan_memory(sized, MachineMemory(available_bytes=2**30, limit="free memory"))
    assert plan.draft_blocks == 0
    by_name = {line.what: -line.num_bytes for line in plan.lines}
    assert by_name["first layers: step buffers"] == needs.step_bytes
    assert sum(line.num_bytes for line in plan.lines[:-1]) == plan.lines[-1].num_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"self_draft_layers": 6}, "self_draft_layers is 6 and the model has 6 layers.*1 to 5"),
        ({"self_draft_layers": 0}, "self_draft_layers is 0"),
        ({"self_draft_layers": 2, "speculate": "ngram"}, "and speculate is ngram, so that it"),
        ({"self_draft_layers": 2, "speculate": "eagle"}, "and speculate is eagle, so that it"),
        ({"self_draft_layers": 2, "draft_model": "x", "speculate": "off"}, "a draft model is giv"),
        ({"draft_model": "x"}, "draft_model is x and speculate is self, so that it would never"),
        ({"max_draft_tokens": 0}, "speculate is self and max_draft_tokens is 0"),
        (
            {"self_draft_layers": 2, "max_draft_tokens": 0, "speculate": "off"},
            "self_draft_layers is 2 and max_draft_tokens is 0, so that it would never be used",
        ),
        ({"speculate": "selfish"}, "speculate is 'selfish'"),
    ],
)
def test_contradictions_are_rejected(deep: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LLM(deep, **{**SETTINGS, **settings})


def test_a_single_layer_cannot_draft(tmp_path: Path) -> None:
    flat = write_tiny_llama(tmp_path / "flat", num_hidden_layers=1)
    with pytest.raises(SettingError, match=r'has 1 layers.*set speculate="ngram" or off'):
        LLM(flat, **SETTINGS)
