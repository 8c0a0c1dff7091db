"""Drafts of a plan: put into the table of tokens, taken back, and compared with what was sampled.

Verification is one comparison. The token sampled at a position is a function of the logits and of
noise keyed by (seed, stream, position, token id), so it is the token that a single step would have
sampled if all tokens before it are those of the answer. A run therefore stands up to and including
the first sampled token that differs from the draft at its position, at any temperature.
The loops are native (native/src/drafts.cc); plain_drafts.py has their plain twins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.records import StepPlan
from quire.base.token_table import TokenTable

try:
    from quire import _native as loops
except ImportError:  # missing in installations with PyTorch only
    from quire.runner import plain_drafts as loops  # type: ignore[no-redef]

__all__ = ["drop_after_mismatch", "loops", "put_drafts", "take_back_drafts"]

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


def drop_after_mismatch(plan: StepPlan, token_ids: Int32s) -> None:
    """Set the sampled tokens [R] behind the first one that differs from its draft to -1."""
    loops.drop_after_mismatch(plan.draft_counts, plan.draft_ids, plan.sample_counts, token_ids)


def put_drafts(plan: StepPlan, tokens: TokenTable) -> None:
    """Append the drafts of a plan to the known tokens, until `take_back_drafts`."""
    counts = plan.draft_counts
    firsts = plan.starts + plan.counts - counts
    loops.put_drafts(plan.slots, firsts, counts, plan.draft_ids, tokens.tokens, tokens.lengths)


def take_back_drafts(
    plan: StepPlan, tokens: TokenTable, sampled_rows: Index, stays: Bools | None
) -> None:
    """Remove the drafts of a plan from the table.

    stays: by sampled position, in sampled_rows, whether the slot still has the request of the plan;
    None: all have.
    """
    counts = plan.draft_counts
    row_stays = np.ones(len(counts), np.bool_)
    if stays is not None:
        row_stays[sampled_rows] = stays
    firsts = plan.starts + plan.counts - counts
    loops.take_back_drafts(
        *(plan.slots, firsts, counts, plan.draft_ids, row_stays), tokens.tokens, tokens.lengths
    )
