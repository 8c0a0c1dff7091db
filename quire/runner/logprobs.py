"""Scores of tokens the runner knows already: of prompts, and of ids listed beside generated ones.

Prompts are scored as their positions are computed: the head runs on slices of the step's rows, and
of each slice's logits only a few numbers a row are kept. So no more logits are in memory than for
token choice, however long the prompts. Prompts that are pooled go with them (pooling.py). Knows
slots and positions; decides nothing. Letters: N rows of the plan, S scored prompt tokens, R rows
that sample, L listed ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.rare_records import PooledSums, only_pooled
from quire.base.records import NO_INTS, PromptScores, StepPlan
from quire.execute.executor import Executor
from quire.program.batch import ForwardBatch
from quire.runner.pooling import POOL_FAILED, pool_prompts
from quire.runner.slot_tables import SlotTables
from quire.sampling.parts import ragged
from quire.sampling.scoring import FAILED, ScoreBatch, Scores

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
_Number = TypeVar("_Number", np.int32, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """What rows of a plan scored: row i has counts[i] of the entries of `scores`.

    failed: rows with logits that are no distribution, or hidden values that cannot be pooled; they
    have no entries. messages: of those that are pooled, by row.
    """

    counts: Int32s  # [N]
    failed: Bools  # [N]
    scores: PromptScores
    messages: Mapping[int, str] = field(default_factory=dict)


def scores_some(plan: StepPlan, tables: SlotTables) -> bool:
    """Return whether rows of `plan` compute what their requests want scored."""
    return bool(_to_score(plan, tables)[1].any())


def score_prompts(
    plan: StepPlan,
    batch: ForwardBatch,
    tables: SlotTables,
    executor: Executor,
    *,
    max_samples: int,
) -> ScoredRows | None:
    """Score the prompt positions of `plan` after its trunk has run; None: none requested."""
    if not tables.num_scoring:
        return None
    slots = plan.slots
    firsts, counts = _to_score(plan, tables)
    is_pooled = tables.pooled[slots]
    if counts[is_pooled].any():
        of_pooled = np.where(is_pooled, counts, 0)
        pooled = pool_prompts(plan, batch, firsts, of_pooled, executor, max_samples=max_samples)
        messages = dict.fromkeys(pooled.failed.nonzero()[0].tolist(), POOL_FAILED)
        counts = np.where(is_pooled, 0, counts)
        scored = _scored(plan, batch, tables, executor, firsts, counts, max_samples)
        return _with_pooled(scored, pooled.sums, pooled.failed, messages)
    return _scored(plan, batch, tables, executor, firsts, counts, max_samples)


def _scored(
    plan: StepPlan,
    batch: ForwardBatch,
    tables: SlotTables,
    executor: Executor,
    firsts: Int32s,
    counts: Int32s,
    max_samples: int,
) -> ScoredRows | None:
    """Score counts[i] positions of row i from firsts[i] on; None where there are none."""
    slots = plan.slots
    row_of = np.repeat(np.arange(len(slots)), counts)  # [S]
    if not len(row_of):
        return None
    within = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]
    positions = firsts[row_of] + within
    token_rows = (batch.seq_starts[:-1] - plan.starts)[row_of] + positions
    of_prompts = replace(batch, sample_rows=token_rows.astype(np.int32))
    targets = tables.tokens.tokens[slots[row_of], positions + 1]
    num_top = tables.num_prompt_logprobs[slots[row_of]]
    parts = []
    for first in range(0, len(row_of), max_samples):
        some = slice(first, min(first + max_samples, len(row_of)))
        logits = executor.run_head(of_prompts, first, some.stop - first)
        parts.append(_with_all(logits, targets[some], num_top[some], executor))
    return _kept(parts, counts, row_of)


def _with_all(logits: Float32s, targets: Int32s, num_top: Int32s, executor: Executor) -> Scores:
    """Score a slice of rows. num_top -1: top_logprobs has the whole vocabulary, in order of ids."""
    has_all, listed = num_top < 0, NO_INTS
    if has_all.any():
        listed = np.arange(logits.shape[1], dtype=np.int32)
    starts = np.zeros(1 + len(targets), np.int32)
    np.cumsum(has_all * len(listed), out=starts[1:])
    score_batch = ScoreBatch(
        targets=targets,
        num_top=np.maximum(num_top, 0),
        listed_starts=starts,
        listed_ids=np.tile(listed, int(has_all.sum())),
    )
    found = executor.score(logits, score_batch)
    if not len(listed):
        return found
    table = stacked(
        [found.top_logprobs, np.empty((0, len(listed)), np.float32)], np.float32(np.nan)
    )
    table[has_all] = found.listed_logprobs.reshape(-1, len(listed))
    return replace(found, top_logprobs=table)


def listed_logprobs(
    logits: Float32s, slots: Index, tables: SlotTables, executor: Executor
) -> Float32s:
    """Return log-probabilities of the ids that requests list, [R, L]; NaN beyond a row's list."""
    rows = tables.has_listed[slots].nonzero()[0]
    if not len(rows):
        return np.empty((len(slots), 0), np.float32)
    ids = [tables.listed_ids[slot] for slot in slots[rows]]
    if any(of_row[0] < 0 for of_row in ids):
        every = np.arange(logits.shape[1], dtype=np.int32)
        ids = [every if of_row[0] < 0 else of_row for of_row in ids]
    listed = ragged(ids, np.arange(len(rows)), len(rows))
    score_batch = ScoreBatch(
        targets=np.full(len(rows), -1, np.int32),
        num_top=np.zeros(len(rows), np.int32),
        listed_starts=listed.starts,
        listed_ids=listed.ids,
    )
    found = executor.score(logits if len(rows) == len(slots) else logits[rows], score_batch)
    lengths = np.zeros(len(slots), np.int32)
    lengths[rows] = np.diff(listed.starts)
    table = np.full((len(slots), lengths.max()), np.nan, np.float32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = found.listed_logprobs
    return table


def stacked(parts: list[NDArray[_Number]], fill: _Number) -> NDArray[_Number]:
    """Return tables [rows, width] one below the other, as wide as the widest, filled up."""
    width = max((part.shape[1] for part in parts), default=0)
    table = np.full((sum(map(len, parts)), width), fill, fill.dtype)
    row = 0
    for part in parts:
        table[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return table


def _with_pooled(
    scored: ScoredRows | None, sums: PooledSums, failed: Bools, messages: Mapping[int, str]
) -> ScoredRows:
    """Return the scores of a plan's rows with its pooled rows beside them."""
    if scored is None:
        counts = np.zeros(len(failed), np.int32)
        return ScoredRows(counts=counts, failed=failed, scores=only_pooled(sums), messages=messages)
    return ScoredRows(
        counts=scored.counts,
        failed=scored.failed | failed,
        scores=replace(scored.scores, pooled=sums),
        messages=messages,
    )


def joined_scores(parts: Sequence[ScoredRows | None], sizes: Sequence[int]) -> ScoredRows | None:
    """Join the scores of several plans. sizes: rows of each plan."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    counts = [
        np.zeros(n, np.int32) if p is None else p.counts for p, n in zip(parts, sizes, strict=True)
    ]
    failed = [
        np.zeros(n, np.bool_) if p is None else p.failed for p, n in zip(parts, sizes, strict=True)
    ]
    return ScoredRows(
        counts=np.concatenate(counts),
        failed=np.concatenate(failed),
        scores=PromptScores(
            logprobs=np.concatenate([part.scores.logprobs for part in found]),
            ranks=np.concatenate([part.scores.ranks for part in found]),
            top_ids=stacked([part.scores.top_ids for part in found], np.int32(-1)),
            top_logprobs=stacked([part.scores.top_logprobs for part in found], np.float32(np.nan)),
            pooled=_joined_sums(parts, sizes),
        ),
        messages={
            first + row: message
            for part, first in zip(parts, _firsts(sizes), strict=True)
            for row, message in ({} if part is None else part.messages).items()
        },
    )


def _joined_sums(parts: Sequence[ScoredRows | None], sizes: Sequence[int]) -> PooledSums | None:
    found = [
        (part.scores.pooled, first)
        for part, first in zip(parts, _firsts(sizes), strict=True)
        if part is not None and part.scores.pooled is not None and len(part.scores.pooled.rows)
    ]
    if not found:
        return None
    return PooledSums(
        rows=np.concatenate([sums.rows + np.int32(first) for sums, first in found]),
        counts=np.concatenate([sums.counts for sums, _ in found]),
        sums=np.concatenate([sums.sums for sums, _ in found]),
    )


def _firsts(sizes: Sequence[int]) -> list[int]:
    """Return the first row of each plan among the joined rows. sizes: rows of each plan."""
    return [sum(sizes[:at]) for at in range(len(sizes))]


def _to_score(plan: StepPlan, tables: SlotTables) -> tuple[Int32s, Int32s]:
    """Return the first position that each row scores or pools, and how many."""
    slots = plan.slots
    firsts = np.maximum(plan.starts, tables.scores_from[slots])
    last = tables.tokens.prompt_lengths[slots] - 1 + tables.pooled[slots]
    ends = np.minimum(plan.starts + plan.counts, last)
    return firsts, np.maximum(ends - firsts, 0)


def _kept(parts: list[Scores], counts: Int32s, row_of: NDArray[np.intp]) -> ScoredRows:
    """Return slices of the head put together, without the entries of rows that failed."""
    ranks = np.concatenate([part.ranks for part in parts])
    logprobs = np.concatenate([part.logprobs for part in parts])
    top_ids = stacked([part.top_ids for part in parts], np.int32(-1))
    top_logprobs = stacked([part.top_logprobs for part in parts], np.float32(np.nan))
    failed = np.zeros(len(counts), np.bool_)
    failed[row_of[ranks == FAILED]] = True
    if failed.any():
        kept = ~failed[row_of]
        counts = np.where(failed, 0, counts)
        ranks, logprobs = ranks[kept], logprobs[kept]
        top_ids, top_logprobs = top_ids[kept], top_logprobs[kept]
    scores = PromptScores(
        logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs
    )
    return ScoredRows(counts=counts.astype(np.int32), failed=failed, scores=scores)
