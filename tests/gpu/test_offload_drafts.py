"""Drafts beside weights in host memory: what drafts has its weights on the device, answers are
those of weights on the device, and `auto` leaves room for what drafts.

Whole engines on CPU tensors, which take the place of a device.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import CapacityError
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.config.flags import engine_config
from quire.config.machine import MachineMemory
from quire.config.memory import DraftNeeds, MemoryPlan
from quire.engine.assembly import offload, torch_choice
from quire.engine.assembly.executor_choice import choose_executor_class
from quire.engine.assembly.sized_model import sized_model
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.execute.gpu.limits import NCCL_BYTES
from quire.execute.gpu.offload import LayerStream
from quire.execute.missing_memory import TABLE_ENTRY_BYTES
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.torch_kind import TorchRanks
from quire.scheduler.speculation.plain_steps import PlainSteps
from quire.speculative.control import AdaptiveControl
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.drafter import Drafter
from tests.draft_heads import eagle_tensors, medusa_tensors, write_eagle, write_medusa
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN = 307, 60
PROMPTS = [[5, 6, 7, 8, 9] * 4, [20, 21, 22], [5, 6, 7, 8]]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=20, seed=3, frequency_penalty=0.4),
    SamplingParams(temperature=0.7, max_tokens=20, seed=4, min_tokens=9, top_k=3),
]
OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))
SETTINGS: dict[str, Any] = {
    "executor": "torch",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of more layers than there are places for, with heads for two ranks."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path_factory.mktemp("deep") / "m"
    return write_tiny_llama(path, seed=5, num_hidden_layers=8, hidden_size=HIDDEN, **heads)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors be a device with memory of its own."""
    sized = offload.offload_size
    on_device = partial(sized, is_gpu=True)
    monkeypatch.setattr(torch_choice, "offload_size", lambda config, **_: on_device(config))
    monkeypatch.setattr("quire.execute.gpu.device.choose", lambda *_: torch.device("cpu"))


def drafting(kind: str, model: Path, folder: Path) -> dict[str, str]:
    """Return the settings of what drafts, with its files in a folder."""
    if kind == "draft":
        return {"speculate": kind, "draft_model": str(model)}
    if kind == "medusa":
        tensors = medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=2)
        return {"speculate": kind, "draft_model": str(write_medusa(folder, tensors))}
    own = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
    written = write_eagle(folder, own, vocab_size=VOCAB, hidden_size=HIDDEN)
    return {"speculate": kind, "draft_model": str(written)}


def generated(llm: LLM, terms: SchedulingParams | None = None) -> list[tuple[object, ...]]:
    answers = llm.generate(PROMPTS, SAMPLING, terms=terms)
    return [
        (answer.token_ids, [token.logprob for token in answer.logprobs], answer.finish_reason)
        for (answer,) in (one.outputs for one in answers)
    ]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("draft", {"plans_in_flight": 2}),
        ("draft", {"tensor_parallel_size": 2}),
        ("medusa", {}),
        ("eagle", {"plans_in_flight": 2}),
    ],
)
def test_drafts_beside_weights_in_host_memory_change_no_answer(
    kind: str,
    settings: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, num_verified = list[LayerStream](), 0
    made, verified = LayerStream.__init__, Drafter.verified

    def watched(self: LayerStream, *given: Any) -> None:
        made(self, *given)
        streams.append(self)

    def counting(self: Drafter, index: Any, drafted: Any, good: Any) -> None:
        nonlocal num_verified
        num_verified += int(drafted.sum())
        verified(self, index, drafted, good)

    monkeypatch.setattr(LayerStream, "__init__", watched)
    monkeypatch.setattr(Drafter, "verified", counting)
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(PlainSteps, "begin_if_due", lambda *_, **__: False)
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    with LLM(folder, threads=1, **SETTINGS) as llm:
        wanted = generated(llm)
    assert not streams
    own = drafting(kind, folder, tmp_path)
    threads = settings.get("tensor_parallel_size", 1)
    saving = {"cpu_offload_gb": "0.00001", "threads": threads, **settings}
    with LLM(folder, **SETTINGS, **saving, **own) as llm:
        (stream,) = streams  # of the model, none of what drafts
        assert generated(llm, OFF) == wanted
        assert not num_verified
        before = stream.copied_bytes
        assert generated(llm) == wanted
        assert stream.copied_bytes > before
    assert num_verified > 20


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kv", [{"kv_cache_memory": "256KiB"}, {}], ids=["a KV cache", "a share"])
def test_auto_leaves_room_for_what_drafts(
    kv: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking_bytes, asked = 50_000, {**SETTINGS, "model": str(folder), "max_num_seqs": 2}
    asked |= {**kv, **drafting("draft", folder, folder)}

    def planned(num_bytes: int, **more: Any) -> MemoryPlan:
        memory = MachineMemory(available_bytes=num_bytes, limit="a test", is_own=True)
        monkeypatch.setattr(TorchExecutorClass, "available_memory", lambda _: memory)
        return sized_model(engine_config(asked | more)).memory

    plenty = planned(1 << 30)
    assert planned(1 << 30, cpu_offload_gb="auto").lines == plenty.lines
    lines = {line.what: -line.num_bytes for line in plenty.lines if line.num_bytes < 0}
    assert lines["draft model: weights"]
    tight = sum(lines.values()) - lacking_bytes
    if not kv:  # it is a share of what is left: of little
        tight -= sum(num_bytes for what, num_bytes in lines.items() if "KV cache" in what)
    with pytest.raises(CapacityError):
        planned(tight)
    assert planned(tight, cpu_offload_gb="auto").num_blocks > 0


def test_each_gpu_of_ranks_leaves_the_room_that_what_drafts_takes_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {**SETTINGS, "tensor_parallel_size": 2, "kv_cache_memory": 4096, "device": "cuda"}
    config = engine_config(given | {"cpu_offload_gb": "auto"})
    sized = offload.offload_size(config, is_gpu=True)
    card = TorchExecutorClass(torch.device("cuda", 0), offload=sized)
    monkeypatch.setattr(torch_choice, "torch_class", lambda _: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made = choose_executor_class(config)
    needs = DraftNeeds(
        name="a draft", weights_bytes=5000, token_bytes=8, max_model_len=16, host_bytes=1 << 40
    )
    beside = offload.beside_drafts(config, made, needs)
    assert isinstance(made, RankedExecutorClass)
    assert isinstance(beside, RankedExecutorClass)
    assert isinstance(made.kind, TorchRanks)
    assert isinstance(beside.kind, TorchRanks)
    before, after = made.kind.offload, beside.kind.offload
    assert before is not None
    assert after is not None
    assert before.buffers is not None
    assert after.buffers is not None
    tables = 4 * 16 * TABLE_ENTRY_BYTES
    assert after.buffers(64) == before.buffers(64) + 5000 + 4096 // 64 * 8 + tables
    assert (before.host_bytes, after.host_bytes) == (0, 1 << 40)
    assert (after.num_ranks, after.exchange_bytes) == (2, NCCL_BYTES)
    assert beside.kind.class_beside().offload is None
