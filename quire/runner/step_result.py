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
from quire.runner.grammar_rows import Follow
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
    """What came of a plan's N rows, of which R sample. listed: listed_logprobs [R, L]. no_mask:
    rows of R whose grammar allows nothing, and why; broken: rows of N that failed by themselves."""

    scored: ScoredRows | None
    choice: TokenChoice
    listed: Float32s
    no_mask: Mapping[int, str] = field(default_factory=dict)
    has_grammar: bool = False
    broken: Mapping[int, str] = field(default_factory=dict)


def step_result(
    plan: StepPlan, tables: SlotTables, computed: Computed, tenancy: NDArray[np.int64]
) -> StepResult:
    """The result of a plan, whose tokens are put into the tables. tenancy: of the slots of the rows
    that sample, as it was when the plan was applied; where it is another now, nothing is kept."""
    scored, choice, listed = computed.scored, computed.choice, computed.listed
    slots = plan.slots[plan.samples]
    positions = (plan.starts + plan.counts)[plan.samples]
    for row in computed.no_mask:
        choice.token_ids[row] = -1
    stays = tables.tenancy[slots] == tenancy
    follow = tables.grammars.follow(slots, positions, np.where(stays, choice.token_ids, -1))
    candidates, unsure = tables.ends.told(slots, positions, choice.candidates)
    for row in follow.failed | unsure:
        choice.token_ids[row] = -1
    forced_counts, forced_ids, complete = _follow_arrays(follow, plan)
    token_counts = plan.samples.astype(np.int32)
    errors: tuple[RowError, ...] = ()
    if (
        computed.broken
        or min(choice.token_ids.tolist(), default=0) < 0
        or (scored is not None and scored.failed.any())
    ):
        failed = np.zeros(len(plan.slots), np.bool_) if scored is None else scored.failed
        failed[plan.samples] |= choice.token_ids < 0
        failed[list(computed.broken)] = True
        token_counts[failed] = 0
        why = {**_reasons(computed, follow.failed | unsure, tables, plan), **computed.broken}
        errors = tuple(
            RowError(row=row, message=why.get(row, ROW_FAILED))
            for row in np.flatnonzero(failed).tolist()
        )
        good = ~failed[plan.samples]
        slots, positions, listed, stays = slots[good], positions[good], listed[good], stays[good]
        candidates = None if candidates is None else _rows_of(candidates, good)
        choice = TokenChoice(
            token_ids=choice.token_ids[good],
            logprobs=choice.logprobs[good],
            top_ids=choice.top_ids[good],
            top_logprobs=choice.top_logprobs[good],
            mus=choice.mus[good] if len(choice.mus) else choice.mus,
        )
    if len(choice.mus):
        tables.rare.mirostat_mu[slots[stays]] = choice.mus[stays]
    tables.append(slots[stays], positions[stays], choice.token_ids[stays])
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


def no_rows(plan: StepPlan) -> StepResult:
    """Of a plan that computes nothing."""
    return StepResult(step=plan.step, token_counts=np.zeros(0, np.int32), token_ids=_none())


def without_part(plan: StepPlan, result: StepResult, message: str) -> StepResult:
    """`result`, of a plan whose part of a prompt failed; its rows stand."""
    return replace(result, errors=(*result.errors, RowError(row=len(plan.slots), message=message)))


def failed_row(plan: StepPlan, message: str) -> Computed:
    """Of a plan with one row, which failed."""
    num_rows = np.count_nonzero(plan.samples)
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
        num_samples += int(np.count_nonzero(plan.samples))
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
    computed: Computed, failed: dict[int, str], tables: SlotTables, plan: StepPlan
) -> dict[int, str]:
    """Why rows of the plan failed, if they follow a grammar or are watched. failed: why, of those
    that sample and whose tokens were chosen."""
    if not computed.has_grammar and not computed.no_mask and not failed:
        return {}
    rows = plan.samples.nonzero()[0].tolist()
    why = {row: BANNED_ALL for row in rows if tables.grammars.has[plan.slots[row]]}
    said = {**computed.no_mask, **failed}
    return why | {rows[place]: message for place, message in said.items()}


def _rows_of(candidates: Candidates, rows: Bools) -> Candidates:
    return Candidates(
        ids=candidates.ids[rows],
        scores=candidates.scores[rows],
        logprobs=candidates.logprobs[rows],
        ends=candidates.ends[rows] if len(candidates.ends) else candidates.ends,
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
