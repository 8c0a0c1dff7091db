"""Scores of prompts on their way from step results to sequences.

A prompt is scored in as many parts as it was computed in; a sequence keeps them until its first
output reports them together. Decides nothing and knows no blocks. Always holds: a sequence's parts
are of consecutive positions, each scored once, whatever happened to the request between them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.base.errors import WorkerError
from quire.base.records import PromptScores, StepPlan, StepResult
from quire.scheduler.running_batch import Index
from quire.scheduler.sequence import SequenceState


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
        width = sequence.request.sampling.prompt_logprobs
        sequence.keep_scores(
            PromptScores(  # copies: a view would keep the scores of other rows alive
                logprobs=scores.logprobs[part].copy(),
                ranks=scores.ranks[part].copy(),
                top_ids=scores.top_ids[part, :width].copy(),
                top_logprobs=scores.top_logprobs[part, :width].copy(),
            )
        )
