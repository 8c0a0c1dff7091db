"""DraftRunner with tiny models: a draft model that equals the target is always right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.base.rare_records import Speculation
from quire.base.records import Admission, Request, StepPlan
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.runner.draft_runner import DraftRunner
from quire.runner.model_runner import ModelRunner
from quire.speculative.draft_model import ModelProposer
from quire.speculative.passes import DraftLimits
from quire.speculative.proposer import no_drafts
from quire.weights.checkpoint import open_checkpoint
from tests.tiny_models import write_tiny_llama

SLOTS, BLOCKS, BLOCK, LENGTH = 4, 64, 16, 96
STEP = StepLimits(max_tokens=32, max_samples=4, max_sequences=SLOTS)
# Greedy, plain noise, filters with penalties over drafts, and bans before min_tokens.
SAMPLINGS = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=0.8, top_k=40, frequency_penalty=0.5, seed=3),
    SamplingParams(temperature=1.2, min_tokens=40, logit_bias={5: 2.0}, seed=4),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("draft") / "tiny", seed=3)


@pytest.fixture(scope="module")
def program(model: Path) -> Program:
    return build_program(open_model(model), dtype=DType.F32, max_positions=LENGTH)


def executor_of(model: Path, program: Program) -> NativeExecutor:
    executor = NativeExecutor(program, open_checkpoint(model), ExecutorOptions(limits=STEP))
    executor.allocate_cache(BLOCKS, BLOCK)
    return executor


@pytest.fixture(scope="module")
def executor(model: Path, program: Program) -> Iterator[NativeExecutor]:
    executor = executor_of(model, program)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def answers(model: Path, program: Program) -> list[list[int]]:
    """Return the prompt and answer of each request, computed alone by the target's runner."""
    runner = ModelRunner(
        executor_of(model, program),
        num_slots=1,
        max_model_len=LENGTH,
        block_size=BLOCK,
        max_samples=4,
    )
    texts = []
    for slot in range(SLOTS):
        request, tokens = request_of(slot), prompt_of(slot)
        admission = Admission(
            slot=0,
            request_id=request.request_id,
            stream=0,
            token_ids=np.array(tokens, np.int32),
            num_prompt_tokens=len(tokens),
            stop_ids=request.stop_ids,
            sampling=request.sampling,
        )
        for step in range(20):
            start = len(tokens) - 1 if step else 0
            plan = StepPlan(
                step=step,
                retired=np.array([] if step else [0], np.int32),
                admissions=() if step else (admission,),
                table_slots=np.zeros(0 if step else 6, np.int32),
                table_columns=np.arange(0 if step else 6, dtype=np.int32),
                table_blocks=np.arange(0 if step else 6, dtype=np.int32),
                slots=np.zeros(1, np.int32),
                starts=np.array([start], np.int32),
                counts=np.array([len(tokens) - start], np.int32),
                store_from=np.array([start], np.int32),
                sample_counts=np.ones(1, np.int32),
            )
            tokens += runner.collect(runner.submit(plan)).token_ids.tolist()
        texts.append(tokens)
    runner.close()
    return texts


def prompt_of(slot: int) -> list[int]:
    return [5 + slot, *range(20, 24 + 5 * slot)]


def request_of(slot: int) -> Request:
    return Request(
        request_id=f"r{slot}",
        group_id=f"r{slot}",
        stream=0,
        prompt_ids=np.array(prompt_of(slot), np.int32),
        sampling=SAMPLINGS[slot],
        stop_ids=(1, 2),
        max_total_tokens=LENGTH,
        arrival_ms=0.0,
        speculation=Speculation(max_drafts=8),
    )


class Rig:
    """A proposer over the draft executor, and known tokens."""

    def __init__(self, executor: NativeExecutor, *, shares_noise: bool = True) -> None:
        runner = DraftRunner(
            executor,
            num_slots=SLOTS,
            max_model_len=LENGTH,
            block_size=BLOCK,
            max_samples=4,
            shares_noise=shares_noise,
        )
        limits = DraftLimits(SLOTS, BLOCKS, BLOCK, LENGTH, STEP.max_tokens)
        self.proposer = ModelProposer(runner, limits, lambda: 0.0)
        self.known = TokenTable(SLOTS, LENGTH)

    def begin(self, slots: list[int], texts: list[list[int]], lengths: list[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self.known.admit(slot, np.array(texts[slot][:length], np.int32), len(prompt_of(slot)))
            self.proposer.begin(slot, request_of(slot))

    def propose(self, slots: list[int], limit: int) -> list[list[int]]:
        found, limits = no_drafts(len(slots), 8), np.full(len(slots), limit, np.int32)
        self.proposer.propose(self.known, np.array(slots), limits, found)
        return [
            [int(id_) for id_ in ids[:num]]
            for ids, num in zip(found.ids, found.counts, strict=True)
        ]


def drafted(
    rig: Rig, texts: list[list[int]], slots: list[int], *, until: int = 15
) -> list[list[list[int]]]:
    """Return the drafts of each call while the answers become known, 1 to 5 tokens at a time."""
    rig.begin(slots, texts, [len(prompt_of(slot)) + 1 for slot in slots])
    calls = []
    for step in range(until):
        calls.append(rig.propose(slots, 4))
        for slot in slots:
            at = int(rig.known.lengths[slot])
            more = texts[slot][at : at + 1 + (step + slot) % 5]
            index = np.full(len(more), slot, np.intp)
            positions = np.arange(at, at + len(more), dtype=np.int32)
            rig.known.put(index, positions, np.array(more, np.int32))
    return calls


def test_a_draft_model_that_equals_the_target_is_always_right(
    executor: NativeExecutor, answers: list[list[int]]
) -> None:
    rig = Rig(executor)
    rig.begin([0, 1, 2, 3], answers, [len(prompt_of(slot)) + 1 for slot in range(SLOTS)])
    for _ in range(3):  # 32 rows a pass: long prompts take more than one call
        found = rig.propose([0, 1, 2, 3], 6)
    for slot, drafts in enumerate(found):
        start = len(prompt_of(slot)) + 1
        assert drafts == answers[slot][start : start + 6], SAMPLINGS[slot]


def test_slots_drafted_together_have_the_drafts_of_each_alone(
    executor: NativeExecutor, answers: list[list[int]]
) -> None:
    together = drafted(Rig(executor), answers, [0, 1, 2, 3], until=5)
    for slot in range(SLOTS):
        alone = [call[0] for call in drafted(Rig(executor), answers, [slot], until=5)]
        for one, other in zip(alone, (call[slot] for call in together), strict=True):
            assert other in (one, [])  # none while a prompt of the batch catches up
    assert all(together[-1])


def test_noise_of_its_own_differs_only_where_noise_matters(
    executor: NativeExecutor, answers: list[list[int]]
) -> None:
    rig = Rig(executor, shares_noise=False)
    rig.begin([0, 1], answers, [len(prompt_of(slot)) + 1 for slot in (0, 1)])
    greedy, sampled = rig.propose([0, 1], 6)
    start = len(prompt_of(0)) + 1
    assert greedy == answers[0][start : start + 6]
    start = len(prompt_of(1)) + 1
    assert sampled != answers[1][start : start + 6]


def test_a_slot_is_empty_for_the_next_request(executor: NativeExecutor) -> None:
    rig = Rig(executor)
    text = [[7] * 30, [9] * 30]
    rig.begin([0], text, [20])
    rig.propose([0], 3)
    rig.proposer.end(0)
    rig.begin([0], [text[1]], [5])
    reused = rig.propose([0], 3)
    fresh = Rig(executor)
    fresh.begin([0], [text[1]], [5])
    assert fresh.propose([0], 3) == reused
