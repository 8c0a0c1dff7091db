"""Scores and pooled rows of prompts on their way from step results to sequences.

A prompt is scored in as many parts as it was computed in; a sequence keeps them until its first
output reports them together. Sums of pooled rows are integers and are added as they come. Decides
nothing and knows no blocks. Always holds: a sequence's parts are of consecutive positions, each
scored or pooled once, whatever happened to the request between them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.base.errors import WorkerError
from quire.base.rare_records import PooledSums, only_pooled
from quire.base.records import NO_FLOATS, NO_INTS, PromptScores, StepPlan, StepResult
from quire.scheduler.running_batch import Index
from quire.scheduler.sequence import SequenceState
from quire.scheduler.sequence_parts import PromptScoreParts


def keep_scores(
    plan: StepPlan,
    result: StepResult,
    rows: Index | None,
    sequence_in: Callable[[int], SequenceState],
) -> None:
    """Give each request its part of the scores in `result`.

    rows: the valid rows, None for all. Raises WorkerError where the scores do not fit the plan.
    """
    scores, counts = result.scores, result.score_counts
    if scores is None:
        return
    if scores.pooled is not None:
        _keep_sums(plan, scores.pooled, rows, sequence_in)
    if len(counts) != len(plan.slots) or counts.sum() != len(scores.logprobs):
        raise WorkerError(
            f"step {result.step} has {len(scores.logprobs)} scores, and counts of {len(counts)} "
            f"rows that sum to {counts.sum()}; the plan has {len(plan.slots)} rows"
        )
    firsts = np.cumsum(counts) - counts
    scored = counts.nonzero()[0] if rows is None else rows[counts[rows] > 0]
    for row in scored.tolist():
        sequence = sequence_in(int(plan.slots[row]))
        part = slice(int(firsts[row]), int(firsts[row] + counts[row]))
        width = sequence.request.sampling.prompt_logprobs or 0  # -1: all, in order of ids
        kept = sequence.scores
        if kept is None:
            raise WorkerError(
                f"request {sequence.request.request_id} was scored; it asks for no scores of its "
                "prompt, and the worker must not score it"
            )
        kept.parts.append(
            PromptScores(  # copies: a view would keep the scores of other rows alive
                logprobs=scores.logprobs[part].copy(),
                ranks=scores.ranks[part].copy(),
                top_ids=scores.top_ids[part, : max(width, 0)].copy(),
                top_logprobs=scores.top_logprobs[part, : None if width < 0 else width].copy(),
            )
        )
        kept.num_scored += int(counts[row])


def _keep_sums(
    plan: StepPlan,
    pooled: PooledSums,
    rows: Index | None,
    sequence_in: Callable[[int], SequenceState],
) -> None:
    valid = None if rows is None else frozenset(rows.tolist())
    for row, count, sums in zip(
        pooled.rows.tolist(), pooled.counts.tolist(), pooled.sums, strict=True
    ):
        if valid is not None and row not in valid:
            continue
        sequence = sequence_in(int(plan.slots[row]))
        kept = sequence.scores
        if kept is None or sequence.request.sampling.pooling is None:
            raise WorkerError(
                f"request {sequence.request.request_id} was pooled; it asks for no embedding, and "
                "the worker must not pool it"
            )
        kept.sums = sums.copy() if kept.sums is None else kept.sums + sums
        kept.num_scored += count


def _take_sums(sequence: SequenceState, kept: PromptScoreParts) -> PromptScores:
    """Return the sum of all pooled rows of a prompt. Raises WorkerError where some are missing."""
    if kept.num_scored != kept.end or kept.sums is None:
        raise WorkerError(
            f"request {sequence.request.request_id}: rows up to {kept.num_scored} of {kept.end} "
            "prompt tokens were pooled; the worker must pool each once"
        )
    sums, kept.sums, kept.were_taken = kept.sums, None, True
    count = kept.end if sequence.request.sampling.pooling == "mean" else 1
    return only_pooled(
        PooledSums(
            rows=np.zeros(1, np.int32), counts=np.array([count], np.int32), sums=sums[None, :]
        )
    )


def take_scores(sequence: SequenceState) -> PromptScores | None:
    """Return all scores of a prompt, once; None later, or where none were asked for.

    Raises WorkerError where positions are missing.
    """
    kept = sequence.scores
    if kept is None or not sequence.scores_prompt or kept.were_taken:
        return None
    if sequence.request.sampling.pooling is not None:
        return _take_sums(sequence, kept)
    if kept.num_scored != sequence.num_prompt_tokens - 1:
        raise WorkerError(
            f"request {sequence.request.request_id}: {kept.num_scored} of "
            f"{sequence.num_prompt_tokens - 1} prompt tokens were scored; the worker must score "
            "each once"
        )
    parts, kept.parts, kept.were_taken = kept.parts, [], True
    if not parts:
        none = NO_INTS.reshape(0, 0), NO_FLOATS.reshape(0, 0)
        return PromptScores(
            logprobs=NO_FLOATS, ranks=NO_INTS, top_ids=none[0], top_logprobs=none[1]
        )
    return PromptScores(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
