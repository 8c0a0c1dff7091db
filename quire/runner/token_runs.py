"""TokenRuns: the run of tokens that each row of a plan yields.

A row yields a token per sampled position, in order, until one ends its run: a position without a
token is left out with all after it; forced tokens follow the position they were found at, and
nothing follows them; nor does anything follow a token that completes the answer. What is left out
would be chosen again by a later step, so that runs are never part of an answer's definition.
Letters: N rows of the plan, R sampled positions, E tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_BOOLS, Bools, Candidates
from quire.runner.batch_builder import SampledRows
from quire.runner.grammar_rows import Follow
from quire.runner.verification import loops
from quire.sampling.batch import TokenChoice

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
_Number = TypeVar("_Number", np.int32, np.float32, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRuns:
    """The runs of a plan's rows: counts [N], and per token [E] its slot, position and choice.

    stays: whether the slot still has the request of the plan; None: all have. complete: as in
    StepResult.
    """

    counts: Int32s
    slots: Index
    positions: Int32s
    stays: Bools | None
    choice: TokenChoice
    listed: Float32s
    complete: Bools = field(default_factory=lambda: NO_BOOLS)


def cut_runs(
    runs: TokenRuns, sampled: SampledRows, failed: Bools | None, follow: Follow
) -> TokenRuns:
    """Return `runs`, which have one token per sampled position, ended where they must end.

    failed: rows without a run [N]; None: none. follow: forced tokens and complete answers, by
    sampled position.
    """
    if not (follow.forced or follow.complete):
        return _leading_runs(runs, failed)
    rows, has_token = sampled.rows, runs.choice.token_ids >= 0
    ends_after = np.zeros(len(rows), np.int64)
    ends_after[[*follow.forced, *follow.complete]] = 1
    ends = ~has_token + ends_after
    num_before = np.cumsum(ends) - ends  # ends before each position, of all rows
    is_kept = has_token & (num_before == num_before[sampled.firsts()])
    if failed is not None:
        is_kept &= ~failed[rows]
    lengths = is_kept.astype(np.int32)
    for place, ids in follow.forced.items():
        lengths[place] *= 1 + len(ids)
    source = np.repeat(np.arange(len(rows)), lengths)  # [E]
    begins = np.cumsum(lengths) - lengths
    choice = _choice_at(runs.choice, source)
    for place, ids in follow.forced.items():
        if lengths[place]:
            choice.token_ids[begins[place] + 1 : begins[place] + lengths[place]] = ids
    offsets = np.arange(len(source)) - begins[source]
    return TokenRuns(
        counts=np.bincount(rows, lengths, len(runs.counts)).astype(np.int32),
        slots=runs.slots[source],
        positions=(runs.positions[source] + offsets).astype(np.int32),
        stays=None if runs.stays is None else runs.stays[source],
        choice=choice,
        listed=runs.listed[source],
        complete=_complete(rows[[place for place in follow.complete if is_kept[place]]], runs),
    )


def _leading_runs(runs: TokenRuns, failed: Bools | None) -> TokenRuns:
    """Return `runs` up to the first position without a token."""
    token_ids, sample_counts = runs.choice.token_ids, runs.counts
    if failed is None:
        failed = np.zeros(len(sample_counts), np.bool_)
    counts, kept = np.empty_like(sample_counts), np.empty(len(token_ids), np.intp)
    source = kept[: loops.leading_tokens(sample_counts, token_ids, failed, counts, kept)]
    return TokenRuns(
        counts=counts,
        slots=runs.slots[source],
        positions=runs.positions[source],
        stays=None if runs.stays is None else runs.stays[source],
        choice=_choice_at(runs.choice, source),
        listed=runs.listed[source],
    )


def first_messages(messages: Mapping[int, str], sampled: SampledRows) -> dict[int, str]:
    """Return messages by sampled position as messages by row.

    Only the first position of a row can fail it.
    """
    rows, firsts = sampled.rows, sampled.firsts()
    return {int(rows[place]): why for place, why in messages.items() if firsts[place] == place}


def _complete(rows: Index, runs: TokenRuns) -> Bools:
    if not len(rows):
        return NO_BOOLS
    complete = np.zeros(len(runs.counts), np.bool_)
    complete[rows] = True
    return complete


def _choice_at(choice: TokenChoice, index: Index) -> TokenChoice:
    return TokenChoice(
        token_ids=choice.token_ids[index],
        logprobs=_at(choice.logprobs, index),
        top_ids=_at(choice.top_ids, index),
        top_logprobs=_at(choice.top_logprobs, index),
        mus=_at(choice.mus, index),
        candidates=None if choice.candidates is None else _candidates_at(choice.candidates, index),
    )


def _candidates_at(candidates: Candidates, index: Index) -> Candidates:
    return Candidates(
        ids=candidates.ids[index],
        scores=candidates.scores[index],
        logprobs=candidates.logprobs[index],
        ends=_at(candidates.ends, index),
    )


def _at(values: NDArray[_Number], index: Index) -> NDArray[_Number]:
    """Return values[index]; an array that no row has stays empty."""
    return values[index] if len(values) else values
