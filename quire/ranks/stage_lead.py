"""StageLead: what rank 0 sends the ranks of a pipeline, and what it has still to do itself.

Rank 0 is in the last stage and runs a step later than it lets the other stages begin it. Knows
commands and links; of an executor, that it leads. Always holds: what rank 0 copies between blocks
of its own layers keeps its place among its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from quire.base.errors import DeviceLost
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute.native import NONE, TRUNK, Int32s
from quire.program.batch import NO_SLOTS, ForwardBatch
from quire.ranks.commands import Allocate, Command, CopyBlocks, Run, Stop, Touch
from quire.ranks.leading import Lead, LeadingExecutor
from quire.ranks.stage_loads import StageLoads
from quire.ranks.stages import StageLinks


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that the other stages compute, and this one has to."""

    number: int
    batch: ForwardBatch


class LeadingStages(LeadingExecutor, Protocol):
    """The LeadingExecutor of a pipeline."""

    @property
    def lead(self) -> StageLead:
        """See LeadingExecutor."""


class StageLead(Lead):
    """A Lead with the stages before its own. layers: how many each stage has. loads: of the experts
    before its own stage."""

    def __init__(self, group: SharedMemoryRank, links: StageLinks, layers: tuple[int, ...]) -> None:
        super().__init__(group)
        self.links, self.layers = links, layers
        self.loads = StageLoads({}, ())
        self._num_begun = 0
        self._due: deque[_Begun | CopyBlocks] = deque()  # what this rank has still to do, in order

    def begin(self, batch: ForwardBatch) -> None:
        """Let the stages before begin a step."""
        if len(batch.late_slots):
            raise ValueError("late_slots: stages keep no tokens; their ids are needed")
        self._num_begun += 1
        command = Run(
            step=self._num_begun,
            segment=TRUNK,
            then=NONE,
            batch=replace(batch, sample_rows=NO_SLOTS),
            sample_rows=NO_SLOTS,
        )
        self._send_ahead(command)
        self._due.append(_Begun(self._num_begun, batch))

    def catch_up(self, batch: ForwardBatch, copy: Callable[[Int32s, Int32s], None]) -> int:
        """Do what comes before a step; return the step's number. Steps before it that were never
        run here had failed."""
        if not any(isinstance(due, _Begun) and due.batch is batch for due in self._due):
            self.begin(batch)
        while True:
            due = self._due.popleft()
            if isinstance(due, CopyBlocks):
                copy(due.copy_from, due.copy_to)
            elif due.batch is batch:
                self.links.begin(due.number)
                return due.number

    def begin_drafts(self, run: Run, copy: Callable[[Int32s, Int32s], None]) -> int:
        """Let the stages before begin a pass of the first layers, and do what comes before it here;
        return its number. No step that was begun is still to be run."""
        self._num_begun += 1
        batch = replace(run.batch, sample_rows=NO_SLOTS)
        ahead = replace(run, step=self._num_begun, then=NONE, batch=batch, sample_rows=NO_SLOTS)
        self._send_ahead(ahead)
        while self._due:
            if isinstance(due := self._due.popleft(), CopyBlocks):
                copy(due.copy_from, due.copy_to)
        self.links.begin(self._num_begun)
        return self._num_begun

    def copy(self, command: CopyBlocks) -> None:
        """Copy blocks in all stages, here when its turn has come."""
        self._send_ahead(command)
        self._due.append(command)

    def allocate(self, command: Allocate) -> None:
        """Let the stages before make their caches; forget what was due."""
        self._due.clear()
        self._send_ahead(command)

    def touch(self, layer: int, first: int, last: int) -> int | None:
        """Touch blocks of a layer of the whole model; return its number here if it is of the last
        stage."""
        stage = 0
        while layer >= self.layers[stage]:
            layer -= self.layers[stage]
            stage += 1
        if stage == len(self.layers) - 1:
            return layer
        self._send_ahead(Touch(layer=layer, first=first, last=last), stage=stage)
        return None

    def stop(self) -> None:
        """Let all stages stop."""
        if not self.group.native.is_aborted:
            self.loads.end()
            with suppress(DeviceLost):  # it is over in any case
                self._send_ahead(Stop())
        super().stop()

    def _send_ahead(self, command: Command, stage: int | None = None) -> None:
        """Send a command to the ranks of one stage before, or of all."""
        message, members = self.wire.encode(command), self.group.native.members
        try:
            for rank, link in self.links.to_early.items():
                if stage is None or rank // members - 1 == stage:
                    link.send(message)
        except DeviceLost as error:
            raise self.lost(str(error)) from error
