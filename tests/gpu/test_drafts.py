"""Verification of draft tokens by the torch executor: with plain PyTorch, on a slow device, and by
kernels in captured steps.

Every token and log-probability is that of the request alone and without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire import LLM, SamplingParams  # noqa: E402
from quire.base.rare_records import Speculation  # noqa: E402
from quire.base.records import Request  # noqa: E402
from quire.base.scheduling_params import SchedulingParams  # noqa: E402
from quire.base.speculation_params import SpeculationParams  # noqa: E402
from quire.execute.executor import Executor, StepLimits  # noqa: E402
from quire.execute.gpu.executor import TorchExecutor  # noqa: E402
from quire.execute.gpu.first_layers import TorchFirstLayers  # noqa: E402
from quire.program.program import Program  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.runner import step_result  # noqa: E402
from quire.speculative.control import AdaptiveControl  # noqa: E402
from quire.speculative.draft_balance import DraftBalance  # noqa: E402
from quire.speculative.drafter import Drafter  # noqa: E402
from tests.exact.rig import AloneRuns, SharedCache, differences, run_case  # noqa: E402
from tests.exact.test_overlap import plain  # noqa: E402
from tests.exact.workload import (  # noqa: E402
    ALONE,
    VOCAB_SIZE,
    Arrival,
    Case,
    Settings,
    draw_case,
)
from tests.gpu.launch_capture import LaunchCapture  # noqa: E402
from tests.gpu.test_exact_answers import TorchModel  # noqa: E402
from tests.gpu.test_overlap import SlowModel, with_settings  # noqa: E402
from tests.gpu.torch_models import BLOCK_SIZE, torch_executor  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

PROPOSERS = ("sometimes", "self", "draft")
PROMPTS = [[5, 6, 7, 8, 9] * 4, [20, 21, 22], [5, 6, 7, 8]]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=24, seed=3, frequency_penalty=0.4),
    SamplingParams(temperature=0.7, max_tokens=24, seed=4, min_tokens=9, top_k=3),
]


class KernelModel(TorchModel):
    """A model that is computed by kernels, in captured steps."""

    def make_first_layers(
        self, executor: Executor, program: Program, limits: StepLimits, own_threads: int
    ) -> SharedCache:
        assert isinstance(executor, TorchExecutor)
        return TorchFirstLayers(executor, program, limits, capture=LaunchCapture(), poison=True)

    def make_executor(self, num_threads: int) -> Executor:
        return torch_executor(
            self.folder,
            self.program,
            max_tokens=32,
            blocks=BLOCK_SIZE,
            kernels=True,
            capture=LaunchCapture(),
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("drafts") / "odd", seed=5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[SlowModel]:
    made = SlowModel(folder, DType.F32)
    yield made
    made.close()


def drawn(number: int, *, reads_tokens: bool) -> Case:
    """Return a drawn case in which requests speculate beside two plans in flight."""
    case = plain(draw_case(number, num_models=1, vocab_size=VOCAB_SIZE), reads_tokens=reads_tokens)

    def speculating(request: Request) -> Request:
        return replace(request, speculation=Speculation(max_drafts=5))

    arrivals = tuple(
        replace(arrival, requests=tuple(map(speculating, arrival.requests)))
        for arrival in case.arrivals
    )
    return with_settings(
        replace(case, arrivals=arrivals),
        plans_in_flight=2,
        proposer=PROPOSERS[number % len(PROPOSERS)],
        draft_blocks=20,
        max_drafts=4,
    )


@pytest.mark.parametrize(
    ("reads_tokens", "numbers"),
    [(False, (0, 1, 2)), (True, (0,))],
    ids=["plain", "penalties and grammars"],
)
def test_drafts_beside_steps_in_flight_change_no_answer(
    slow: SlowModel, reads_tokens: bool, numbers: tuple[int, ...]
) -> None:
    lines, accepted, rejected, alone = [], 0, 0, AloneRuns()
    for number in numbers:
        outcome = run_case(slow, drawn(number, reads_tokens=reads_tokens), alone=alone)
        lines += differences(slow, outcome, alone)
        accepted += outcome.accepted
        rejected += outcome.rejected
    assert not lines, "\n".join(lines[:5])
    assert min(accepted, rejected) >= 1


def test_runs_behind_wrong_drafts_are_detected(
    slow: SlowModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, case = AloneRuns(), drawn(0, reads_tokens=False)
    for request in case.requests:
        alone.of(slow, request)
    monkeypatch.setattr(step_result, "drop_after_mismatch", lambda plan, token_ids: None)
    with pytest.raises(AssertionError):
        assert not differences(slow, run_case(slow, case, alone=alone), alone)


def request(number: int, prompt: list[int], **sampling: Any) -> Request:
    return Request(
        request_id=f"{number}/0",
        group_id=str(number),
        stream=0,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(seed=number, **sampling),
        stop_ids=(),
        max_total_tokens=len(prompt) + 9,
        arrival_ms=0.0,
        speculation=Speculation(max_drafts=3),
    )


@pytest.mark.parametrize("proposer", ["alternating", "self"])
def test_kernels_verify_drafts_in_captured_steps(folder: Path, proposer: str) -> None:
    """Two plans in flight; the head of rows with drafts is in the graph, as are drafts."""
    model, alone = KernelModel(folder, DType.F32), AloneRuns()
    requests = (request(1, [5, 6, 7], temperature=0.0, logprobs=1), request(2, [9], top_k=5))
    settings: Settings = replace(
        ALONE,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_samples=16,
        plans_in_flight=2,
        proposer=proposer,
        max_drafts=3,
    )
    arrivals = tuple(Arrival(at_step=0, requests=(one,), cancel_at=(None,)) for one in requests)
    case = Case(number=0, model=0, settings=settings, arrivals=arrivals)
    try:
        for one in requests:
            alone.of(model, one)
        executor = model.executor(1)
        assert isinstance(executor, TorchExecutor)
        before = executor.steps_replayed
        outcome = run_case(model, case, alone=alone)
        assert not differences(model, outcome, alone)
        assert outcome.accepted
        assert outcome.rejected == (proposer == "alternating")  # the only layer is always right
        assert executor.steps_replayed > before
    finally:
        model.close()


def generated(llm: LLM, terms: Any = None) -> list[tuple[object, ...]]:
    answers = llm.generate(PROMPTS, SAMPLING, terms=terms)
    return [
        (answer.token_ids, [token.logprob for token in answer.logprobs], answer.finish_reason)
        for (answer,) in (one.outputs for one in answers)
    ]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    return write_tiny_llama(tmp_path_factory.mktemp("deep") / "m", seed=5, **shape)


@pytest.mark.parametrize(
    ("plans_in_flight", "settings"),
    [
        (1, {"speculate": "ngram"}),
        (2, {"speculate": "ngram"}),
        (1, {"speculate": "self"}),
        (2, {"speculate": "self", "self_draft_layers": 2}),
        (1, {"speculate": "self", "tensor_parallel_size": 2, "threads": 2}),
        (2, {"speculate": "self", "pipeline_parallel_size": 2, "threads": 2}),
        (2, {"speculate": "draft", "draft_model": ""}),
    ],
)
def test_an_engine_drafts_and_verifies(
    deep: Path, monkeypatch: pytest.MonkeyPatch, plans_in_flight: int, settings: dict[str, Any]
) -> None:
    if "draft_model" in settings:
        settings["draft_model"] = str(deep)
    verified, accepted = Drafter.verified, []

    def watched(self: Drafter, index: Any, drafted: Any, good: Any) -> None:
        accepted.append(int(good.sum()))
        verified(self, index, drafted, good)

    monkeypatch.setattr(Drafter, "verified", watched)
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "threads": 1}
    with LLM(
        deep,
        executor="torch",
        device="cpu",
        plans_in_flight=plans_in_flight,
        **{**sizes, **settings},
    ) as llm:
        off = SchedulingParams(speculation=SpeculationParams(is_on=False))
        answers = generated(llm, off)
        assert not accepted
        assert generated(llm) == answers
        assert accepted or settings["speculate"] == "ngram"  # texts may not repeat themselves
        accepted.clear()
        right = [
            SchedulingParams(speculation=SpeculationParams(prediction_ids=answer[0]))  # type: ignore[arg-type]
            for answer in answers
        ]
        assert generated(llm, right) == answers
        assert sum(accepted) > 20
