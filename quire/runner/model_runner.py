"""ModelRunner: makes an executor do what a StepPlan says, and tells what came of it.

Order within a plan: admissions, table deltas, copies between tiers, block copies, trunk (masks of
grammars are made beside it); head in slices, with the scores of prompts; head in slices, with token
choice; what ends the answers of beams; append to the token table.
Knows nothing of policy,
text or time. Always holds: plans run strictly in the order they were submitted; a failed row never
touches another; what a plan's rows read was put into the mirrors by this plan or an earlier one,
even where computing an earlier one failed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.records import (
    NO_BOOLS,
    NO_FLOATS,
    NO_INTS,
    Bools,
    Candidates,
    RowError,
    StepPlan,
    StepResult,
    no_candidates,
)
from quire.execute.executor import Executor
from quire.program.batch import ForwardBatch
from quire.runner.batches import KeptSampleBatch, forward_batch
from quire.runner.beam_ends import WatchSource
from quire.runner.grammar_rows import NO_MASK, Follow, Masks, MatcherSource
from quire.runner.handle import Handle
from quire.runner.scoring import ScoredRows, listed_logprobs, score_prompts, stacked
from quire.runner.slot_tables import SlotTables
from quire.runner.tier_mover import TierMover
from quire.runner.worker_thread import Job, WorkerThread
from quire.sampling.batch import TokenChoice

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
ROW_FAILED = (
    "there is no token to choose: the row's logits hold NaN or infinity, or what is banned (stop "
    "tokens before min_tokens, bad words, n-grams that came already) and what is allowed leave none"
)
BANNED_ALL = (
    "there is no token to choose: the row's logits hold NaN or infinity, or all that the grammar "
    "allows here is banned (bad words, allowed_token_ids, n-grams that came already, stop tokens "
    "before min_tokens); ban less, or allow more in the grammar"
)


class ModelRunner:
    """Two-phase: `submit(plan)` then `collect(handle)`, in the same order.

    With `overlap`, plans are computed by one thread of the runner's own, so that the caller can
    make the next plan meanwhile; else submit computes. `max_samples` is the head's largest slice.
    mover: where plans move blocks to a tier and back; closed with the runner. matchers: of grammars
    that answers follow; watches: of stop strings that end beams; jump_ahead: whether tokens that
    grammars leave no choice of are told at once (by default where one plan is out at a time: a
    later one has such a row already).
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        max_samples: int,
        overlap: bool = False,
        mover: TierMover | None = None,
        matchers: MatcherSource | None = None,
        watches: WatchSource | None = None,
        jump_ahead: bool | None = None,
    ) -> None:
        self.executor = executor
        self.tables = SlotTables(
            num_slots=num_slots,
            max_model_len=max_model_len,
            block_size=block_size,
            matchers=matchers,
            watches=watches,
            jump_ahead=not overlap if jump_ahead is None else jump_ahead,
        )
        self.mover = mover
        self._sampling = KeptSampleBatch(self.tables)
        self._max_samples = max_samples
        self._thread = WorkerThread("quire-runner") if overlap else None

    def submit(self, plan: StepPlan) -> Handle:
        """Hand in the next plan. Never raises for what computing it does; `collect` does."""
        job = Job(lambda: self._run(plan))
        if self._thread is None:
            job.run()
        else:
            self._thread.put(job)
        return job

    def collect(self, handle: Handle) -> StepResult:
        """The result of a plan; raises what the executor raised."""
        return handle.outcome()

    def end_thread(self) -> None:
        """Let plans handed in finish and end the runner's own threads; the executor stays open."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self.mover is not None:
            self.mover.close()
            self.mover = None
        self.tables.grammars.close()

    def close(self) -> None:
        """Let plans handed in finish, end the thread, close the executor."""
        self.end_thread()
        self.executor.close()

    def _run(self, plan: StepPlan) -> StepResult:
        self.tables.apply(plan)
        self._move(plan)
        if len(plan.copy_from):
            self.executor.copy_blocks(plan.copy_from, plan.copy_to)
        if len(plan.slots) == 0:
            return StepResult(step=plan.step, token_counts=np.zeros(0, np.int32), token_ids=_none())
        batch = forward_batch(plan, self.tables)
        slots = plan.slots[plan.samples]  # [R]
        positions = (plan.starts + plan.counts)[plan.samples]  # [R]
        masks = self.tables.grammars.begin(slots, positions)
        try:
            at_once = not self.tables.num_scoring and len(slots) <= self._max_samples
            self.executor.run_trunk(batch, head_rows=len(slots) if at_once else 0)
        finally:
            if masks is not None:
                masks.exception()  # it reads the tables: they change only when it is done
        scored = score_prompts(
            plan, batch, self.tables, self.executor, max_samples=self._max_samples
        )
        made = NO_MASK if masks is None else masks.result()
        choice, listed = self._choose(batch, slots, positions, made)
        return self._finish(plan, scored, choice, listed, slots, positions, made)

    def _move(self, plan: StepPlan) -> None:
        """Begin the copies between tiers, before anything is written into what they read."""
        if self.mover is not None:
            if plan.tier_copies is not None:
                self.mover.begin(plan.tier_copies)
            self.mover.wait_for(plan.table_blocks)
        elif plan.tier_copies is not None:
            raise WorkerError(
                f"step {plan.step} moves {len(plan.tier_copies)} blocks to or from a tier and the "
                "runner has none; give it the mover of a tier (a record is replayed with an empty "
                "one)"
            )

    def _choose(
        self, batch: ForwardBatch, slots: Int32s, positions: Int32s, masks: Masks
    ) -> tuple[TokenChoice, Float32s]:
        """Head and token choice, at most max_samples rows at a time; and listed_logprobs."""
        if 0 < len(slots) <= self._max_samples:
            return self._choose_slice(batch, 0, slots, positions, masks)
        parts, listed = [], []
        for first in range(0, len(slots), self._max_samples):
            rows = slice(first, min(first + self._max_samples, len(slots)))
            of_rows = replace(masks, rows=masks.rows[rows])
            part = self._choose_slice(batch, first, slots[rows], positions[rows], of_rows)
            parts.append(part[0])
            listed.append(part[1])
        return _joined(parts), stacked(listed, np.float32(np.nan))

    def _choose_slice(
        self, batch: ForwardBatch, first: int, slots: Int32s, positions: Int32s, masks: Masks
    ) -> tuple[TokenChoice, Float32s]:
        """Of rows that sample, from `first` on; all arguments are theirs."""
        logits = self.executor.run_head(batch, first, len(slots))
        sampling = self._sampling.of(slots, positions, masks)
        listed = listed_logprobs(logits, slots, self.tables, self.executor)
        return self.executor.sample(logits, sampling), listed

    def _finish(
        self,
        plan: StepPlan,
        scored: ScoredRows | None,
        choice: TokenChoice,
        listed: Float32s,
        slots: Int32s,
        positions: Int32s,
        masks: Masks,
    ) -> StepResult:
        for row in masks.failed:
            choice.token_ids[row] = -1
        follow = self.tables.grammars.follow(slots, positions, choice.token_ids)
        candidates, unsure = self.tables.ends.told(slots, positions, choice.candidates)
        for row in follow.failed | unsure:
            choice.token_ids[row] = -1
        forced_counts, forced_ids, complete = _follow_arrays(follow, plan)
        token_counts = plan.samples.astype(np.int32)
        errors: tuple[RowError, ...] = ()
        if min(choice.token_ids.tolist(), default=0) < 0 or (
            scored is not None and scored.failed.any()
        ):
            failed = np.zeros(len(plan.slots), np.bool_) if scored is None else scored.failed
            failed[plan.samples] |= choice.token_ids < 0
            token_counts[failed] = 0
            why = _reasons(masks, follow.failed | unsure, self.tables, plan)
            errors = tuple(
                RowError(row=row, message=why.get(row, ROW_FAILED))
                for row in np.flatnonzero(failed).tolist()
            )
            good = ~failed[plan.samples]
            slots, positions, listed = slots[good], positions[good], listed[good]
            candidates = None if candidates is None else _rows_of(candidates, good)
            choice = TokenChoice(
                token_ids=choice.token_ids[good],
                logprobs=choice.logprobs[good],
                top_ids=choice.top_ids[good],
                top_logprobs=choice.top_logprobs[good],
                mus=choice.mus[good] if len(choice.mus) else choice.mus,
            )
        if len(choice.mus):
            self.tables.rare.mirostat_mu[slots] = choice.mus
        self.tables.append(slots, positions, choice.token_ids)
        return StepResult(
            step=plan.step,
            token_counts=token_counts,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            top_ids=choice.top_ids,
            top_logprobs=choice.top_logprobs,
            listed_logprobs=listed,
            mirostat_mus=choice.mus,
            score_counts=NO_INTS if scored is None else scored.counts,
            scores=None if scored is None else scored.scores,
            errors=errors,
            forced_counts=forced_counts,
            forced_ids=forced_ids,
            complete=complete,
            candidates=candidates,
        )


def _follow_arrays(follow: Follow, plan: StepPlan) -> tuple[Int32s, Int32s, Bools]:
    """As in StepResult: by the plan's rows."""
    if not follow.forced and not follow.complete:
        return NO_INTS, NO_INTS, NO_BOOLS
    rows = plan.samples.nonzero()[0]
    counts, complete = np.zeros(len(plan.slots), np.int32), np.zeros(len(plan.slots), np.bool_)
    for place, forced in follow.forced.items():
        counts[rows[place]] = len(forced)
    complete[rows[follow.complete]] = True
    ids = [id_ for _, forced in sorted(follow.forced.items()) for id_ in forced]
    return counts, np.array(ids, np.int32), complete


def _reasons(
    masks: Masks, failed: dict[int, str], tables: SlotTables, plan: StepPlan
) -> dict[int, str]:
    """Why rows of the plan failed, if they follow a grammar or are watched. failed: why, of those
    that sample and whose tokens were chosen."""
    if not len(masks.rows) and not masks.failed and not failed:
        return {}
    rows = plan.samples.nonzero()[0].tolist()
    why = {row: BANNED_ALL for row in rows if tables.grammars.has[plan.slots[row]]}
    return why | {rows[place]: said for place, said in (masks.failed | failed).items()}


def _rows_of(candidates: Candidates, rows: Bools) -> Candidates:
    return Candidates(
        ids=candidates.ids[rows],
        scores=candidates.scores[rows],
        logprobs=candidates.logprobs[rows],
        ends=candidates.ends[rows] if len(candidates.ends) else candidates.ends,
    )


def _joined(parts: list[TokenChoice]) -> TokenChoice:
    """Slices of the head put together; [R, K] with K the widest slice's. No slices: no rows."""
    return TokenChoice(
        token_ids=np.concatenate([_none(), *(part.token_ids for part in parts)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        top_ids=stacked([part.top_ids for part in parts], np.int32(-1)),
        top_logprobs=stacked([part.top_logprobs for part in parts], np.float32(np.nan)),
        mus=_joined_mus(parts),
        candidates=_joined_candidates(parts),
    )


def _joined_candidates(parts: list[TokenChoice]) -> Candidates | None:
    """Of all rows where a slice has some; slices without beams have none."""
    if all(part.candidates is None for part in parts):
        return None
    each = [part.candidates or no_candidates(len(part.token_ids)) for part in parts]
    return Candidates(
        ids=stacked([one.ids for one in each], np.int32(-1)),
        scores=stacked([one.scores for one in each], np.float32(np.nan)),
        logprobs=stacked([one.logprobs for one in each], np.float32(np.nan)),
    )


def _joined_mus(parts: list[TokenChoice]) -> Float32s:
    """Of all rows where a slice has mirostat; slices without it have 0."""
    if not any(len(part.mus) for part in parts):
        return NO_FLOATS
    return np.concatenate(
        [part.mus if len(part.mus) else np.zeros_like(part.logprobs) for part in parts]
    )


def _none() -> Int32s:
    return np.empty(0, np.int32)
