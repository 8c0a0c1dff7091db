"""The exact tests must detect injected faults: each fault here is injected and detected.

A fault is a small wrapper around the executor or the runner. The cases are those of
test_one_answer.py, so a fault detected here is detected there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.rare_records import Speculation
from quire.base.records import Request, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.cache.manager import CacheManager
from quire.execute import reference_ops
from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.reference import ReferenceExecutor
from quire.program.batch import ForwardBatch
from quire.runner import batch_builder, step_result
from quire.runner.draft_masks import DraftMasks
from quire.runner.model_runner import ModelRunner
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores
from quire.speculative.self_draft import SelfProposer
from tests.exact.conftest import VOCAB_SIZE
from tests.exact.rig import MAX_ROWS, MAX_SEQUENCES, AloneRuns, Model, differences, run_case
from tests.exact.workload import ALONE, Arrival, Case, draw_case

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]
MAX_CASES = 48
PLAIN_LINEAR = reference_ops.linear


class _Executor:
    """Forward everything to the wrapped executor."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.name, self.recipe = inner.name, inner.recipe
        self.weights_digest = inner.weights_digest

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        self._inner.allocate_cache(num_blocks, block_size)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        self._inner.copy_blocks(copy_from, copy_to)

    @property
    def block_bytes(self) -> int:
        return int(self._inner.block_bytes)

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        self._inner.export_block(block, out)

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        self._inner.import_block(block, raw)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        self._inner.run_trunk(batch)

    @property
    def num_layers(self) -> int:
        return int(self._inner.num_layers)

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        self._inner.run_layers(batch, first, end)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        return self._inner.run_head(batch, first, count)

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        return self._inner.run_pool(batch, first, count)

    def sample(self, logits: Float32s, batch: SampleBatch) -> TokenChoice:
        return self._inner.sample(logits, batch)

    def score(self, logits: Float32s, batch: ScoreBatch) -> Scores:
        return self._inner.score(logits, batch)

    def close(self) -> None:
        self._inner.close()


class RoundsLogitsByRowCount(_Executor):
    """With several rows, compute logits as the sum of two separately rounded parts."""

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        logits = super().run_head(batch, first, count)
        if count > 1:
            logits[:] = logits * np.float32(0.3) + logits * np.float32(0.7)
        return logits


class PoolsByRowCount(_Executor):
    """Round pooled rows otherwise where several are computed at once."""

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        rows = super().run_pool(batch, first, count)
        return rows * np.float32(0.3) + rows * np.float32(0.7) if count > 1 else rows


class ReferenceModel(Model):
    """The model on the reference executor, with replaceable operations."""

    def make_executor(self, num_threads: int) -> Executor:
        return ReferenceExecutor(
            self.program,
            self.checkpoint,
            ExecutorOptions(
                limits=StepLimits(
                    max_tokens=MAX_ROWS, max_samples=MAX_SEQUENCES, max_sequences=MAX_SEQUENCES
                )
            ),
        )


def linear_that_splits_k(x: Float32s, weight: Float32s, bias: Float32s | None) -> Float32s:
    """Split the K sum of the trunk's products into two halves when there are several rows."""
    if len(x) == 1 or len(weight) == VOCAB_SIZE:
        return PLAIN_LINEAR(x, weight, bias)
    half = x.shape[1] // 2
    first = PLAIN_LINEAR(x[:, :half], weight[:, :half], None)
    second = PLAIN_LINEAR(x[:, half:], weight[:, half:], None)
    return first + second if bias is None else first + second + bias


class DrawsNoiseByRow(_Executor):
    """Make the noise depend on the row of the batch."""

    def sample(self, logits: Float32s, batch: SampleBatch) -> TokenChoice:
        rows = np.arange(len(batch.positions), dtype=np.int32)
        noise = replace(batch.noise, streams=batch.noise.streams + rows)
        return super().sample(logits, replace(batch, noise=noise))


class SwapsGrammarMasks(_Executor):
    """Swap the grammar masks of rows."""

    def sample(self, logits: Float32s, batch: SampleBatch) -> TokenChoice:
        if batch.masks is not None:
            masks = replace(batch.masks, words=np.roll(batch.masks.words, 1, axis=0))
            batch = replace(batch, masks=masks)
        return super().sample(logits, batch)


class ScoresBySlice(_Executor):
    """Shift logits by the maximum of the slice, so that neighbours change how scores round."""

    def score(self, logits: Float32s, batch: ScoreBatch) -> Scores:
        return super().score(logits - logits.max(), batch)


class ScoresPreviousSlice(_Executor):
    """Score a slice of one row by the logits of an earlier slice."""

    _before: Float32s | None = None

    def score(self, logits: Float32s, batch: ScoreBatch) -> Scores:
        left, self._before = self._before, logits[:1].copy()
        return super().score(left if len(logits) == 1 and left is not None else logits, batch)


class SkipsBlockCopies(_Executor):
    """Skip copy-on-write: a forked block never gets its content."""

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        pass


class SharesInsteadOfCopying(ModelRunner):
    """Write into a shared block: the table names the block that should have been copied."""

    def _run(self, plan: StepPlan) -> StepResult:
        blocks = plan.table_blocks.copy()
        for block_from, block_to in zip(plan.copy_from, plan.copy_to, strict=True):
            blocks[blocks == block_to] = block_from
        return super()._run(replace(plan, table_blocks=blocks))


class KeepsStaleEntries(ModelRunner):
    """Keep a stale block table entry now and then."""

    _num_deltas = 0

    def _run(self, plan: StepPlan) -> StepResult:
        self._num_deltas += 1
        if len(plan.table_slots) and self._num_deltas % 5 == 0:
            plan = replace(
                plan,
                table_slots=plan.table_slots[:-1],
                table_columns=plan.table_columns[:-1],
                table_blocks=plan.table_blocks[:-1],
            )
        return super()._run(plan)


class ReordersForcedTokens(ModelRunner):
    """Report forced tokens in another order."""

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        token_ids, end = result.token_ids.copy(), 0
        for count in result.token_counts.tolist():
            token_ids[end + 1 : end + count] = np.roll(token_ids[end + 1 : end + count], 1)
            end += count
        return replace(result, token_ids=token_ids)


class CountsOutputAsPrompt(ModelRunner):
    """Resume a preempted request with its output counted as prompt, which changes penalties."""

    def _run(self, plan: StepPlan) -> StepResult:
        admissions = tuple(
            replace(admission, num_prompt_tokens=len(admission.token_ids))
            for admission in plan.admissions
        )
        return super()._run(replace(plan, admissions=admissions))


class DropsWindow(ModelRunner):
    """Resume a preempted request with penalties over all of its tokens."""

    def _run(self, plan: StepPlan) -> StepResult:
        admissions = tuple(
            replace(admission, sampling=replace(admission.sampling, repeat_last_n=None))
            if len(admission.token_ids) > admission.num_prompt_tokens
            else admission
            for admission in plan.admissions
        )
        return super()._run(replace(plan, admissions=admissions))


class DropsMirostatState(ModelRunner):
    """Resume a preempted request without its mirostat mu."""

    def _run(self, plan: StepPlan) -> StepResult:
        admissions = tuple(replace(admission, mirostat_mu=None) for admission in plan.admissions)
        return super()._run(replace(plan, admissions=admissions))


class SharesMirostatState(ModelRunner):
    """Share one mirostat mu among all requests."""

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        if len(result.mirostat_mus):
            self.tables.rare.mirostat_mu[:] = result.mirostat_mus[-1]
        return result


class DrawsNoiseByDraft(_Executor):
    """Let each draft of a row advance its seed."""

    def sample(self, logits: Float32s, batch: SampleBatch) -> TokenChoice:
        keys = list(zip(batch.noise.seeds.tolist(), batch.noise.streams.tolist(), strict=True))
        drafts = [keys[:row].count(key) for row, key in enumerate(keys)]
        noise = replace(batch.noise, seeds=batch.noise.seeds + np.array(drafts))
        return super().sample(logits, replace(batch, noise=noise))


class KeepsRejectedKV(ModelRunner):
    """Leave the keys and values of rejected drafts in their blocks."""

    def _run(self, plan: StepPlan) -> StepResult:
        ends = self.__dict__.setdefault("drafted_ends", {})  # by slot
        for admission in plan.admissions:
            ends.pop(admission.slot, None)
        store_from = plan.store_from.copy()
        for row, slot in enumerate(plan.slots.tolist()):
            store_from[row] = max(store_from[row], ends.get(slot, 0))
            if plan.draft_ids.size and plan.draft_counts[row]:
                ends[slot] = int(plan.starts[row] + plan.counts[row])
        return super()._run(replace(plan, store_from=store_from))


class TrustsDraftedKV(ModelRunner):
    """Leave the keys and values that drafting stored as they are."""

    def _run(self, plan: StepPlan) -> StepResult:
        if not plan.draft_ids.size:
            return super()._run(plan)
        ends = plan.starts + plan.counts
        store_from = np.where(plan.draft_counts > 0, ends, plan.store_from)
        return super()._run(replace(plan, store_from=store_from.astype(np.int32)))


def draft_in_blocks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute drafts of a request in the blocks of another one."""
    note_kv = SelfProposer.note_kv

    def turned(self: SelfProposer, slots: Any, tables: Int32s, capacities: Int32s) -> None:
        note_kv(self, slots, np.roll(tables, 1, axis=0), np.roll(capacities, 1))

    monkeypatch.setattr(SelfProposer, "note_kv", turned)


def keep_runs_after_mismatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the tokens that were sampled behind wrong drafts."""
    monkeypatch.setattr(step_result, "drop_after_mismatch", lambda plan, token_ids: None)


def count_all_drafts_in_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let penalties count drafts at and after the sampled position."""
    history = batch_builder._history

    def all_known(slots: Any, positions: Int32s, tables: Any, *, is_late: bool) -> Any:
        return history(slots, tables.tokens.lengths[slots], tables, is_late=is_late)

    monkeypatch.setattr(batch_builder, "_history", all_known)


def mask_drafts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the positions behind drafts the mask of the position before these."""
    monkeypatch.setattr(DraftMasks, "after", lambda self, draft_id: self._mask)


def share_blocks_before_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the prefix cache find a block as soon as its last token is known. Its position may still
    have the keys and values of a rejected draft."""
    register = CacheManager.register

    def early(self: CacheManager, slots: Any, computed: Int32s, tokens: Int32s) -> None:
        register(self, slots, computed + np.int32(1), tokens)

    monkeypatch.setattr(CacheManager, "register", early)


class DropsLayerActivations(_Executor):
    """Drop the activations of a chunk's first layers between steps."""

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        if first:
            other = replace(batch, token_ids=(batch.token_ids + 1) % np.int32(VOCAB_SIZE))
            super().run_layers(other, 0, first)
        super().run_layers(batch, first, end)


class WritesIntoSharedBlock(_Executor):
    """Write the last token of a fully cached prompt, wrongly, into the shared block."""

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        blocks = np.repeat(np.arange(len(batch.seq_starts) - 1), np.diff(batch.seq_starts))
        size, (cache,) = self._block_size, batch.caches
        slots = cache.block_tables[blocks, batch.positions // size] * size
        slots += batch.positions % size
        kept = cache.kv_slots < 0
        token_ids = np.where(kept, (batch.token_ids + 1) % VOCAB_SIZE, batch.token_ids)
        wrong = replace(
            batch,
            token_ids=token_ids.astype(np.int32),
            caches=(
                replace(cache, kv_slots=np.where(kept, slots, cache.kv_slots).astype(np.int32)),
            ),
        )
        super().run_trunk(wrong)
        super().run_trunk(batch)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        super().allocate_cache(num_blocks, block_size)


def test_a_wrapper_without_a_fault_changes_nothing(models: list[Model], alone: AloneRuns) -> None:
    assert _cases_until_found(models, alone, wrap_executor=_Executor, num_cases=4) is None


def test_a_k_split_by_row_count_is_detected(
    models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[Model] = [ReferenceModel(model.folder, model.dtype) for model in models]
    assert _cases_until_found(references, AloneRuns(), num_cases=2) is None
    monkeypatch.setattr(reference_ops, "linear", linear_that_splits_k)
    assert _cases_until_found(references, AloneRuns(), num_cases=2) is not None


@pytest.mark.parametrize(
    "fault",
    [
        RoundsLogitsByRowCount,
        PoolsByRowCount,
        DrawsNoiseByRow,
        SkipsBlockCopies,
        WritesIntoSharedBlock,
        DropsLayerActivations,
        ScoresBySlice,
        ScoresPreviousSlice,
        SwapsGrammarMasks,
        DrawsNoiseByDraft,
    ],
)
def test_a_fault_in_the_executor_is_detected(
    models: list[Model], alone: AloneRuns, fault: type[_Executor]
) -> None:
    assert _cases_until_found(models, alone, wrap_executor=fault) is not None


@pytest.mark.parametrize(
    "fault",
    [
        SharesInsteadOfCopying,
        KeepsStaleEntries,
        CountsOutputAsPrompt,
        DropsWindow,
        DropsMirostatState,
        SharesMirostatState,
        ReordersForcedTokens,
        KeepsRejectedKV,
        TrustsDraftedKV,
    ],
)
def test_a_fault_in_the_runner_is_detected(
    models: list[Model], alone: AloneRuns, fault: type[ModelRunner]
) -> None:
    assert _cases_until_found(models, alone, runner_type=fault) is not None


@pytest.mark.parametrize(
    "plant",
    [
        keep_runs_after_mismatches,
        count_all_drafts_in_histories,
        mask_drafts_alike,
    ],
)
def test_a_fault_in_verification_is_detected(
    models: list[Model],
    alone: AloneRuns,
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert _cases_until_found(models, alone) is not None


def test_a_block_shared_before_verification_is_detected(
    models: list[Model], alone: AloneRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stream that ends with a full block, and one that has all of it as its prompt. Of drawn
    cases two in a hundred detect it."""
    cases = [_continued_answer(model, at, alone) for at, model in enumerate(models)]
    outcomes = [run_case(models[case.model], case, alone=alone) for case in cases]
    assert all(outcome.prefix_hit and outcome.rejected for outcome in outcomes)
    assert not any(map(differences, models, outcomes, repeat(alone)))
    share_blocks_before_verification(monkeypatch)
    outcomes = [run_case(models[case.model], case, alone=alone) for case in cases]
    assert any(map(differences, models, outcomes, repeat(alone))), "most of the models detect it"


def test_a_fault_in_the_blocks_of_drafts_is_detected(
    models: list[Model], alone: AloneRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_in_blocks_of_others(monkeypatch)
    # Few cases draft with the model's first layers, so the others are left out.
    assert _cases_until_found(models, alone, num_cases=400, proposer="self") is not None


def _continued_answer(model: Model, at: int, alone: AloneRuns) -> Case:
    """Return a case of an answer with wrong drafts, and of a later one that continues it."""
    settings = replace(ALONE, block_size=8, num_blocks=64, max_samples=8, prefix_caching=True)
    settings = replace(settings, proposer="wrong", max_drafts=3)
    prompt = [1 + (7 * place + at) % (VOCAB_SIZE - 1) for place in range(21)]
    arrivals: list[Arrival] = []
    for name, at_step in (("first", 0), ("second", 40)):
        request = Request(
            request_id=f"continued {at} {name}",
            group_id=f"continued {at} {name}",
            stream=0,
            stop_ids=(),
            prompt_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(temperature=0.0, max_tokens=19, logprobs=0, seed=at),
            max_total_tokens=len(prompt) + 19,
            arrival_ms=float(at_step),
            speculation=Speculation(max_drafts=3),
        )
        arrivals.append(Arrival(at_step=at_step, requests=(request,), cancel_at=(None,)))
        prompt += [token for token, _ in alone.of(model, request).tokens] + [3]
    return Case(number=-2, model=at, settings=settings, arrivals=tuple(arrivals))


def _cases_until_found(
    models: list[Model],
    alone: AloneRuns,
    *,
    num_cases: int = MAX_CASES,
    proposer: str | None = None,
    wrap_executor: Callable[[Executor], Executor] = lambda executor: executor,
    runner_type: type[ModelRunner] = ModelRunner,
) -> int | None:
    """Return how many cases are drawn until a difference appears; None if no case shows one.

    proposer: run only the cases with this proposer.
    """
    for number in range(num_cases):
        case = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        if proposer is not None and case.settings.proposer != proposer:
            continue
        model = models[case.model]
        outcome = run_case(
            model, case, wrap_executor=wrap_executor, runner_type=runner_type, alone=alone
        )
        if differences(model, outcome, alone):
            return number + 1
    return None
