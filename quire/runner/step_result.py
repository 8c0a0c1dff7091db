"""From what was computed for a plan's rows to its StepResult, and what the mirror keeps of it.

Rows fail one by one: a token that could not be chosen, a prompt that could not be scored, a grammar
that cannot go on. Knows slots and positions; asks no executor. Always holds: a failed row has no
entries; what a row yields is kept for its slot only while the slot is still its request's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.rare_records import no_candidates
from quire.base.records import (
    NO_BOOLS,
    NO_FLOATS,
    NO_INTS,
    Bools,
    Candidates,
    RowError,
    StepPlan,
    StepResult,
)
from quire.runner.batch_builder import SampledRows
from quire.runner.grammar_rows import NO_FOLLOW
from quire.runner.logprobs import ScoredRows, joined_scores, stacked
from quire.runner.row_errors import row_errors
from quire.runner.slot_tables import SlotTables
from quire.runner.token_runs import TokenRuns, cut_runs
from quire.runner.verification import drop_after_mismatch, take_back_drafts
from quire.sampling.batch import TokenChoice

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
_Number = TypeVar("_Number", np.int32, np.float32)
NO_MESSAGES: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The outputs of a plan's N rows, with R sampled positions.

    listed: listed_logprobs [R, L]. no_mask: error messages by sampled position, where a grammar
    allows no token. broken: error messages by row, of rows that failed when computed alone.
    """

    scored: ScoredRows | None
    choice: TokenChoice
    listed: Float32s
    no_mask: Mapping[int, str] = field(default_factory=lambda: NO_MESSAGES)
    has_grammar: bool = False
    broken: Mapping[int, str] = field(default_factory=lambda: NO_MESSAGES)


def step_result(
    plan: StepPlan, tables: SlotTables, computed: Computed, sampled: SampledRows
) -> StepResult:
    """Return the result of a plan and append its runs of tokens to the tables.

    sampled: as of when the plan was applied. Nothing is appended to a slot that another request
    has taken since.
    """
    scored, choice, positions = computed.scored, computed.choice, sampled.positions(plan)
    for place in computed.no_mask:
        choice.token_ids[place] = -1
    stays, follow, unsure = sampled.stays(tables), NO_FOLLOW, NO_MESSAGES
    if plan.draft_ids.size:
        drop_after_mismatch(plan, choice.token_ids)
        take_back_drafts(plan, tables.tokens, sampled.rows, stays)
    if sampled.has_grammar:
        ids = choice.token_ids if stays is None else np.where(stays, choice.token_ids, -1)
        follow = tables.grammars.follow(sampled.slots, positions, ids)
        unsure = follow.failed
    if choice.candidates is not None:
        candidates, unjudged = tables.ends.mark_ends(sampled.slots, positions, choice.candidates)
        choice, unsure = replace(choice, candidates=candidates), {**unsure, **unjudged}
    for place in unsure:
        choice.token_ids[place] = -1
    failed = _failed_rows(plan, sampled, computed)
    runs = TokenRuns(
        counts=plan.sample_counts,
        slots=sampled.slots,
        positions=positions,
        stays=stays,
        choice=choice,
        listed=computed.listed,
        complete=NO_BOOLS,
    )
    if failed is not None or follow.forced or follow.complete:
        runs = cut_runs(runs, sampled, failed, follow)
    _append(runs, tables)
    choice, errors = runs.choice, tuple[RowError, ...]()
    if failed is not None:
        messages = {**computed.no_mask, **unsure}
        errors = row_errors(
            failed, plan, tables, sampled, messages=messages, broken=computed.broken
        )
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
        complete=runs.complete,
        candidates=choice.candidates,
        errors=errors,
    )


def _append(runs: TokenRuns, tables: SlotTables) -> None:
    """Append the tokens of runs to the slots that still have their request."""
    slots, positions, token_ids, mus = (
        runs.slots,
        runs.positions,
        runs.choice.token_ids,
        runs.choice.mus,
    )
    if (stays := runs.stays) is not None:
        slots, positions, token_ids = slots[stays], positions[stays], token_ids[stays]
        mus = mus[stays] if len(mus) else mus
    if len(mus):
        tables.rare.mirostat_mu[slots] = mus
    tables.append(slots, positions, token_ids)


def _failed_rows(plan: StepPlan, sampled: SampledRows, computed: Computed) -> Bools | None:
    """Return the rows without a result [N]; None if all that was computed stands.

    A row fails with its first sampled position: a later one without a token only ends the run.
    """
    scored, token_ids = computed.scored, computed.choice.token_ids
    scores_failed = scored is not None and bool(scored.failed.any())
    if not (computed.broken or scores_failed or min(token_ids.tolist(), default=0) < 0):
        return None
    failed = np.zeros(len(plan.slots), np.bool_) if scored is None else scored.failed.copy()
    failed[sampled.rows[token_ids[sampled.firsts()] < 0]] = True
    failed[list(computed.broken)] = True
    return failed


def no_rows(plan: StepPlan) -> StepResult:
    """Return the result of a plan without rows."""
    return StepResult(step=plan.step, token_counts=np.zeros(0, np.int32), token_ids=_none())


def without_part(plan: StepPlan, result: StepResult, message: str) -> StepResult:
    """Return `result` with the error of the plan's layered prefill; its rows stand."""
    return replace(result, errors=(*result.errors, RowError(row=len(plan.slots), message=message)))


@lru_cache(maxsize=1024)
def no_table(num_rows: int) -> Float32s:
    """Return a table [num_rows, 0]."""
    return np.empty((num_rows, 0), np.float32)


def failed_row(plan: StepPlan, message: str) -> Computed:
    """Return the result of a plan with one row, which failed."""
    num_rows = int(plan.sample_counts.sum())
    return Computed(
        scored=None,
        choice=TokenChoice(token_ids=np.full(num_rows, -1, np.int32)),
        listed=no_table(num_rows),
        broken={0: message},
    )


def joined_rows(plans: Sequence[StepPlan], parts: Sequence[Computed]) -> Computed:
    """Return what came of the rows of several plans, one after the other."""
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
    """Return slices of the head put together; [R, K] with K the widest slice's. No slices: no
    rows."""
    token_ids = np.concatenate([_none(), *(part.token_ids for part in parts)])
    mus, candidates = _joined_floats(parts, "mus", 0.0), _joined_candidates(parts)
    if not any(len(part.logprobs) for part in parts):
        return TokenChoice(token_ids=token_ids, mus=mus, candidates=candidates)
    return TokenChoice(
        token_ids=token_ids,
        logprobs=_joined_floats(parts, "logprobs", np.nan),
        top_ids=stacked([_rows(part.top_ids, part) for part in parts], np.int32(-1)),
        top_logprobs=stacked(
            [_rows(part.top_logprobs, part) for part in parts], np.float32(np.nan)
        ),
        mus=mus,
        candidates=candidates,
    )


def _rows(table: NDArray[_Number], part: TokenChoice) -> NDArray[_Number]:
    """Return a table that has a row for each token."""
    return table if len(table) else np.empty((len(part.token_ids), 0), table.dtype)


def _joined_floats(parts: Sequence[TokenChoice], name: str, absent: float) -> Float32s:
    """Return an array of all slices; `absent` for the rows of slices without it."""
    each = [getattr(part, name) for part in parts]
    if not any(map(len, each)):
        return NO_FLOATS
    filled = [
        values if len(values) else np.full(len(part.token_ids), absent, np.float32)
        for values, part in zip(each, parts, strict=True)
    ]
    return np.concatenate(filled)


def _joined_candidates(parts: Sequence[TokenChoice]) -> Candidates | None:
    """Join the candidates of slices; return None where no slice has beams."""
    if all(part.candidates is None for part in parts):
        return None
    each = [part.candidates or no_candidates(len(part.token_ids)) for part in parts]
    return Candidates(
        ids=stacked([one.ids for one in each], np.int32(-1)),
        scores=stacked([one.scores for one in each], np.float32(np.nan)),
        logprobs=stacked([one.logprobs for one in each], np.float32(np.nan)),
    )


def _none() -> Int32s:
    return np.empty(0, np.int32)
