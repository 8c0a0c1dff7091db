"""The torch executor of a rank, and that of rank 0, which sends each call before it makes it.

A rank runs its share of the program; exchanges are operations in it
(quire/execute/gpu/rank_ops.py). Knows no process. Always holds: all ranks make the same calls in
the same order; tokens are chosen at rank 0, and ranks get those that a step takes from the device
by an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import DeviceLost
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute.gpu.device import device_errors
from quire.execute.gpu.exchange import exchange_first
from quire.execute.gpu.executor import TorchExecutor
from quire.execute.gpu.place import Call
from quire.execute.gpu.step_buffers import Counts
from quire.execute.native import HEAD, NONE, POOL, TRUNK
from quire.program.batch import ForwardBatch
from quire.ranks.commands import (
    Allocate,
    Command,
    CopyBlocks,
    Run,
    RunAgain,
    RunLayers,
    Stop,
    Touch,
)
from quire.ranks.leading import Lead
from quire.ranks.other_ranks import OtherRanks
from quire.ranks.stage_lead import StageLead
from quire.ranks.stages import StageLinks
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores

Int32s = NDArray[np.int32]


class TorchRank(TorchExecutor):
    """A TorchExecutor of a rank. `attach` is called once, before anything else."""

    group: SharedMemoryRank
    links: StageLinks | None

    def attach(self, group: SharedMemoryRank, links: StageLinks | None) -> None:
        """Take the group, and in a pipeline the links of this rank."""
        self.group, self.links = group, links
        self._ran: ForwardBatch | None = None  # the batch of the last Run

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor; meets the other ranks where the exchange has not."""
        if (exchange := self._place.ends.exchange) is not None:
            exchange.connect()
            with device_errors("the first exchange of ranks"), self._stream.here():
                exchange_first(exchange, self._device)
                self._stream.mark().wait()
        super().allocate_cache(num_blocks, block_size)

    def do(self, command: Command) -> None:
        """Do what rank 0 does, or will do."""
        match command:
            case Allocate():
                TorchRank.allocate_cache(self, command.num_blocks, command.block_size)
            case Touch():
                pass  # a device's memory is there when it is allocated
            case CopyBlocks():
                TorchExecutor.copy_blocks(self, command.copy_from, command.copy_to)
            case Run():
                self._run_step(command)
            case RunAgain():
                self._run_again(command)
            case RunLayers() | Stop():
                raise AssertionError(f"{type(command).__name__} is not sent to this executor")

    def _run_step(self, command: Run) -> None:
        self._ran = command.batch
        if self.links is None:
            TorchExecutor.run_trunk(self, command.batch, head_rows=len(command.sample_rows))
            return
        self.links.begin(command.step)
        try:
            TorchExecutor.run_trunk(self, command.batch, head_rows=len(command.sample_rows))
        except ValueError:
            self.links.reject()
            raise

    def _run_again(self, command: RunAgain) -> None:
        assert self._ran is not None, "rank 0 runs the trunk first"
        batch, first = self._ran, command.first
        if first < 0:
            batch, first = replace(batch, sample_rows=command.sample_rows), 0
        run = TorchExecutor.run_head if command.segment == HEAD else TorchExecutor.run_pool
        run(self, batch, first, len(command.sample_rows))

    def _launch_calls(self, calls: Sequence[Call], counts: Counts) -> None:
        for call in calls:
            super()._launch_calls((call,), counts)
            self.group.native.note_progress(1)


class MirroredTorch(TorchRank):
    """The Executor of rank 0: what it does, all ranks do."""

    lead: Lead
    processes: OtherRanks

    def attach(self, group: SharedMemoryRank, links: StageLinks | None) -> None:
        """See TorchRank."""
        super().attach(group, links)
        self.lead = Lead(group)
        self._step_number = 0  # of the next Run, where there are stages

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor."""
        self.lead.send(self._allocation(num_blocks, block_size))
        super().allocate_cache(num_blocks, block_size)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor."""
        if len(copy_from):
            self.lead.send(CopyBlocks(copy_from=copy_from, copy_to=copy_to))
            super().copy_blocks(copy_from, copy_to)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """See Executor."""
        command = Run(
            step=self._step_number,
            segment=TRUNK,
            then=HEAD if head_rows else NONE,
            batch=batch,
            sample_rows=batch.sample_rows[:head_rows],
        )
        self.lead.send(command)
        self._ran = batch
        with self.lead.in_step():
            super().run_trunk(batch, head_rows=head_rows)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Any:
        """See Executor."""
        self._send_again(HEAD, batch, first, count)
        with self.lead.in_step():
            return super().run_head(batch, first, count)

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        """See PoolingExecutor."""
        self._send_again(POOL, batch, first, count)
        with self._with_all_ranks(), self.lead.in_step():
            return super().run_pool(batch, first, count)

    def sample(self, logits: Any, batch: SampleBatch) -> TokenChoice:
        """See Executor."""
        with self._with_all_ranks():
            return super().sample(logits, batch)

    def sample_later(
        self, logits: Any, batch: SampleBatch, slots: Int32s
    ) -> Callable[[], TokenChoice]:
        """See AsyncExecutor."""
        with self._with_all_ranks():
            chosen = super().sample_later(logits, batch, slots)

        def wait() -> TokenChoice:
            with self._with_all_ranks():
                return chosen()

        return wait

    def mark(self) -> Callable[[], None]:
        """See AsyncExecutor."""
        with self._with_all_ranks():
            mark = super().mark()

        def wait() -> None:
            with self._with_all_ranks():
                mark()

        return wait

    def score(self, logits: Any, batch: ScoreBatch) -> Scores:
        """See Executor."""
        with self._with_all_ranks():
            return super().score(logits, batch)

    def lost(self, found: str) -> DeviceLost:
        """End the group; return the error that says why."""
        return self.lead.lost(found)

    def close(self) -> None:
        """Let the other ranks stop; free memory."""
        self.lead.stop()
        super().close()

    @contextmanager
    def _with_all_ranks(self) -> Iterator[None]:
        """Let nothing be taken from a step in which a rank was lost. A device's exchange that was
        aborted ends without an error, and what follows it computes with bytes of an earlier step;
        a group is marked before its exchanges are aborted. Raises DeviceLost."""
        try:
            yield
        except DeviceLost as error:
            raise self.lead.lost(str(error)) from error
        if self.group.native.is_aborted:
            raise self.lead.lost("an exchange has ended without the bytes of all ranks")

    def _allocation(self, num_blocks: int, block_size: int) -> Allocate:
        return Allocate(
            num_blocks=num_blocks, block_size=block_size, own_block_size=block_size, span=0
        )

    def _send_again(self, segment: int, batch: ForwardBatch, first: int, count: int) -> None:
        rows = batch.sample_rows[first : first + count]
        begins = first if batch is self._ran else -1
        self.lead.send(RunAgain(segment=segment, first=begins, sample_rows=rows))


class TorchPipeline(MirroredTorch):
    """The Executor of rank 0 of a pipeline.

    A PipelinedExecutor (see quire/execute/executor.py).
    """

    lead: StageLead

    def lead_stages(self, links: StageLinks, layers: tuple[int, ...]) -> None:
        """Lead the stages before too, after `attach`. layers: how many each stage has."""
        self.lead = StageLead(self.group, links, layers)

    @property
    def num_stages(self) -> int:
        """See PipelinedExecutor."""
        return len(self.lead.layers)

    @property
    def waited_ms(self) -> float:
        """See PipelinedExecutor."""
        return self.lead.links.waited_ms

    @property
    def ops_done(self) -> int:
        """Operations finished so far by all ranks, modulo 2^32."""
        return self.group.native.progress

    def begin_trunk(self, batch: ForwardBatch) -> None:
        """See PipelinedExecutor."""
        self.lead.begin(batch)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Run the layers of this stage, and what was to be done before."""
        self._step_number = self.lead.catch_up(batch, super().copy_blocks)
        super().run_trunk(batch, head_rows=head_rows)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor."""
        self.lead.allocate(self._allocation(num_blocks, block_size))
        super().allocate_cache(num_blocks, block_size)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor; after the steps that were begun before."""
        if len(copy_from):
            self.lead.copy(CopyBlocks(copy_from=copy_from, copy_to=copy_to))
