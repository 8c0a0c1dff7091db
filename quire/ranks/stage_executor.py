"""StageExecutor: the native executor of a rank of a pipeline; PipelineExecutor, that of rank 0.

A stage runs its layers of a step as soon as it has the command and the rows of the stage before.
Rank 0 is in the last stage and runs a step later than it sends it: `begin_trunk` lets the other
stages begin, and run_trunk does the rest. So the stages compute different steps at the same time.
Knows no process and no plans. Always holds: every rank runs the steps in the order in which they
were begun; what rank 0 copies between blocks of its own layers keeps its place among its steps; a
step that one stage rejects, all stages after it reject.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from quire.base.errors import DeviceLost
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute.executor import ExecutorOptions
from quire.execute.native import NONE, TRUNK, Int32s
from quire.program.batch import NO_SLOTS, ForwardBatch
from quire.program.program import Program
from quire.ranks.commands import Command, CopyBlocks, Run, Stop, Touch
from quire.ranks.rank_executor import MirroredExecutor, RankExecutor
from quire.ranks.stages import StageLinks
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that the other stages compute, and this one has to."""

    number: int
    batch: ForwardBatch


class StageExecutor(RankExecutor):
    """A RankExecutor of a rank above 0, with the links its rows go through."""

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        links: StageLinks,
        **more: Any,
    ) -> None:
        super().__init__(program, checkpoint, options, group, **more)
        self.links = links
        self._native.set_links(*links.ends)

    def do(self, command: Command) -> None:
        """Do what rank 0 does, or will do."""
        if not isinstance(command, Run):
            super().do(command)
            return
        self.links.begin(command.step)
        try:
            super().do(command)
        except ValueError:
            self.links.reject()
            raise


class PipelineExecutor(MirroredExecutor):
    """The Executor of rank 0. layers: how many each stage has; `tp` ranks are in each.
    early_experts: experts of each mixture before its own stage.

    A PipelinedExecutor (see quire/execute/executor.py).
    """

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        links: StageLinks,
        layers: tuple[int, ...],
        *,
        poison: bool = False,
    ) -> None:
        super().__init__(program, checkpoint, options, group, poison=poison)
        self.links, self.layers = links, layers
        self.num_layers = 0  # none are computed by themselves: see LayeredExecutor
        self._num_begun = 0
        self.early_experts: tuple[int, ...] = ()
        self._due: deque[_Begun | CopyBlocks] = deque()  # what this rank has still to do, in order
        self._native.set_links(*links.ends)

    @property
    def num_stages(self) -> int:
        """See PipelinedExecutor."""
        return len(self.layers)

    @property
    def expert_loads(self) -> list[list[int]]:
        """See NativeExecutor; zeros for the mixtures of other stages."""
        return [[0] * experts for experts in self.early_experts] + super().expert_loads

    def begin_trunk(self, batch: ForwardBatch) -> None:
        """See PipelinedExecutor."""
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

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Run the layers of this stage, and what was to be done before."""
        if not any(isinstance(due, _Begun) and due.batch is batch for due in self._due):
            self.begin_trunk(batch)
        self.step = self._catch_up(batch)
        self.links.begin(self.step)
        super().run_trunk(batch, head_rows=head_rows)

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """Raise: layers are not computed by themselves."""
        raise ValueError("stages of a pipeline compute no layers by themselves")

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor."""
        self._due.clear()
        super().allocate_cache(num_blocks, block_size)

    def _send_allocation(self, num_blocks: int, block_size: int) -> None:
        self._send_ahead(self.allocation(num_blocks, block_size))
        super()._send_allocation(num_blocks, block_size)

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """See Executor; layers are those of the whole model."""
        if self.has_whole_blocks:
            super().touch_blocks(layer, first, last)
            return
        stage = 0
        while layer >= self.layers[stage]:
            layer -= self.layers[stage]
            stage += 1
        if stage == self.num_stages - 1:
            super().touch_blocks(layer, first, last)
        else:
            self._send_ahead(Touch(layer=layer, first=first, last=last), stage=stage)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor; after the steps that were begun before."""
        if len(copy_from):
            command = CopyBlocks(copy_from=copy_from, copy_to=copy_to)
            self._send_ahead(command)
            self._due.append(command)

    @property
    def ops_done(self) -> int:
        """Operations finished so far by all ranks, modulo 2^32."""
        return self.group.native.progress

    @property
    def waited_ms(self) -> float:
        """See PipelinedExecutor."""
        return 0.0 if self.links.source is None else 1e-6 * self.links.source.native.waited_ns

    def close(self) -> None:
        """Let all stages stop; free threads and memory."""
        if not self.group.native.is_aborted:
            with suppress(DeviceLost):  # it is over in any case
                self._send_ahead(Stop())
        super().close()

    def _catch_up(self, batch: ForwardBatch) -> int:
        """Do what comes before a step that was begun; return its number. Steps before it that were
        never run here had failed."""
        while True:
            due = self._due.popleft()
            if isinstance(due, CopyBlocks):
                super().copy_blocks(due.copy_from, due.copy_to)
            elif due.batch is batch:
                return due.number

    def _send(self, command: Command) -> None:
        if self.group.native.members > 1:
            super()._send(command)

    def _send_ahead(self, command: Command, stage: int | None = None) -> None:
        """Send a command to the ranks of one stage before, or of all."""
        message, members = self._wire.encode(command), self.group.native.members
        try:
            for rank, link in self.links.to_early.items():
                if stage is None or rank // members - 1 == stage:
                    link.send(message)
        except DeviceLost as error:
            raise self.lost(str(error)) from error
