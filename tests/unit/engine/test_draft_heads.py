"""Draft heads in the whole engine: the drafts they propose, equal answers, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, ModelError, QuireError, SettingError, WeightsError
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.models.eagle import TAP_KEY
from quire.scheduler.speculation.plain_steps import PlainSteps
from quire.speculative.control import AdaptiveControl
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.eagle import EagleProposer
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.medusa import MedusaProposer
from quire.train.tensor_file import write_tensors
from quire.weights.checkpoint import open_checkpoint
from tests.draft_heads import eagle_tensors, medusa_tensors, write_eagle, write_medusa
from tests.safetensors_writer import write_safetensors
from tests.tiny_models import write_tiny_llama

HIDDEN, VOCAB = 60, 307
OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))
SETTINGS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 32}
PROMPTS = [[5, 6, 7, 8, 9] * 9, [20, 21, 22], [5, 6, 7, 8]]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=40, seed=3, frequency_penalty=0.4),
    SamplingParams(temperature=0.7, max_tokens=30, seed=4, min_tokens=9, top_k=3),
]


@dataclass
class Watched:
    """What a proposer proposed: the last known token of each request, and its drafts."""

    drafts: list[tuple[int, list[int]]]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Watch all drafts of heads, and let the control take every draft."""
    seen = Watched([])

    def watching(propose: Any) -> Any:
        def watch(self: object, tokens: Any, slots: Any, limits: Any, drafts: Any) -> None:
            propose(self, tokens, slots, limits, drafts)
            for row, slot in enumerate(slots.tolist()):
                last = int(tokens.tokens[slot, tokens.lengths[slot] - 1])
                seen.drafts.append((last, drafts.ids[row, : drafts.counts[row]].tolist()))

        return watch

    for proposer in (MedusaProposer, EagleProposer):
        monkeypatch.setattr(proposer, "propose", watching(proposer.propose))
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(PlainSteps, "begin_if_due", lambda *_, **__: False)  # as the clock has it
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    return seen


def copying_heads(model: Path, num_heads: int) -> dict[str, Any]:
    """Return heads that guess what the model's own head says of the same hidden state: at
    temperature 0 the last known token."""
    head = open_checkpoint(model).read_f32("lm_head.weight")
    tensors = medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=num_heads)
    return {name: head if name.endswith(".1.weight") else 0 * old for name, old in tensors.items()}


@pytest.fixture(scope="module")
def copying(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_medusa(tmp_path_factory.mktemp("heads"), copying_heads(model, 3))
    with LLM(model, speculate="medusa", draft_model=str(folder), **SETTINGS) as llm:
        yield llm


def generated(llm: LLM, terms: SchedulingParams | None = None) -> list[tuple[object, ...]]:
    answers = llm.generate(PROMPTS, SAMPLING, terms=terms)
    return [
        (answer.token_ids, [token.logprob for token in answer.logprobs], answer.finish_reason)
        for (answer,) in (answer.outputs for answer in answers)
    ]


def test_answers_are_those_without_heads(copying: LLM, watched: Watched) -> None:
    plain = generated(copying, OFF)
    assert not watched.drafts
    assert generated(copying) == plain
    assert len(watched.drafts) > 60


def test_heads_read_the_hidden_state_before_the_last_token(copying: LLM, watched: Watched) -> None:
    copying.generate([PROMPTS[0]], SAMPLING[0])
    assert len(watched.drafts) > 10
    assert all(set(drafts) == {last} for last, drafts in watched.drafts)
    assert all(len(drafts) == 3 for _, drafts in watched.drafts[:-3])


@pytest.mark.parametrize("executor", ["reference", "native"])
def test_both_executors_and_two_plans_in_flight(
    model: Path, tmp_path: Path, watched: Watched, executor: str
) -> None:
    folder = write_medusa(tmp_path, copying_heads(model, 2))
    settings = {**SETTINGS, "executor": executor, "draft_model": str(folder)}
    with LLM(model, speculate="medusa", plans_in_flight=2, dtype="bf16", **settings) as llm:
        plain = generated(llm, OFF)
        assert generated(llm) == plain
    assert len(watched.drafts) > 60
    assert sum(len(drafts) for _, drafts in watched.drafts) > 60


def test_preempted_requests_go_on(model: Path, tmp_path: Path, watched: Watched) -> None:
    folder = write_medusa(tmp_path, copying_heads(model, 2))
    few = {**SETTINGS, "kv_cache_memory": "40k", "block_size": 4, "max_model_len": 100}
    with LLM(model, speculate="medusa", draft_model=str(folder), **few) as llm:
        plain = generated(llm, OFF)
        assert generated(llm) == plain
    assert watched.drafts


def test_heads_without_speculate_serve_requests_that_ask(
    model: Path, tmp_path: Path, watched: Watched
) -> None:
    folder = write_medusa(
        tmp_path,
        medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB, prefix=""),
        file="medusa_lm_head.safetensors",
        model_type=None,
    )
    with LLM(model, draft_model=str(folder), **SETTINGS) as llm:
        watched.drafts.clear()  # those that were timed
        plain = generated(llm)
        assert not watched.drafts
        assert generated(llm, SchedulingParams(speculation=SpeculationParams(is_on=True))) == plain
        assert "draft heads: weights" in llm.memory_text
    assert watched.drafts


def test_packed_heads_are_kept_apart(model: Path, tmp_path: Path, watched: Watched) -> None:
    tensors = medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    folder = write_medusa(tmp_path / "heads", tensors)
    runs = []
    cache = {"pack_cache": str(tmp_path / "cache")}
    for settings in ({}, cache, cache):
        merged = {**SETTINGS, "draft_model": str(folder), **settings}
        with LLM(model, speculate="medusa", **merged) as llm:
            watched.drafts.clear()
            llm.generate([PROMPTS[0]], SAMPLING[0])
            runs.append(watched.drafts.copy())
    assert len(list((tmp_path / "cache").iterdir())) == 4
    assert len(runs[0]) > 10
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_size": 64}, ModelError, "is \\[64, 64\\]; \\[60, 60\\] is needed"),
        ({"vocab_size": 300}, ModelError, "is \\[300, 60\\]; \\[307, 60\\] is needed"),
        ({"num_heads": 2}, ModelError, "head 2 lacks 0.linear.bias"),
        ({"num_layers": 2}, ModelError, "head 0 has 1.linear.bias, which is not expected"),
        ({"prefix": "heads."}, ModelError, "heads.0.0.linear.weight. is no tensor of a Medusa"),
    ],
)
def test_heads_of_another_model_are_refused(
    model: Path, tmp_path: Path, change: dict[str, Any], error: type[QuireError], message: str
) -> None:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    folder = write_medusa(tmp_path, {}, medusa_num_heads=3)
    write = medusa_tensors(**(sizes | change))
    write_safetensors(folder / "model.safetensors", write)
    with pytest.raises(error, match=message):
        LLM(model, speculate="medusa", draft_model=str(folder), **SETTINGS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0; a whole number from 1 to 64"),
        ({"medusa_num_layers": "one"}, "medusa_num_layers is .one."),
        ({"truncated_vocab_size": 100}, "heads over a part of the vocabulary are not supported"),
    ],
)
def test_wrong_configurations_are_refused(
    model: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    tensors = medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    folder = write_medusa(tmp_path, tensors, **config)
    with pytest.raises(ConfigError, match=message):
        LLM(model, speculate="medusa", draft_model=str(folder), **SETTINGS)
    hidden = write_medusa(tmp_path / "other", tensors, hidden_size=61)
    with pytest.raises(ModelError, match=r"hidden_size in config.json is 61; the model's is 60"):
        LLM(model, speculate="medusa", draft_model=str(hidden), **SETTINGS)


def test_settings_that_contradict_the_files_are_refused(model: Path, tmp_path: Path) -> None:
    tensors = medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    folder = str(write_medusa(tmp_path / "heads", tensors))
    with pytest.raises(SettingError, match='holds medusa heads; set speculate="medusa"'):
        LLM(model, speculate="draft", draft_model=folder, **SETTINGS)
    with pytest.raises(SettingError, match=r"speculate is medusa, and .* holds a draft model"):
        LLM(model, speculate="medusa", draft_model=str(model), **SETTINGS)
    with pytest.raises(
        ConfigError, match=r"no such file or directory; give a directory with config\.json"
    ):
        LLM(model, speculate="medusa", draft_model=str(tmp_path / "none"), **SETTINGS)
    with pytest.raises(SettingError, match="no heads are given; give draft_model"):
        LLM(model, speculate="medusa", **SETTINGS)
    pickled = write_medusa(tmp_path / "pickled", tensors)
    (pickled / "model.safetensors").rename(pickled / "medusa_lm_head.pt")
    with pytest.raises(WeightsError, match=r"(?s)pickles .medusa_lm_head.pt.*'medusa_lm_head.saf"):
        LLM(model, speculate="medusa", draft_model=str(pickled), **SETTINGS)


def test_a_head_that_overflows_costs_only_its_drafts(
    model: Path, tmp_path: Path, watched: Watched
) -> None:
    tensors = medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    tensors["medusa_lm_head.1.1.weight"][:] = np.nan
    folder = write_medusa(tmp_path, tensors)
    with LLM(model, speculate="medusa", draft_model=str(folder), **SETTINGS) as llm:
        assert generated(llm) == generated(llm, OFF)
    assert {len(drafts) for _, drafts in watched.drafts} == {1}


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("deep"), seed=3, num_hidden_layers=3)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    return write_eagle(tmp_path_factory.mktemp("eagle"), tensors, vocab_size=VOCAB)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"executor": "reference"},
        {"plans_in_flight": 2, "dtype": "bf16"},
        {"kv_cache_memory": "60k", "block_size": 4, "max_model_len": 100},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 7},
    ],
)
def test_answers_are_those_without_an_eagle_head(
    deep_model: Path, eagle: Path, watched: Watched, settings: dict[str, Any]
) -> None:
    merged = {**SETTINGS, "draft_model": str(eagle), **settings}
    with LLM(deep_model, speculate="eagle", **merged) as llm:
        watched.drafts.clear()
        plain = generated(llm, OFF)
        assert not watched.drafts
        assert generated(llm) == plain
        assert generated(llm) == plain  # with cached prefixes, of which hidden states are missing
    drafts = [draft for _, drafts in watched.drafts for draft in drafts]
    assert len(drafts) > 300
    known = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)["d2t"] + np.arange(90)
    assert set(drafts) <= set(known.tolist())


def test_both_executors_draft_alike(deep_model: Path, eagle: Path, watched: Watched) -> None:
    drafts = []
    for executor in ("native", "reference"):
        settings = {**SETTINGS, "executor": executor, "draft_model": str(eagle)}
        with LLM(deep_model, speculate="eagle", **settings) as llm:
            watched.drafts.clear()
            llm.generate([PROMPTS[0]], SAMPLING[0])
            drafts.append(watched.drafts.copy())
    assert len(drafts[0]) > 10
    assert drafts[0] == drafts[1]


def test_ranks_and_stages_draft_alike(watched: Watched) -> None:
    """Layers are tapped whole by each rank, and those of the first stage reach the last."""
    drafts = []
    for given in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        settings: dict[str, Any] = {**SETTINGS, "threads": 2, **given}
        with LLM(speculate="eagle", **settings) as llm:
            watched.drafts.clear()
            llm.generate(["Once upon a time"], SAMPLING[0])
            drafts.append(watched.drafts.copy())
    assert sum(len(drafted) for _, drafted in drafts[0]) > 30
    assert all(one == drafts[0] for one in drafts)


def test_a_head_of_eagle_3_1_with_two_layers_and_the_models_own_product_drafts(
    deep_model: Path, tmp_path: Path, watched: Watched
) -> None:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=VOCAB)
    tensors |= {f"fc_norm.{tap}.weight": np.ones(HIDDEN, np.float32) for tap in range(3)}
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        if "hidden_norm" not in name:
            later = tensors[name][:, :HIDDEN] if tensors[name].ndim == 2 else tensors[name]
            tensors[name.replace("midlayer", "layers.1")] = np.ascontiguousarray(later)
    own = {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2}
    folder = write_eagle(tmp_path, tensors, vocab_size=VOCAB, torch_dtype="float32", **own)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    write_tensors(folder / "model.safetensors", tensors, {})
    drafts = []
    for executor in ("native", "reference"):
        settings = {**SETTINGS, "executor": executor, "draft_model": str(folder)}
        with LLM(deep_model, speculate="eagle", **settings) as llm:
            watched.drafts.clear()
            plain = generated(llm, OFF)
            assert not watched.drafts
            assert generated(llm) == plain
            watched.drafts.clear()
            llm.generate([PROMPTS[0]], SAMPLING[0])
            drafts.append(watched.drafts.copy())
    assert len(drafts[0]) > 10
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_while_drafts_rest_for_long_steps_of_decoding_keep_no_hidden_states(
    deep_model: Path, eagle: Path, plans_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings, kept = list[HiddenStateRing](), list[int]()
    put = HiddenStateRing.put

    def watching(self: Any, slots: Any, tenancies: Any, positions: Any, rows: Any) -> None:
        rings.append(self)
        kept.extend(positions.tolist())
        put(self, slots, tenancies, positions, rows)

    monkeypatch.setattr(HiddenStateRing, "put", watching)
    monkeypatch.setattr(EagleProposer, "note_rest", lambda *given: None)
    own = {"draft_model": str(eagle), "plans_in_flight": plans_in_flight}
    with LLM(deep_model, speculate="eagle", **SETTINGS, **own) as llm:
        llm.generate([PROMPTS[1]], SAMPLING[0], terms=OFF)
        kept.clear()
        rings[0].pause(rings[0]._kept_step + 2 + 9)  # the prompt takes two steps
        llm.generate([PROMPTS[0]], SAMPLING[0], terms=OFF)
        num_prompt, num = len(PROMPTS[0]), len(PROMPTS[0]) + 40
        assert sorted(kept)[:num_prompt] == list(range(num_prompt))
        assert sorted(kept)[num_prompt:] == list(range(num_prompt + 9, num - 1))


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"fc.weight": (60, 120)}, {}, r"fc.weight is \[60, 120\]; \[60, 180\] is needed"),
        ({"lm_head.weight": (80, 60)}, {"draft_vocab_size": 90}, r"lm_head.weight is \[80, 60\]"),
        ({"more": (2, 2)}, {}, "more. is no tensor of an EAGLE-3 head"),
        ({"norm.weight": None}, {}, "norm.weight is missing"),
        ({"d2t": None}, {}, "d2t is missing; draft_vocab_size 90 needs it"),
        ({"d2t": (89,)}, {}, r"d2t is f32 \[89\]; i64 or i32 \[90\] is needed"),
        ({}, {"vocab_size": 300}, "vocab_size in config.json is 300; the model's is 307"),
        ({}, {"target_hidden_size": 64}, "target_hidden_size in config.json is 64"),
        ({}, {"eagle_config": None}, "the model has 3 layers, too few for the usual"),
        ({}, {"eagle_config": {TAP_KEY: []}}, "the model has 3 layers, too few for the usual"),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
            "layer id 4 in config.json is beyond the model's 3 layers",
        ),
        ({}, {"hidden_size": 64, "head_dim": 8}, "embed_tokens.weight is missing, and the model's"),
    ],
)
def test_eagle_heads_of_another_model_are_refused(
    deep_model: Path,
    tmp_path: Path,
    change: dict[str, Any],
    config: dict[str, Any],
    message: str,
) -> None:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    folder = write_eagle(tmp_path, tensors, **{"vocab_size": VOCAB, **config})
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.ones(shape, np.float32)
    write_tensors(folder / "model.safetensors", tensors, {})
    with pytest.raises(ModelError, match=message):
        LLM(deep_model, speculate="eagle", draft_model=str(folder), **SETTINGS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 17}, "num_hidden_layers is 17; a whole number from 1 to 16"),
        ({TAP_KEY: [0, 2, 2]}, "3 different numbers from 1"),
        ({"eagle_config": {TAP_KEY: [0, 1]}}, "eagle_config.*3 different numbers from 0"),
        ({"fc_norm": 1}, "fc_norm is 1; true or false"),
        ({"mlp_bias": True}, "heads with biases in the MLP are not supported"),
        ({"rope_scaling": {"rope_type": "curly"}}, "curly"),
    ],
)
def test_wrong_eagle_configurations_are_refused(
    deep_model: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    folder = write_eagle(tmp_path, tensors, **{"vocab_size": VOCAB, **config})
    with pytest.raises(ConfigError, match=message):
        LLM(deep_model, speculate="eagle", draft_model=str(folder), **SETTINGS)


def test_other_names_of_the_eagle_layer_are_read(
    deep_model: Path, eagle: Path, tmp_path: Path, watched: Watched
) -> None:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    renamed = {name.replace("midlayer.", "model.layers.0."): one for name, one in tensors.items()}
    other = write_eagle(tmp_path, tensors, vocab_size=VOCAB)
    write_tensors(other / "model.safetensors", renamed, {})
    drafts = []
    for folder in (eagle, other):
        with LLM(deep_model, speculate="eagle", draft_model=str(folder), **SETTINGS) as llm:
            watched.drafts.clear()
            llm.generate([PROMPTS[0]], SAMPLING[0])
            drafts.append(watched.drafts.copy())
    assert len(drafts[0]) > 10
    assert drafts[0] == drafts[1]


def test_token_tables_that_disagree_are_refused(deep_model: Path, tmp_path: Path) -> None:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    tensors["t2d"] = ~tensors["t2d"]
    folder = write_eagle(tmp_path, tensors, vocab_size=VOCAB)
    with pytest.raises(ModelError, match="t2d names other tokens than d2t"):
        LLM(deep_model, speculate="eagle", draft_model=str(folder), **SETTINGS)
    tensors["d2t"][-1] = 2**40
    write_tensors(folder / "model.safetensors", tensors, {})
    with pytest.raises(ModelError, match="d2t does not lead to 90 different ids from 0 to 306"):
        LLM(deep_model, speculate="eagle", draft_model=str(folder), **SETTINGS)


def test_the_memory_of_an_eagle_head_is_planned(deep_model: Path, eagle: Path) -> None:
    with LLM(deep_model, speculate="eagle", draft_model=str(eagle), **SETTINGS) as llm:
        assert "draft heads: weights" in llm.memory_text
        assert "draft heads: KV cache (" in llm.memory_text


def test_the_built_in_head_drafts_for_the_built_in_model(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.zeros(2, np.int64)
    verified = EagleProposer.verified

    def counted(self: EagleProposer, slots: Any, drafted: Any, accepted: Any) -> None:
        counts[:] += drafted.sum(), accepted.sum()
        verified(self, slots, drafted, accepted)

    monkeypatch.setattr(EagleProposer, "verified", counted)
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(PlainSteps, "begin_if_due", lambda *_, **__: False)  # as the clock has it
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    prompts = ["Write a story about a cat.", "What can a boat do?"]
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(speculate="eagle", max_draft_tokens=3, threads=1, max_num_seqs=2) as llm:
        plain = [answer.token_ids for answer in llm.generate(prompts, sampling, terms=OFF)]
        assert not counts.any()
        assert [answer.token_ids for answer in llm.generate(prompts, sampling)] == plain
    drafted, accepted = counts.tolist()
    assert drafted > 50
    assert accepted > 0.25 * drafted


def test_heads_of_older_kinds_and_pickles_say_what_to_do(deep_model: Path, tmp_path: Path) -> None:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    folder = write_eagle(tmp_path / "pickled", tensors, vocab_size=VOCAB)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"(?s)pickles \(pytorch_model.bin\).*weights_only=True"):
        LLM(deep_model, speculate="eagle", draft_model=str(folder), **SETTINGS)
    older = tmp_path / "older"
    older.mkdir()
    for config in ({"architectures": ["EAGLEModel"]}, {"model_type": "eagle"}):
        (older / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="heads of EAGLE 1 or 2"):
            LLM(deep_model, speculate="eagle", draft_model=str(older), **SETTINGS)


def test_heads_of_the_speculators_library_are_read(
    deep_model: Path, eagle: Path, tmp_path: Path, watched: Watched
) -> None:
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    other = write_eagle(tmp_path, tensors, vocab_size=VOCAB)
    config = json.loads((other / "config.json").read_text())
    top = {name: config.pop(name) for name in ("draft_vocab_size", TAP_KEY) if name in config}
    taps = config.pop("eagle_config", {}).get(TAP_KEY)
    if taps is not None:  # there they count layers after which hidden states are read
        top[TAP_KEY] = [one + 1 for one in taps]
    top |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    nested = {"torch_dtype": None, **config}
    (other / "config.json").write_text(
        json.dumps({**top, "target_hidden_size": None, "transformer_layer_config": nested})
    )
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    renamed["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write_tensors(other / "model.safetensors", renamed, {})
    drafts = []
    for folder in (eagle, other):
        with LLM(deep_model, speculate="eagle", draft_model=str(folder), **SETTINGS) as llm:
            watched.drafts.clear()
            llm.generate([PROMPTS[0]], SAMPLING[0])
            drafts.append(watched.drafts.copy())
    assert drafts[0] == drafts[1]
    assert drafts[0]


def test_medusa_heads_for_vllm_are_read(model: Path, tmp_path: Path, watched: Watched) -> None:
    tensors = {}
    for name, tensor in copying_heads(model, 2).items():
        head, layer = re.findall(r"([0-9]+)\.([0-9]+)\.", name)[0]
        if "linear" not in name:
            tensors[f"lm_heads.{head}.weight"] = tensor
        elif "weight" in name:  # there is no bias
            tensors[f"blocks.{head}.layers.{layer}.weight"] = tensor
    write_tensors(tmp_path / "model.safetensors", tensors, {})
    folder = tmp_path
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 2}
    config |= {"num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(model, speculate="medusa", draft_model=str(folder), **SETTINGS) as llm:
        watched.drafts.clear()
        llm.generate([PROMPTS[0]], SAMPLING[0])
    assert len(watched.drafts) > 10
    assert all(set(drafts) == {last} for last, drafts in watched.drafts)
