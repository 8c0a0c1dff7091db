"""The torch executor of a rank, and that of rank 0, which sends each call before it makes it.

A rank runs its share of the program; exchanges are operations in it
(quire/execute/gpu/rank_ops.py). Knows no process. Always holds: all ranks make the same calls in
the same order; tokens are chosen at rank 0, and ranks get those that a step takes from the device
by an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from quire.program.declarations import PIECE_POSITIONS
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
from quire.ranks.connected_pools import BlockEnd, PoolServer, end_servers
from quire.ranks.draft_share import DraftShare
from quire.ranks.leading import Lead
from quire.ranks.other_ranks import OtherRanks
from quire.ranks.own_pieces import OwnPieces
from quire.ranks.rank_pools import SIDES, RankPools, head_bytes_of
from quire.ranks.shared_pools import NONE as NO_FILE
from quire.ranks.shared_pools import PoolArray, PoolShare, WholeBlocks, mapped
from quire.ranks.stage_lead import StageLead
from quire.ranks.stages import StageLinks
from quire.ranks.torch_first_layers import LeadingTorchFirstLayers, TorchRankFirstLayers
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]


class TorchRank(TorchExecutor):
    """A TorchExecutor of a rank. `attach` is called once, before anything else.

    own_block_size: positions of a block in the pool, where blocks of the engine are divided.
    pool_file: a descriptor of the file that the KV pools of all ranks lie in; NO_FILE: in none.
    server: where rank 0 does not share this memory. pieces: under context parallelism, once there
    is a cache.
    """

    group: SharedMemoryRank
    links: StageLinks | None
    own_block_size = 16
    pool_file = NO_FILE
    server: PoolServer | None = None
    pieces: OwnPieces | None = None

    def attach(self, group: SharedMemoryRank, links: StageLinks | None) -> None:
        """Take the group, and in a pipeline the links of this rank."""
        self.group, self.links = group, links
        self._ran: ForwardBatch | None = None  # the batch of the last Run
        self._span = 0  # bytes of each rank in the file of all pools
        self._draft_share: DraftShare | None = None
        self._drafts: TorchRankFirstLayers | None = None  # of as many layers as the last pass had

    def draft_by(self, share: DraftShare) -> None:
        """Have the first layers too: as many as rank 0 says with a pass."""
        self._draft_share = share

    def _drafting(self, num: int) -> TorchRankFirstLayers:
        """Return the executor of the first `num` layers, in place of another number."""
        if self._drafts is None or self._drafts.num != num:
            assert self._draft_share is not None, "rank 0 has the first layers too"
            self._end_drafts()
            self._drafts = TorchRankFirstLayers(
                self, self._draft_share, self._own, num=num, poison=self._poison
            )
        return self._drafts

    def _end_drafts(self) -> None:
        if self._drafts is not None:
            self._drafts.close()
            self._drafts = None

    def close(self) -> None:
        """Free memory."""
        self._end_drafts()
        super().close()

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor; meets the other ranks where the exchange has not. Under context parallelism
        a rank has its pieces of each block."""
        if (exchange := self._place.ends.exchange) is not None:
            exchange.connect()
            with device_errors("the first exchange of ranks"), self._stream.here():
                exchange_first(exchange, self._device)
                self._stream.mark().wait()
        own_blocks, own_size = num_blocks, block_size
        if (ranks := self._program.caches[0].ranks) > 1:
            rank = self.group.rank % ranks
            pieces = OwnPieces(ranks=ranks, rank=rank, block_size=self.own_block_size)
            if block_size != pieces.engine_block_size:
                raise ValueError(f"blocks of {block_size} positions over {ranks} ranks")
            own_blocks, own_size = num_blocks * pieces.blocks_of_each, pieces.block_size
            self.pieces = pieces
        memory = None
        if self._span:
            memory = mapped(self.pool_file, self.group.rank, self._span)
        self._allocate(own_blocks, own_size, memory)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor."""
        if self.pieces is not None:
            copy_from, copy_to = self.pieces.blocks(copy_from), self.pieces.blocks(copy_to)
        super().copy_blocks(copy_from, copy_to)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """See Executor."""
        super().run_trunk(self._own(batch), head_rows=head_rows)

    def _own(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a step with this rank's slots and tables."""
        return batch if self.pieces is None else self.pieces.batch(batch)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over the layers of this rank."""
        return super().block_bytes * self._blocks_of_each

    @property
    def _blocks_of_each(self) -> int:
        """Blocks of this rank's pool for each block of the engine."""
        return 1 if self.pieces is None else self.pieces.blocks_of_each

    def _pool_arrays(self) -> Sequence[PoolArray]:
        """Return the arrays of the pool, by blocks of the engine."""
        num_blocks = self._pool.num_blocks // self._blocks_of_each
        return self._pool.arrays(num_blocks)

    def do(self, command: Command) -> None:
        """Do what rank 0 does, or will do."""
        match command:
            case Allocate():
                self.own_block_size, self._span = command.own_block_size, command.span
                TorchRank.allocate_cache(self, command.num_blocks, command.block_size)
                if self.server is not None:
                    self.server.set_pool(*self._pool_arrays())
                if self._drafts is not None:
                    self._drafts.share_cache()
            case Touch():
                pass  # a device's memory is there when it is allocated
            case CopyBlocks():
                TorchRank.copy_blocks(self, command.copy_from, command.copy_to)
            case Run():
                with self._in_stage(command.step):
                    self._run_step(command)
            case RunAgain() if command.drafts:
                self._drafting(command.drafts).do(command)
            case RunAgain():
                self._run_again(command)
            case RunLayers() | Stop():
                raise AssertionError(f"{type(command).__name__} is not sent to this executor")

    def _run_step(self, command: Run) -> None:
        if command.drafts:
            self._drafting(command.drafts).do(command)
            return
        self._ran = command.batch
        TorchRank.run_trunk(self, command.batch, head_rows=len(command.sample_rows))

    @contextmanager
    def _in_stage(self, step: int) -> Iterator[None]:
        """Take and hand on the rows of a step, where ranks are stages."""
        if self.links is None:
            yield
            return
        self.links.begin(step)
        try:
            yield
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
    _pools: RankPools | None = None
    _whole: WholeBlocks | None = None  # the blocks of all ranks, where they leave and enter

    def attach(self, group: SharedMemoryRank, links: StageLinks | None) -> None:
        """See TorchRank."""
        super().attach(group, links)
        self.lead = Lead(group)
        self._step_number = 0  # of the next Run, where there are stages

    def share_blocks(
        self, shares: Sequence[PoolShare], *, pool_file: int, ends: Mapping[int, BlockEnd]
    ) -> None:
        """See LeadingExecutor."""
        self._pools = RankPools(
            shares, pool_file=pool_file, ends=ends, lost=self.lead.lost, sides=SIDES
        )
        self.pool_file = self._pools.pool_file

    def first_layers(self, num: int, num_threads: int = 0) -> LeadingTorchFirstLayers:
        """Return an executor of the first `num` layers, which the caller closes. num_threads: not
        used, since PyTorch's threads are the process's."""
        assert self._draft_share is not None, "ranks are started with their first layers"
        return LeadingTorchFirstLayers(
            self,
            self._draft_share,
            self._own,
            num=num,
            lead=self.lead,
            begin=self._begin_drafts,
            poison=self._poison,
        )

    def _begin_drafts(self, run: Run) -> int:
        """Do what comes before a pass of the first layers; return its number."""
        return 0

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor."""
        cache, of_each, own_size = self._program.caches[0], 1, block_size
        if cache.ranks > 1:
            own_size = self.own_block_size
            of_each = PIECE_POSITIONS // own_size
        head_bytes = head_bytes_of(cache, own_size)
        if self._pools is not None:
            self._pools.make_room(num_blocks, of_each, head_bytes)
            self._span = self._pools.span
        self._send_allocation(num_blocks, block_size)
        super().allocate_cache(num_blocks, block_size)
        if self._pools is not None:
            self._whole = self._pools.joined(self._pool_arrays, num_blocks, of_each, head_bytes)

    @property
    def block_bytes(self) -> int:
        """See Executor; of a whole block, where all ranks' leave and enter here."""
        return super().block_bytes if self._whole is None else self._whole.block_bytes

    def begin_moving(self, num_blocks: int) -> None:
        """See AsyncExecutor: whole blocks are copied at once."""
        if self._whole is None:
            super().begin_moving(num_blocks)

    def export_blocks(self, blocks: Int32s, outs: Sequence[Bytes]) -> Callable[[], None]:
        """See AsyncExecutor: once what is queued here is done, the other ranks have stored what a
        step of this one has waited for."""
        if self._whole is None:
            return super().export_blocks(blocks, outs)
        self.mark()()
        for block, out in zip(blocks.tolist(), outs, strict=True):
            self._whole.export_block(block, out)
        return _nothing

    def import_blocks(self, blocks: Int32s, raws: Sequence[Bytes]) -> None:
        """See AsyncExecutor."""
        if self._whole is None:
            super().import_blocks(blocks, raws)
            return
        for block, raw in zip(blocks.tolist(), raws, strict=True):
            self._whole.import_block(block, raw)

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

    def output(self, name: str, num_rows: int) -> NDArray[np.float32]:
        """See TappedExecutor: rank 0 has hidden states whole."""
        with self._with_all_ranks():
            return super().output(name, num_rows)

    def score(self, logits: Any, batch: ScoreBatch) -> Scores:
        """See Executor."""
        with self._with_all_ranks():
            return super().score(logits, batch)

    def lost(self, found: str) -> DeviceLost:
        """End the group; return the error that says why."""
        return self.lead.lost(found)

    def close(self) -> None:
        """Let the other ranks stop; free memory."""
        if self._pools is not None and not self.group.native.is_aborted:
            end_servers(self._pools.ends.values())
        self.lead.stop()
        super().close()
        if self._pools is not None:
            self._pools.close()

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

    def _send_allocation(self, num_blocks: int, block_size: int) -> None:
        """Let the other ranks allocate their caches."""
        self.lead.send(self._allocation(num_blocks, block_size))

    def _allocation(self, num_blocks: int, block_size: int) -> Allocate:
        return Allocate(
            num_blocks=num_blocks,
            block_size=block_size,
            own_block_size=self.own_block_size,
            span=self._span,
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
    def expert_loads(self) -> list[list[int]]:
        """See TorchExecutor; of all stages. Raises DeviceLost."""
        return self.lead.loads.followed_by(super().expert_loads, self.lost)

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

    def _begin_drafts(self, run: Run) -> int:
        return self.lead.begin_drafts(run, super().copy_blocks)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Run the layers of this stage, and what was to be done before."""
        self._step_number = self.lead.catch_up(batch, super().copy_blocks)
        super().run_trunk(batch, head_rows=head_rows)

    def _send_allocation(self, num_blocks: int, block_size: int) -> None:
        self.lead.allocate(self._allocation(num_blocks, block_size))
        super()._send_allocation(num_blocks, block_size)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor; after the steps that were begun before."""
        if len(copy_from):
            self.lead.copy(CopyBlocks(copy_from=copy_from, copy_to=copy_to))


def _nothing() -> None:
    """There is nothing to wait for."""
