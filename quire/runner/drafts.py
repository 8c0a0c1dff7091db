"""Drafts of a plan: where they are, and which sampled tokens stand behind them.

Verification is one comparison. The token sampled at a position is a function of the logits and of
noise keyed by (seed, stream, position, token id), so it is the token that a single step would have
sampled if all tokens before it are those of the answer. A run therefore stands up to and including
the first sampled token that differs from the draft at its position, at any temperature.
Letters: N rows of the plan, D drafts, R sampled positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.records import StepPlan
from quire.base.token_table import TokenTable

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


class DraftPositions(NamedTuple):
    """Of each draft: its row in the plan, its slot, and its position. All [D]."""

    rows: Index
    slots: Index
    positions: Int32s


def draft_positions(plan: StepPlan) -> DraftPositions:
    """Return where the drafts of a plan are. The plan has at least one."""
    counts = plan.draft_counts
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = (plan.starts + plan.counts - counts)[rows] + _within(counts, rows)
    return DraftPositions(rows, plan.slots[rows].astype(np.intp), positions.astype(np.int32))


def drop_after_mismatch(plan: StepPlan, token_ids: Int32s) -> None:
    """Set the sampled tokens [R] behind the first one that differs from its draft to -1."""
    counts, sample_counts = plan.draft_counts, plan.sample_counts
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(sample_counts)
    places = (ends - 1 - counts)[rows] + _within(counts, rows)
    differs = np.zeros(len(token_ids), np.intp)
    differs[places] = token_ids[places] != plan.draft_ids
    before = np.cumsum(differs) - differs  # mismatches before each position, of all rows
    of_row = np.repeat(before[np.minimum(ends - sample_counts, len(before) - 1)], sample_counts)
    token_ids[before > of_row] = -1


def put_drafts(plan: StepPlan, tokens: TokenTable) -> None:
    """Append the drafts of a plan to the known tokens, until `take_back_drafts`."""
    _, slots, positions = draft_positions(plan)
    tokens.put(slots, positions, plan.draft_ids)


def take_back_drafts(
    plan: StepPlan, tokens: TokenTable, sampled_rows: Index, stays: Bools | None
) -> None:
    """Remove the drafts of a plan from the table.

    stays: by sampled position, in sampled_rows, whether the slot still has the request of the plan;
    None: all have.
    """
    rows, slots, positions = draft_positions(plan)
    row_stays = np.ones(len(plan.slots), np.bool_)
    if stays is not None:
        row_stays[sampled_rows] = stays
    kept = row_stays[rows]
    lengths = (plan.starts + plan.counts - plan.draft_counts)[rows]
    tokens.tokens[slots[kept], positions[kept]] = 0
    tokens.lengths[slots[kept]] = lengths[kept]


def _within(counts: Int32s, rows: Index) -> Index:
    """Return 0, 1, ... for each row's drafts."""
    within: Index = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    return within
