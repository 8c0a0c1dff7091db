"""From what was computed for a plan's rows to its StepResult, and what the mirror keeps of it.

Rows fail one by one: a token that could not be chosen, a prompt that could not be scored, a grammar
that cannot go on. Knows slots and positions; asks no executor. Always holds: a failed row has no
entries; what a row yields is kept for its slot only while the slot is still its request's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

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
from quire.runner.batch_builder import sampled_positions
from quire.runner.grammar_rows import NO_FOLLOW, Follow
from quire.runner.logprobs import ScoredRows, joined_scores, stacked
from quire.runner.slot_tables import SlotTables
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The outputs of a plan's N rows, with R sampled positions.

    listed: listed_logprobs [R, L]. no_mask: error messages by sampled position, where a grammar
    allows no token. broken: error messages by row, of rows that failed when computed alone.
    """

    scored: ScoredRows | None
    choice: TokenChoice
    listed: Float32s
    no_mask: Mapping[int, str] = field(default_factory=dict)
    has_grammar: bool = False
    broken: Mapping[int, str] = field(default_factory=dict)


def step_result(
    plan: StepPlan, tables: SlotTables, computed: Computed, tenancy: NDArray[np.int64]
) -> StepResult:
    """Return the result of a plan and append its runs of tokens to the tables.

    tenancy: of the slots of the sampled positions, when the plan was applied. Where it has changed
    since, nothing is appended.
    """
    scored, choice = computed.scored, computed.choice
    slots = np.repeat(plan.slots, plan.sample_counts)  # [R]
    positions = sampled_positions(plan, plan.starts + plan.counts)
    for place in computed.no_mask:
        choice.token_ids[place] = -1
    stays = tables.tenancy[slots] == tenancy
    follow, candidates, unsure = NO_FOLLOW, choice.candidates, dict[int, str]()
    if tables.grammars.has[slots].any():
        follow = tables.grammars.follow(slots, positions, np.where(stays, choice.token_ids, -1))
    if candidates is not None:
        candidates, unsure = tables.ends.told(slots, positions, candidates)
    for place in follow.failed | unsure:
        choice.token_ids[place] = -1
    failed, errors = _failures(plan, tables, computed, follow.failed | unsure)
    runs = _Runs(
        counts=plan.sample_counts,
        slots=slots,
        positions=positions,
        stays=stays,
        choice=replace(choice, candidates=candidates),
        listed=computed.listed,
    )
    if failed is not None or follow.forced:
        runs = _changed_runs(runs, plan, failed, follow.forced)
    choice, slots, stays = runs.choice, runs.slots, runs.stays
    if len(choice.mus):
        tables.rare.mirostat_mu[slots[stays]] = choice.mus[stays]
    tables.append(slots[stays], runs.positions[stays], choice.token_ids[stays])
    return StepResult(
        step=plan.step,
        token_counts=runs.counts,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        top_ids=choice.top_ids,
        top_logprobs=choice.top_logprobs,
        listed_logprobs=runs.listed,
        mirostat_mus=choice.mus,
        score_counts=NO_INTS if scored is None else scored.counts,
        scores=None if scored is None else scored.scores,
        errors=errors,
        complete=_complete(plan, follow),
        candidates=choice.candidates,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """The runs of a plan's rows: counts [N], and per token [E] its slot, position and choice.

    stays [E]: whether the slot still has the request of the plan.
    """

    counts: Int32s
    slots: Int32s
    positions: Int32s
    stays: Bools
    choice: TokenChoice
    listed: Float32s


def _changed_runs(
    runs: _Runs, plan: StepPlan, failed: Bools | None, forced: Mapping[int, list[int]]
) -> _Runs:
    """Drop the runs of failed rows [N] and put the forced ids behind their sampled tokens [R]."""
    row_of = np.repeat(np.arange(len(plan.slots)), plan.sample_counts)  # [R]
    lengths = np.ones(len(row_of), np.int32)
    for place, ids in forced.items():
        lengths[place] += len(ids)
    if failed is not None:
        lengths[failed[row_of]] = 0
    firsts = np.cumsum(lengths) - lengths
    source = np.repeat(np.arange(len(row_of)), lengths)  # [E]
    choice = _choice_at(runs.choice, source)
    for place, ids in forced.items():
        if lengths[place]:
            choice.token_ids[firsts[place] + 1 : firsts[place] + lengths[place]] = ids
    counts = np.bincount(row_of, lengths, len(plan.slots)).astype(np.int32)
    offsets = np.arange(len(source)) - firsts[source]
    return _Runs(
        counts=counts,
        slots=runs.slots[source],
        positions=(runs.positions[source] + offsets).astype(np.int32),
        stays=runs.stays[source],
        choice=choice,
        listed=runs.listed[source],
    )


def _failures(
    plan: StepPlan, tables: SlotTables, computed: Computed, unsure: dict[int, str]
) -> tuple[Bools | None, tuple[RowError, ...]]:
    """Return which rows failed [N], None for none, and their errors."""
    scored, token_ids = computed.scored, computed.choice.token_ids
    scores_failed = scored is not None and bool(scored.failed.any())
    if not (computed.broken or scores_failed or min(token_ids.tolist(), default=0) < 0):
        return None, ()
    failed = np.zeros(len(plan.slots), np.bool_) if scored is None else scored.failed
    failed[np.repeat(np.arange(len(plan.slots)), plan.sample_counts)[token_ids < 0]] = True
    failed[list(computed.broken)] = True
    why = {**_reasons(computed, unsure, tables, plan), **computed.broken}
    errors = [
        RowError(row=row, message=why.get(row, ROW_FAILED))
        for row in np.flatnonzero(failed).tolist()
    ]
    return failed, tuple(errors)


def _complete(plan: StepPlan, follow: Follow) -> Bools:
    """As in StepResult."""
    if not follow.complete:
        return NO_BOOLS
    complete = np.zeros(len(plan.slots), np.bool_)
    complete[np.repeat(np.arange(len(plan.slots)), plan.sample_counts)[follow.complete]] = True
    return complete


def no_rows(plan: StepPlan) -> StepResult:
    """Of a plan that computes nothing."""
    return StepResult(step=plan.step, token_counts=np.zeros(0, np.int32), token_ids=_none())


def without_part(plan: StepPlan, result: StepResult, message: str) -> StepResult:
    """Return `result` with the error of the plan's layered prefill; its rows stand."""
    return replace(result, errors=(*result.errors, RowError(row=len(plan.slots), message=message)))


def failed_row(plan: StepPlan, message: str) -> Computed:
    """Of a plan with one row, which failed."""
    num_rows = int(plan.sample_counts.sum())
    return Computed(
        scored=None,
        choice=TokenChoice(
            token_ids=np.full(num_rows, -1, np.int32),
            logprobs=np.full(num_rows, np.nan, np.float32),
            top_ids=np.empty((num_rows, 0), np.int32),
            top_logprobs=np.empty((num_rows, 0), np.float32),
        ),
        listed=np.empty((num_rows, 0), np.float32),
        broken={0: message},
    )


def joined_rows(plans: Sequence[StepPlan], parts: Sequence[Computed]) -> Computed:
    """What came of the rows of several plans, one after the other."""
    no_mask: dict[int, str] = {}
    broken: dict[int, str] = {}
    num_rows = num_samples = 0
    for plan, part in zip(plans, parts, strict=True):
        no_mask |= {num_samples + row: why for row, why in part.no_mask.items()}
        broken |= {num_rows + row: why for row, why in part.broken.items()}
        num_rows += len(plan.slots)
        num_samples += int(plan.sample_counts.sum())
    sizes = [len(plan.slots) for plan in plans]
    return Computed(
        scored=joined_scores([part.scored for part in parts], sizes),
        choice=joined_choices([part.choice for part in parts]),
        listed=stacked([part.listed for part in parts], np.float32(np.nan)),
        no_mask=no_mask,
        has_grammar=any(part.has_grammar for part in parts),
        broken=broken,
    )


def joined_choices(parts: Sequence[TokenChoice]) -> TokenChoice:
    """Slices of the head put together; [R, K] with K the widest slice's. No slices: no rows."""
    return TokenChoice(
        token_ids=np.concatenate([_none(), *(part.token_ids for part in parts)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        top_ids=stacked([part.top_ids for part in parts], np.int32(-1)),
        top_logprobs=stacked([part.top_logprobs for part in parts], np.float32(np.nan)),
        mus=_joined_mus(parts),
        candidates=_joined_candidates(parts),
    )


def _reasons(
    computed: Computed, failed: dict[int, str], tables: SlotTables, plan: StepPlan
) -> dict[int, str]:
    """Why rows of the plan failed, if they follow a grammar or are watched. failed: why, of those
    that sample and have a chosen token."""
    if not computed.has_grammar and not computed.no_mask and not failed:
        return {}
    rows = np.repeat(np.arange(len(plan.slots)), plan.sample_counts).tolist()
    why = {row: BANNED_ALL for row in rows if tables.grammars.has[plan.slots[row]]}
    said = {**computed.no_mask, **failed}
    return why | {rows[place]: message for place, message in said.items()}


def _choice_at(choice: TokenChoice, index: NDArray[np.intp]) -> TokenChoice:
    return TokenChoice(
        token_ids=choice.token_ids[index],
        logprobs=choice.logprobs[index],
        top_ids=choice.top_ids[index],
        top_logprobs=choice.top_logprobs[index],
        mus=choice.mus[index] if len(choice.mus) else choice.mus,
        candidates=None if choice.candidates is None else _candidates_at(choice.candidates, index),
    )


def _candidates_at(candidates: Candidates, index: NDArray[np.intp]) -> Candidates:
    return Candidates(
        ids=candidates.ids[index],
        scores=candidates.scores[index],
        logprobs=candidates.logprobs[index],
        ends=candidates.ends[index] if len(candidates.ends) else candidates.ends,
    )


def _joined_candidates(parts: Sequence[TokenChoice]) -> Candidates | None:
    """Of all rows where a slice has some; slices without beams have none."""
    if all(part.candidates is None for part in parts):
        return None
    each = [part.candidates or no_candidates(len(part.token_ids)) for part in parts]
    return Candidates(
        ids=stacked([one.ids for one in each], np.int32(-1)),
        scores=stacked([one.scores for one in each], np.float32(np.nan)),
        logprobs=stacked([one.logprobs for one in each], np.float32(np.nan)),
    )


def _joined_mus(parts: Sequence[TokenChoice]) -> Float32s:
    """Of all rows where a slice has mirostat; slices without it have 0."""
    if not any(len(part.mus) for part in parts):
        return NO_FLOATS
    return np.concatenate(
        [part.mus if len(part.mus) else np.zeros_like(part.logprobs) for part in parts]
    )


def _none() -> Int32s:
    return np.empty(0, np.int32)
