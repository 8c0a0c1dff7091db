"""PlanBuilder: a step's plan while it is put together; Step: that, its budget, and what is paused.

Collects rows, admissions, table entries and copies, and joins them once. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import BlockCopies
from quire.base.records import NO_INTS, Admission, PartLayers, StepPlan
from quire.cache.manager import TableDeltas
from quire.scheduler.in_flight import InFlightPlan
from quire.scheduler.running_batch import Index, Int32s
from quire.scheduler.sequence import SequenceState
from quire.scheduler.step_budget import StepBudget

_NO_INDEX: Index = np.empty(0, np.intp)
_Rows = tuple[Index, Int32s, Int32s, Int32s, Int32s, Int32s, Int32s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Slots that take over tokens of others, the last tokens of slots, and blocks to copy.

    slots: of all members that run together and leave together. The others are as in StepPlan.
    """

    slots: frozenset[int]
    copy_from: Int32s
    copy_to: Int32s
    sources: Int32s = field(default_factory=lambda: NO_INTS)
    targets: Int32s = field(default_factory=lambda: NO_INTS)
    known_slots: Int32s = field(default_factory=lambda: NO_INTS)
    known_ids: Int32s = field(default_factory=lambda: NO_INTS)


_NO_DELTAS = TableDeltas(slots=NO_INTS, columns=NO_INTS, blocks=NO_INTS)
_NO_BRANCHES = Branches(slots=frozenset(), copy_from=NO_INTS, copy_to=NO_INTS)


@dataclass(slots=True, kw_only=True)
class Step:
    """What the parts of the scheduler share while a step is put together.

    paused: slots of running requests that are left out. deferred: slots left out for an urgent
    prompt, or left to another plan, while others advance. is_urgent: there is such a prompt; it may
    take what it wants. has_room: whether there were blocks for every row that needed some.
    yielding: running requests with prompts that rank behind a waiting one and get tokens after it.
    """

    builder: PlanBuilder
    budget: StepBudget
    now_ms: float
    paused: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    is_urgent: bool = False
    has_room: bool = True
    yielding: list[SequenceState] = field(default_factory=list)


class PlanBuilder:
    """An empty plan for `step`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.admissions: list[Admission] = []
        self.deltas: list[TableDeltas] = []
        self._copies: list[tuple[Int32s, Int32s]] = []
        self._rows: list[_Rows] = []
        self._tier_copies: BlockCopies | None = None
        self._branches: list[Branches] = []
        self._layers: PartLayers | None = None
        self._draft_counts = self._draft_ids = NO_INTS

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._rows) or self._layers is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do: branches and copies may go without rows."""
        return not self.has_rows and not self._branches and self._tier_copies is None

    def add_rows(
        self,
        index: Index,
        slots: Int32s,
        starts: Int32s,
        counts: Int32s,
        ends: Int32s,
        store_from: Int32s,
        sample_counts: Int32s,
    ) -> None:
        """Add rows behind those already there. index and slots are the same, ends are the sums."""
        self._rows.append((index, slots, starts, counts, ends, store_from, sample_counts))

    def set_drafts(self, rows: _Rows, counts: Int32s, ids: Int32s) -> None:
        """Put `rows` in place of those added: counts[i] of their last positions have drafts, the
        next of `ids`."""
        self._rows, self._draft_counts, self._draft_ids = [rows], counts, ids

    def set_layers(self, layers: PartLayers) -> None:
        """Set the layers of a prompt chunk that are computed beside the rows."""
        self._layers = layers

    def add_admission(self, admission: Admission) -> None:
        """Add a request that takes a slot."""
        self.admissions.append(admission)

    def add_deltas(self, deltas: TableDeltas) -> None:
        """Add new table entries."""
        self.deltas.append(deltas)

    def add_copies(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """Add blocks to copy before the rows are computed."""
        self._copies.append((copy_from, copy_to))

    def set_tier_copies(self, copies: BlockCopies | None) -> None:
        """Set the blocks that move to a tier or come from one."""
        self._tier_copies = copies

    def add_branches(self, branches: Branches) -> None:
        """Add the branches of a group; they are left out if it leaves its slots before the end."""
        self._branches.append(branches)

    def finish(self, retired: list[int]) -> InFlightPlan:
        """Return the plan, ready to be sent. retired: slots given back since the last one."""
        index, slots, starts, counts, ends, store_from, sample_counts = self.joined_rows()
        branched = self._branched(retired) if self._branches else _NO_BRANCHES
        deltas, copies = _joined_deltas(self.deltas), self._copies
        plan = StepPlan(
            step=self.step,
            retired=np.array(retired, np.int32) if retired else NO_INTS,
            admissions=tuple(self.admissions),
            table_slots=deltas.slots,
            table_columns=deltas.columns,
            table_blocks=deltas.blocks,
            copy_from=_join([source for source, _ in copies]) if copies else NO_INTS,
            copy_to=_join([target for _, target in copies]) if copies else NO_INTS,
            tier_copies=self._tier_copies,
            branch_from=branched.sources,
            branch_to=branched.targets,
            known_slots=branched.known_slots,
            known_ids=branched.known_ids,
            slots=slots,
            starts=starts,
            counts=counts,
            store_from=store_from,
            sample_counts=sample_counts,
            draft_counts=self._draft_counts,
            draft_ids=self._draft_ids,
            layers=self._layers,
        )
        return InFlightPlan(plan=plan, index=index, ends=ends, branched=branched.slots)

    def _branched(self, retired: list[int]) -> Branches:
        """Return all branches as one, without those of groups that have left their slots."""
        branches = [one for one in self._branches if one.slots.isdisjoint(retired)]
        self._copies += [(one.copy_from, one.copy_to) for one in branches]
        return Branches(
            slots=frozenset().union(*(one.slots for one in branches)),
            copy_from=NO_INTS,
            copy_to=NO_INTS,
            sources=_join([one.sources for one in branches]),
            targets=_join([one.targets for one in branches]),
            known_slots=_join([one.known_slots for one in branches]),
            known_ids=_join([one.known_ids for one in branches]),
        )

    def joined_rows(self) -> _Rows:
        """Return the rows added so far as one."""
        if len(self._rows) == 1:
            return self._rows[0]
        if not self._rows:
            return _NO_INDEX, NO_INTS, NO_INTS, NO_INTS, NO_INTS, NO_INTS, NO_INTS
        index, slots, starts, counts, ends, store_from, sample_counts = zip(
            *self._rows, strict=True
        )
        return (
            np.concatenate(index),
            np.concatenate(slots),
            np.concatenate(starts),
            np.concatenate(counts),
            np.concatenate(ends),
            np.concatenate(store_from),
            np.concatenate(sample_counts),
        )


def _joined_deltas(deltas: list[TableDeltas]) -> TableDeltas:
    if len(deltas) == 1:
        return deltas[0]
    if not deltas:
        return _NO_DELTAS
    return TableDeltas(
        slots=np.concatenate([part.slots for part in deltas]),
        columns=np.concatenate([part.columns for part in deltas]),
        blocks=np.concatenate([part.blocks for part in deltas]),
    )


def _join(parts: list[NDArray[np.int32]]) -> Int32s:
    if not parts:
        return NO_INTS
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
