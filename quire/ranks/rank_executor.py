"""RankExecutor: the native executor of one rank, and MirroredExecutor, that of rank 0.

A rank runs its share of the program; the exchanges are operations inside it, done by the compiled
module. Rank 0 sends each call that touches memory to the others before it makes the call itself.
Where the first layers of the model draft for it, each rank has an executor of these besides. Knows
no process. Always holds: all ranks make the same calls in the same order; a group that has
lost a rank never computes again (DeviceLost).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.errors import DeviceLost
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute.executor import ExecutorOptions
from quire.execute.native import NONE, TRUNK, Int32s, NativeExecutor
from quire.execute.packing import LoadWeights, load
from quire.program.batch import NO_SLOTS, ForwardBatch
from quire.program.program import Program
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
from quire.ranks.first_layers import LeadingFirstLayers, RankEnds, RankFirstLayers
from quire.ranks.leading import Lead
from quire.ranks.other_ranks import OtherRanks
from quire.ranks.own_pieces import OwnPieces
from quire.ranks.rank_pools import RankPools
from quire.ranks.shared_pools import NONE as NO_FILE
from quire.ranks.shared_pools import HostArray, PoolShare, WholeBlocks, mapped
from quire.ranks.stages import StageLinks
from quire.weights.checkpoint import Checkpoint


class RankExecutor(NativeExecutor):
    """A NativeExecutor of a rank's program, with the group its exchanges go through.

    own_block_size: positions of a block in the pool, where blocks of the engine are divided.
    pool_file: a descriptor of the file that the KV pools of all ranks lie in; NO_FILE: in none.
    """

    own_block_size = 16
    links: StageLinks | None = None  # in a pipeline

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        *,
        isa: str = "",
        poison: bool = False,
        pool_file: int = NO_FILE,
        load_weights: LoadWeights = load,
    ) -> None:
        super().__init__(
            program, checkpoint, options, isa=isa, poison=poison, load_weights=load_weights
        )
        self.group, self._pool_file, self._poison = group, pool_file, poison
        self.connect(self._native)
        self._last: ForwardBatch | None = None  # of the last Run
        self.server: PoolServer | None = None  # where rank 0 does not share this memory
        self.pieces: OwnPieces | None = None  # under context parallelism, once there is a cache
        self._draft_share: DraftShare | None = None
        self._drafts: RankFirstLayers | None = None  # of as many layers as the last pass had

    def connect(self, native: _native.Program) -> None:
        """Set what the exchanges of a program of this rank go through."""
        native.set_group(self.group.native)

    def draft_by(self, share: DraftShare) -> None:
        """Have the first layers too: as many as rank 0 says with a pass."""
        self._draft_share = share

    def _drafting(self, num: int) -> RankFirstLayers:
        """Return the executor of the first `num` layers, in place of another number."""
        if self._drafts is None or self._drafts.num != num:
            assert self._draft_share is not None, "rank 0 has the first layers too"
            self._end_drafts()
            ends = RankEnds(connect=self.connect, own=self._own)
            drafts = RankFirstLayers(self, self._draft_share, ends, num=num, poison=self._poison)
            drafts.share_cache()
            self._drafts = drafts
        return self._drafts

    def _end_drafts(self) -> None:
        if self._drafts is not None:
            self._drafts.close()
            self._drafts = None

    def close(self) -> None:
        """Free threads and memory."""
        self._end_drafts()
        super().close()

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor. Under context parallelism a rank has its pieces of each block."""
        cache = self._program.caches[0]
        if cache.ranks == 1:
            super().allocate_cache(num_blocks, block_size)
            return
        rank = self.group.rank % cache.ranks
        pieces = OwnPieces(ranks=cache.ranks, rank=rank, block_size=self.own_block_size)
        if block_size != pieces.engine_block_size:
            raise ValueError(f"blocks of {block_size} positions over {cache.ranks} ranks")
        super().allocate_cache(num_blocks * pieces.blocks_of_each, self.own_block_size)
        self.pieces = pieces

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """See Executor."""
        times = 1 if self.pieces is None else self.pieces.blocks_of_each
        super().touch_blocks(layer, first * times, last * times)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor."""
        if self.pieces is not None:
            copy_from, copy_to = self.pieces.blocks(copy_from), self.pieces.blocks(copy_to)
        super().copy_blocks(copy_from, copy_to)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over the layers of this rank."""
        return super().block_bytes * (1 if self.pieces is None else self.pieces.blocks_of_each)

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """See LayeredExecutor."""
        super().run_layers(self._own(batch), first, end)

    def _run(
        self, segment: int, batch: ForwardBatch, sample_rows: Int32s, then: int = NONE
    ) -> None:
        own = self._own(batch) if segment == TRUNK else batch
        super()._run(segment, own, sample_rows, then)

    def _own(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if self.pieces is None else self.pieces.batch(batch)

    def do(self, command: Command) -> None:
        """Do what rank 0 does."""
        match command:
            case Allocate():
                self.own_block_size = command.own_block_size
                RankExecutor.allocate_cache(self, command.num_blocks, command.block_size)
                self._place_pool(command.span)
                if self.server is not None:
                    self.server.set_pool(self._pool_array(command.num_blocks))
                if self._drafts is not None:
                    self._drafts.share_cache()
            case Touch():
                RankExecutor.touch_blocks(self, command.layer, command.first, command.last)
            case CopyBlocks():
                RankExecutor.copy_blocks(self, command.copy_from, command.copy_to)
            case Run() | RunAgain() if command.drafts:
                self._drafting(command.drafts).do(command)
            case Run():
                self._last = command.batch
                self._reserve_angles(command.batch)
                RankExecutor._run(
                    self, command.segment, command.batch, command.sample_rows, command.then
                )
            case RunAgain():
                assert self._last is not None, "rank 0 runs the trunk first"
                RankExecutor._run(self, command.segment, self._last, command.sample_rows)
            case RunLayers():
                RankExecutor.run_layers(self, command.batch, command.first, command.end)
            case Stop():
                raise AssertionError("Stop ends the loop")

    def _pool_array(self, num_blocks: int) -> HostArray:
        """Return the pool by blocks of the engine."""
        return HostArray(self._pool_bytes.reshape(len(self._pool_bytes), num_blocks, -1))

    def _place_pool(self, span: int) -> None:
        """Keep the pool in the file of all ranks, where there is one."""
        if self._pool_file != NO_FILE:
            memory = mapped(self._pool_file, self.group.rank, span)
            self._native.place_cache(memory)
            self._placed = memory
            used = memory[: self._pool_bytes.size]
            self._pool_bytes = used.reshape(self._pool_bytes.shape)


class MirroredExecutor(RankExecutor):
    """The Executor of rank 0: what it does, all ranks do. processes: of the other ranks."""

    processes: OtherRanks

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        *,
        poison: bool = False,
        load_weights: LoadWeights = load,
    ) -> None:
        super().__init__(
            program, checkpoint, options, group, poison=poison, load_weights=load_weights
        )
        self._pools: RankPools | None = None
        self._whole: WholeBlocks | None = None  # the blocks of all ranks
        self.lead = Lead(group)
        self.step = 0  # the number of the next Run

    def first_layers(self, num: int, num_threads: int = 0) -> LeadingFirstLayers:
        """Return an executor of the first `num` layers, which the caller closes. num_threads: see
        NativeFirstLayers."""
        assert self._draft_share is not None, "ranks are started with their first layers"
        return LeadingFirstLayers(
            self,
            self._draft_share,
            RankEnds(connect=self.connect, own=self._own),
            num=num,
            lead=self.lead,
            begin=self._begin_drafts,
            num_threads=num_threads,
            poison=self._poison,
        )

    def _begin_drafts(self, run: Run) -> int:
        """Do what comes before a pass of the first layers; return its number."""
        return 0

    def share_blocks(
        self, shares: Sequence[PoolShare], *, pool_file: int, ends: Mapping[int, BlockEnd]
    ) -> None:
        """See LeadingExecutor."""
        self._pools = RankPools(
            shares,
            pool_file=pool_file,
            ends=ends,
            lost=self.lead.lost,  # not of self: an executor that nothing closes is freed
            sides=1,
        )
        self._pool_file = self._pools.pool_file

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """See Executor."""
        pools = self._pools
        if pools is None or pools.pool_file == NO_FILE:
            self._send_allocation(num_blocks, block_size)
            super().allocate_cache(num_blocks, block_size)
            if pools is None:
                return
            head_bytes, of_each = self._block_shape()
        else:
            super().allocate_cache(num_blocks, block_size)
            head_bytes, of_each = self._block_shape()
            pools.make_room(num_blocks, of_each, (head_bytes,))
            self._send_allocation(num_blocks, block_size)
            self._place_pool(pools.span)
        own = self._pool_array(num_blocks)
        self._whole = pools.joined(lambda: (own,), num_blocks, of_each, (head_bytes,))

    def _block_shape(self) -> tuple[int, int]:
        """Return the bytes of a head of a pool's block in one layer, and the pool's blocks for each
        block of the engine."""
        assert self._pools is not None, "whole blocks are here"
        first_head, end_head = self._pools.shares[0].heads
        head_bytes = self._pool_bytes.shape[2] // (end_head - first_head)
        return head_bytes, 1 if self.pieces is None else self.pieces.blocks_of_each

    def _send_allocation(self, num_blocks: int, block_size: int) -> None:
        """Let the other ranks allocate their caches."""
        self.lead.send(self.allocation(num_blocks, block_size))

    def allocation(self, num_blocks: int, block_size: int) -> Allocate:
        """Return the command that allocates the cache of another rank."""
        return Allocate(
            num_blocks=num_blocks,
            block_size=block_size,
            own_block_size=self.own_block_size,
            span=0 if self._pools is None else self._pools.span,
        )

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """See Executor."""
        if self._whole is not None:
            # Here: another rank may be late, and the block imported by then.
            self._whole.touch(layer, first, last)
            return
        with self.lead.turn:
            self.lead.send(Touch(layer=layer, first=first, last=last))
            super().touch_blocks(layer, first, last)

    @property
    def has_whole_blocks(self) -> bool:
        """Whether blocks are exported, imported and touched over all ranks, from here."""
        return self._whole is not None

    @property
    def block_bytes(self) -> int:
        """See Executor; of a whole block, where all ranks' leave and enter here."""
        return super().block_bytes if self._whole is None else self._whole.block_bytes

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """See Executor."""
        if self._whole is None:
            super().export_block(block, out)
        else:
            self._whole.export_block(block, out)

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        """See Executor."""
        if self._whole is None:
            super().import_block(block, raw)
        else:
            self._whole.import_block(block, raw)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """See Executor."""
        if len(copy_from):
            with self.lead.turn:
                self.lead.send(CopyBlocks(copy_from=copy_from, copy_to=copy_to))
                super().copy_blocks(copy_from, copy_to)

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """See LayeredExecutor."""
        with self.lead.turn:
            self.lead.send(RunLayers(batch=batch, first=first, end=end))
            with self.lead.in_step():
                super().run_layers(batch, first, end)

    def close(self) -> None:
        """Let the other ranks stop; free threads and memory."""
        if self._pools is not None and not self.group.native.is_aborted:
            end_servers(self._pools.ends.values())
        self.lead.stop()
        super().close()
        if self._pools is not None:
            self._pools.close()

    def _run(
        self, segment: int, batch: ForwardBatch, sample_rows: Int32s, then: int = NONE
    ) -> None:
        command: Run | RunAgain = RunAgain(segment=segment, first=0, sample_rows=sample_rows)
        if segment == TRUNK:
            plain = replace(batch, sample_rows=sample_rows, late_slots=NO_SLOTS)
            command = Run(
                step=self.step, segment=TRUNK, then=then, batch=plain, sample_rows=sample_rows
            )
        with self.lead.turn:
            self.lead.send(command)
            with self.lead.in_step():
                super()._run(segment, batch, sample_rows, then)

    def lost(self, found: str) -> DeviceLost:
        """End the group; return the error that says why."""
        return self.lead.lost(found)
