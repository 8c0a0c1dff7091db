"""StageExecutor: the native executor of a rank of a pipeline; PipelineExecutor, that of rank 0.

A stage runs its layers of a step as soon as it has the command and the rows of the stage before.
Rank 0 is in the last stage and runs a step later than it sends it: `begin_trunk` lets the other
stages begin, and run_trunk does the rest. So the stages compute different steps at the same time.
Knows no process and no plans. Always holds: every rank runs the steps in the order in which they
were begun (stage_lead.py); a step that one stage rejects, all stages after it reject.
"""

from __future__ import annotations

from typing import Any

from quire import _native
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute.executor import ExecutorOptions
from quire.execute.native import Int32s
from quire.program.batch import ForwardBatch
from quire.program.program import Program
from quire.ranks.commands import Command, CopyBlocks, Run
from quire.ranks.rank_executor import MirroredExecutor, RankExecutor
from quire.ranks.stage_lead import StageLead
from quire.ranks.stages import StageLinks
from quire.weights.checkpoint import Checkpoint


class StageExecutor(RankExecutor):
    """A RankExecutor of a rank above 0, with the links its rows go through."""

    links: StageLinks

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        links: StageLinks,
        **more: Any,
    ) -> None:
        self.links = links
        super().__init__(program, checkpoint, options, group, **more)

    def connect(self, native: _native.Program) -> None:
        """See RankExecutor; and what rows go through."""
        super().connect(native)
        native.set_links(*self.links.ends)

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
    """The Executor of rank 0. layers: how many each stage has.

    A PipelinedExecutor (see quire/execute/executor.py).
    """

    links: StageLinks

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        links: StageLinks,
        layers: tuple[int, ...],
        **more: Any,
    ) -> None:
        self.links = links
        super().__init__(program, checkpoint, options, group, **more)
        self.lead: StageLead = StageLead(group, links, layers)
        self.num_layers = 0  # none are computed by themselves: see LayeredExecutor

    def connect(self, native: _native.Program) -> None:
        """See RankExecutor; and what rows go through."""
        super().connect(native)
        native.set_links(*self.links.ends)

    @property
    def num_stages(self) -> int:
        """See PipelinedExecutor."""
        return len(self.lead.layers)

    @property
    def expert_loads(self) -> list[list[int]]:
        """See NativeExecutor; of all stages. Raises DeviceLost."""
        return self.lead.loads.followed_by(super().expert_loads, self.lost)

    def begin_trunk(self, batch: ForwardBatch) -> None:
        """See PipelinedExecutor."""
        self.lead.begin(batch)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Run the layers of this stage, and what was to be done before."""
        self.step = self.lead.catch_up(batch, super().copy_blocks)
        super().run_trunk(batch, head_rows=head_rows)

    def _begin_drafts(self, run: Run) -> int:
        return self.lead.begin_drafts(run, super().copy_blocks)

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """Raise: layers are not computed by themselves."""
        raise ValueError("stages of a pipeline compute no layers by themselves")

    def _send_allocation(self, num_blocks: int, block_size: int) -> None:
        self.lead.allocate(self.allocation(num_blocks, block_size))
        super()._send_allocation(num_blocks, block_size)

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """See Executor; layers are those of the whole model."""
        own = layer if self.has_whole_blocks else self.lead.touch(layer, first, last)
        if own is not None:
            super().touch_blocks(own, first, last)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor; after the steps that were begun before."""
        if len(copy_from):
            self.lead.copy(CopyBlocks(copy_from=copy_from, copy_to=copy_to))

    @property
    def ops_done(self) -> int:
        """Operations finished so far by all ranks, modulo 2^32."""
        return self.group.native.progress

    @property
    def waited_ms(self) -> float:
        """See PipelinedExecutor."""
        return self.links.waited_ms
