"""SampledRows: the sampled positions of a plan, and what their requests need in every step.

Most steps have the rows of the step before, one position further. KeptRows returns the same record
then, so that a steady step looks nothing up. Letters: N rows of the plan, R sampled positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Bools, StepPlan
from quire.runner.slot_tables import SlotTables

Int32s = NDArray[np.int32]
Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The R sampled positions of a plan, in the order of its rows.

    rows: their rows in the plan. offsets: the position of the sampled token less the first position
    of its row. tenancy and changes: of the slots and of the tables, when the plan was applied.
    slot_range: the slots, if they follow each other. is_decode: each row of the plan computes one
    position and samples it. needs_host: a row needs logits or a state on the host.
    """

    rows: Index  # [R]
    slots: Index  # [R]
    offsets: Int32s  # [R]
    tenancy: NDArray[np.int64]  # [R]
    changes: int
    slot_range: slice | None
    is_decode: bool
    has_grammar: bool
    has_penalty: bool
    needs_host: bool

    def __len__(self) -> int:
        """Return R."""
        return len(self.slots)

    def positions(self, plan: StepPlan) -> Int32s:
        """Return the positions of the sampled tokens [R]."""
        if self.is_decode:
            return plan.starts + self.offsets
        return plan.starts[self.rows] + self.offsets

    def token_rows(self, seq_starts: Int32s) -> Int32s:
        """Return the token rows to sample [R], given the first token row of each row [N + 1]."""
        return seq_starts[self.rows] + self.offsets - np.int32(1)

    def firsts(self) -> Index:
        """Return for each sampled position the first one of its row [R]."""
        return np.searchsorted(self.rows, self.rows)

    def stays(self, tables: SlotTables) -> Bools | None:
        """Return which slots still have the request of the plan [R]; None: all."""
        if tables.changes == self.changes:
            return None
        stays: Bools = tables.tenancy[self.slots] == self.tenancy
        return stays


def sampled_rows(plan: StepPlan, tables: SlotTables) -> SampledRows:
    """Return the sampled positions of a plan that was applied to `tables`."""
    counts, sample_counts = plan.counts, plan.sample_counts
    num_rows = len(plan.slots)
    rows = np.repeat(np.arange(num_rows), sample_counts)
    slots = plan.slots[rows].astype(np.intp)
    # Of its row's sampled positions, which one each is.
    places = np.arange(len(rows)) - (np.cumsum(sample_counts) - sample_counts)[rows]
    offsets = (counts - sample_counts + 1)[rows] + places
    return SampledRows(
        rows=rows,
        slots=slots,
        offsets=offsets.astype(np.int32),
        tenancy=tables.tenancy[slots],
        changes=tables.changes,
        slot_range=_as_range(slots),
        is_decode=bool((counts == 1).all() and (sample_counts == 1).all()),
        has_grammar=bool(tables.grammars.has[slots].any()),
        has_penalty=bool(tables.has_penalty[slots].any()),
        needs_host=bool(
            tables.has_listed[slots].any()
            or tables.rare.uses[slots].any()
            or tables.num_candidates[slots].any()
        ),
    )


def _as_range(slots: Index) -> slice | None:
    if not len(slots) or (np.diff(slots) != 1).any():
        return None
    return slice(int(slots[0]), int(slots[-1]) + 1)


class KeptRows:
    """sampled_rows, made anew only where the rows or the tables changed."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._key: tuple[int, bytes, bytes, bytes] | None = None
        self._rows: SampledRows | None = None

    def of(self, plan: StepPlan) -> SampledRows:
        """See sampled_rows."""
        key = (
            self._tables.changes,
            plan.slots.tobytes(),
            plan.counts.tobytes(),
            plan.sample_counts.tobytes(),
        )
        if self._rows is None or key != self._key:
            self._key, self._rows = key, sampled_rows(plan, self._tables)
        return self._rows
