"""The plain twins of the native loops over drafts (native/src/drafts.cc), for tests.

Letters: N rows of a plan, D drafts of all, R sampled positions, E tokens of a result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


def put_drafts(
    slots: Int32s, firsts: Int32s, counts: Int32s, ids: Int32s, tokens: Int32s, lengths: Int32s
) -> None:
    """Write the drafts of each row into tokens[slots[i]], from position firsts[i] on.

    The first counts[0] of `ids` [D] are those of row 0. lengths: known tokens by slot.
    """
    rows, positions = _places(firsts, counts)
    tokens[slots[rows], positions] = ids
    has = counts > 0
    lengths[slots[has]] = np.maximum(lengths[slots[has]], (firsts + counts)[has])


def take_back_drafts(
    slots: Int32s,
    firsts: Int32s,
    counts: Int32s,
    ids: Int32s,
    stays: Bools,
    tokens: Int32s,
    lengths: Int32s,
) -> None:
    """Undo put_drafts in the rows that stay."""
    rows, positions = _places(firsts, counts)
    kept = stays[rows]
    tokens[slots[rows[kept]], positions[kept]] = 0
    has = stays & (counts > 0)
    lengths[slots[has]] = firsts[has]


def drop_after_mismatch(
    counts: Int32s, ids: Int32s, sample_counts: Int32s, token_ids: Int32s
) -> None:
    """Set the sampled tokens [R] of each row behind the first that differs from its draft to -1.

    The last counts[i] of a row's sample_counts[i] positions have drafts; a draft is compared with
    the token sampled before its position.
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(sample_counts)
    places = (ends - 1 - counts)[rows] + _within(counts, rows)
    differs = np.zeros(len(token_ids), np.intp)
    differs[places] = token_ids[places] != ids
    before = np.cumsum(differs) - differs  # mismatches before each position, of all rows
    of_row = np.repeat(before[np.minimum(ends - sample_counts, len(before) - 1)], sample_counts)
    token_ids[before > of_row] = -1


def count_accepted(
    counts: Int32s, ids: Int32s, token_counts: Int32s, token_ids: Int32s, accepted: Int32s
) -> None:
    """Fill accepted [N]: how many leading drafts of each row are the tokens of its run.

    The first token_counts[0] of token_ids [E] are those of row 0.
    """
    ends, run_ends = np.cumsum(counts), np.cumsum(token_counts)
    for row in range(len(counts)):
        drafts = ids[ends[row] - counts[row] : ends[row]]
        run = token_ids[run_ends[row] - token_counts[row] : run_ends[row]][: len(drafts)]
        same = run == drafts[: len(run)]
        accepted[row] = len(same) if same.all() else int(same.argmin())


def leading_tokens(
    sample_counts: Int32s,
    token_ids: Int32s,
    failed: Bools,
    counts: Int32s,
    kept: NDArray[np.intp],
) -> int:
    """Find the leading tokens of each row, those before its first -1; a failed row has none.

    Fills counts [N] with how many these are and `kept` with their places among token_ids [R];
    returns how many there are of all rows.
    """
    rows = np.repeat(np.arange(len(sample_counts)), sample_counts)
    ends = (token_ids < 0).astype(np.intp)
    before = np.cumsum(ends) - ends  # missing tokens before each position, of all rows
    first = np.searchsorted(rows, rows)
    is_kept = (ends == 0) & (before == before[first]) & ~failed[rows]
    counts[:] = np.bincount(rows, is_kept, len(counts))
    places = is_kept.nonzero()[0]
    kept[: len(places)] = places
    return len(places)


def _places(firsts: Int32s, counts: Int32s) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the row and the position of each draft [D]."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, firsts[rows] + _within(counts, rows)


def _within(counts: Int32s, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return 0, 1, ... for each row's drafts."""
    within: NDArray[np.intp] = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    return within
