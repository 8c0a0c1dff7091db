"""RankedExecutorClass: an executor of several ranks, as one to what uses it.

Sizes the memory of the ranks that share a machine; lets the other ranks begin
and loads rank 0's share meanwhile. Always holds: its answers are those of one process, bit for
bit (quire/program/shard.py).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

from quire.base import log as log_module
from quire.base.log import Log
from quire.base.version import installed_version
from quire.comm.shared_memory import (
    TIMEOUT_S,
    SegmentSizes,
    SharedMemoryRank,
    create_segment,
)
from quire.config.machine import MachineMemory
from quire.execute.executor import (
    PART_TOKENS,
    ExecutorMemory,
    ExecutorOptions,
    StepLimits,
)
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.degrees import check_degree, kv_span
from quire.program.expert_ops import Experts
from quire.program.expert_parallel import SPLIT_EXPERTS, ExpertPlacement, ExpertPlan
from quire.program.first_layers import first_layers
from quire.program.ops import Attention
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.serialize import to_plain
from quire.program.shard import shard
from quire.program.tensors import DType
from quire.ranks.commands import command_bytes
from quire.ranks.connected_pools import NO_ENDS, BlockEnd, block_ends, block_link_bytes
from quire.ranks.draft_share import DraftLayers, DraftShare
from quire.ranks.kinds import NATIVE, RankKind
from quire.ranks.leading import LeadingExecutor
from quire.ranks.other_ranks import OtherRanks, RankSite
from quire.ranks.placement import cpus_of_ranks, run_on, running_on
from quire.ranks.processes import RankProcesses
from quire.ranks.shared_pools import NONE as NO_FILE
from quire.ranks.shared_pools import PoolShare, create_file
from quire.ranks.start import RankReady, RankStart, check_ready, ready_of, with_drafts
from quire.weights.checkpoint import Checkpoint

# Rows of a step that are exchanged at once: more than this are exchanged in parts.
_SLOT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedExecutorClass:
    """An ExecutorClass (see quire/execute/executor.py).

    degree: of all ranks of a stage; `context` of them at a time have the same heads and divide the
    positions of the KV cache, in blocks of block_size (context parallelism). experts: how whole
    experts are placed on ranks; None: each expert is split by columns. mode: whether products are
    split by inputs too. binds: whether ranks are bound to processors. poison:
    fill buffers with NaN before each run, for tests. timeout_s: the longest wait for a rank that
    responds. shares_blocks: whether blocks leave and enter the pool, whole, as of one process.
    site: where the ranks run; None: in processes of this machine that rank 0 starts. kind: what
    they compute with. drafts: the first layers that draft for the model; None: they do not.
    """

    degree: int
    context: int = 1
    block_size: int = 16
    experts: ExpertPlan | None = None
    mode: TpMode = TpMode.EXACT
    binds: bool = True
    poison: bool = False
    timeout_s: float = TIMEOUT_S
    shares_blocks: bool = False
    site: RankSite | None = None
    kind: RankKind = NATIVE
    drafts: DraftLayers | None = None

    @property
    def num_ranks(self) -> int:
        """How many processes there are."""
        return self.degree

    def check_program(self, program: Program) -> None:
        """Raise SettingError where it cannot be split so, ModelError where a kernel lacks."""
        check_degree(program, self.degree, self.placement(program), self.context)
        self.kind.check_program(program)

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """Return the memory of all ranks together; where they have several machines, of as many of
        the largest ones as share this machine; where each has a device, of the largest one."""
        programs = self.programs(program)
        together = partial(self._together, programs, limits)
        return together(self.kind.memory_of_each(programs, limits, together))

    def programs(self, program: Program) -> list[Program]:
        """Return each rank's share."""
        placement = self.placement(program)
        return [self._share(program, rank, placement) for rank in range(self.degree)]

    def _together(
        self, programs: Sequence[Program], limits: StepLimits, parts: Sequence[ExecutorMemory]
    ) -> ExecutorMemory:
        """Return the memory of ranks with these programs. parts: of each, apart from exchanges."""
        # Shared memory is the host's, where ranks have a device each.
        slots = 2 * self.num_ranks * max(map(_slot_bytes, programs))
        slots *= self.kind.shares_memory
        if self.site is None and self.kind.shares_memory:
            return ExecutorMemory(
                weights_bytes=sum(part.weights_bytes for part in parts),
                step_bytes=sum(part.step_bytes for part in parts) + slots,
                token_bytes=sum(part.token_bytes for part in parts),
            )
        # Each has its own slots, or a device of its own.
        here = self.site.here if self.site is not None and self.kind.shares_memory else 1
        if self._links_blocks and self.kind.shares_memory:
            slots += block_link_bytes(self.num_ranks)
        return ExecutorMemory(
            weights_bytes=here * max(part.weights_bytes for part in parts),
            step_bytes=here * (max(part.step_bytes for part in parts) + slots),
            token_bytes=here * max(part.token_bytes for part in parts),
            exchange_bytes=max(part.exchange_bytes for part in parts),
        )

    def draft_shares(self, program: Program) -> list[DraftShare]:
        """Return each rank's share of the first layers that may draft for a program."""
        assert self.drafts is not None, "they draft"
        placement = self.placement(program)
        of_ranks: list[dict[int, Program]] = [{} for _ in range(self.num_ranks)]
        for num in self.drafts.nums(program):
            for rank, own in enumerate(self._first_layers(program, num)):
                of_ranks[rank][num] = self._share(own, rank % self.degree, placement)
        return [DraftShare(programs=own, limits=self.drafts.limits) for own in of_ranks]

    def _first_layers(self, program: Program, num: int) -> list[Program]:
        """Return the first layers of the program that each rank has a share of."""
        return [first_layers(program, num)] * self.degree

    def _share(self, program: Program, rank: int, placement: ExpertPlacement) -> Program:
        return shard(
            program,
            degree=self.degree,
            rank=rank,
            placement=placement,
            mode=self.mode,
            context=self.context,
        )

    def placement(self, program: Program) -> ExpertPlacement:
        """Return the ranks of whole experts. Raises SettingError."""
        if self.experts is None:
            return SPLIT_EXPERTS
        return self.experts.placement(program, self.degree)

    def plans_in_flight(self) -> int:
        """See ExecutorClass."""
        return self.kind.plans_in_flight()

    def head_rows(self, max_sequences: int) -> int:
        """See ExecutorClass."""
        return self.kind.head_rows(max_sequences)

    def full_step_tokens(self) -> int:
        """See ExecutorClass."""
        return self.kind.full_step_tokens()

    def available_memory(self) -> MachineMemory:
        """See ExecutorClass."""
        return self.kind.available_memory()

    def __call__(
        self, program: Program, checkpoint: Checkpoint, options: ExecutorOptions
    ) -> LeadingExecutor:
        parts = self.programs(program)
        together = partial(self._together, parts, options.limits)
        kind = self.kind.for_programs(parts, options.limits, together)
        decided = replace(self, kind=kind)
        return decided._started(program, parts, checkpoint, options)

    def _started(
        self,
        program: Program,
        parts: Sequence[Program],
        checkpoint: Checkpoint,
        options: ExecutorOptions,
    ) -> LeadingExecutor:
        """Start the ranks. parts: the program of each."""
        shares = [] if self.drafts is None else self.draft_shares(program)
        sizes = self._sizes(parts, options.limits)
        site = self.site or RankSite(launch=RankProcesses, here=self.num_ranks)
        cpus = cpus_of_ranks(site.here) if self.binds else [()] * site.here
        segment = create_segment(
            self.num_ranks,
            sizes,
            link_bytes=self._link_bytes(sizes),
            # Ranks that share no memory have a segment each; this one is rank 0's.
            near=lambda rank: running_on(cpus[rank if self.site is None else site.local]),
        )
        pool_file = NO_FILE
        try:
            if self.shares_blocks and not self._links_blocks:
                pool_file = create_file()
            group = SharedMemoryRank(
                segment,
                rank=0,
                degree=self.num_ranks,
                sizes=sizes,
                timeout_s=self.timeout_s,
                members=self.degree,
            )
            with ExitStack() as undo:
                others = site.launch(group)
                undo.callback(_end, others, self.kind)
                sample = self._sample(checkpoint)
                for rank, part in enumerate(parts[1:], start=1):
                    own_cpus = () if self.site is not None else cpus[rank]
                    start = self._start(rank, part, checkpoint, options, sizes, own_cpus)
                    start = replace(start, pool_file=pool_file, sample=sample)
                    others.start(with_drafts(start, shares[rank]) if shares else start, segment)
                undo.callback(unbind := run_on(cpus[site.local]))
                executor = self._rank_zero(parts, checkpoint, options, group, sizes)
                executor.own_block_size = self.block_size
                if self.shares_blocks:
                    executor.share_blocks(
                        self.pool_shares(program),
                        pool_file=pool_file,
                        ends=self._block_ends(group, sizes),
                    )
                if shares:
                    executor.draft_by(shares[0])
                self._compare(executor, others.ready())
                undo.pop_all()
        finally:
            os.close(segment)
            if pool_file != NO_FILE:
                os.close(pool_file)
        Log("engine").event(
            "ranks are started",
            ranks=self.num_ranks,
            threads_of_each=self._threads(options),
            exchange_pages=group.pages,
            cpus="; ".join(",".join(map(str, own_cpus)) or "any" for own_cpus in cpus),
        )
        # Also where a later part of the start fails.
        ended = weakref.finalize(executor, _end, others, self.kind, unbind)
        executor.processes = others
        executor.lead.reason, executor.lead.end = others.reason, ended
        return executor

    def _threads(self, options: ExecutorOptions) -> int:
        if self.site is None:
            return max(options.num_threads // self.num_ranks, 1)
        return self.site.threads or max(options.num_threads // self.site.here, 1)

    def _rank_zero(
        self,
        programs: Sequence[Program],
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        sizes: SegmentSizes,
    ) -> LeadingExecutor:
        own = replace(options, num_threads=self._threads(options), beside=None)
        return self.kind.leading(programs[0], checkpoint, own, group, poison=self.poison)

    def _sizes(self, programs: Sequence[Program], limits: StepLimits) -> SegmentSizes:
        drafted = 0 if self.drafts is None else self.drafts.limits.max_tokens
        return SegmentSizes(
            slot_bytes=max(map(_slot_bytes, programs)),
            message_bytes=command_bytes(
                tokens=max(limits.max_tokens, PART_TOKENS, drafted),
                samples=limits.max_samples,
                sequences=limits.max_sequences,
                positions=programs[0].max_positions,
            ),
        )

    def pool_shares(self, program: Program) -> list[PoolShare]:
        """Return what each rank's pool holds of a block of a program's cache."""
        cache, tp = program.caches[0], self.degree // self.context
        return [
            PoolShare(
                layers=(0, cache.layers),
                heads=kv_span(cache.kv_heads, rank // self.context, tp),
                piece=rank % self.context,
            )
            for rank in range(self.degree)
        ]

    @property
    def _links_blocks(self) -> bool:
        """Whether blocks leave and enter over links: ranks that share no memory, or have pools on
        devices, have no file."""
        return self.shares_blocks and (self.site is not None or not self.kind.shares_memory)

    def _block_ends(self, group: SharedMemoryRank, sizes: SegmentSizes) -> Mapping[int, BlockEnd]:
        if not self._links_blocks:
            return NO_ENDS
        return block_ends(group, sizes.total(self.num_ranks) + self._stage_link_bytes(sizes))

    def _link_bytes(self, sizes: SegmentSizes) -> int:
        """Return bytes of the segment beside what the group of ranks uses."""
        of_blocks = block_link_bytes(self.num_ranks) if self._links_blocks else 0
        return self._stage_link_bytes(sizes) + of_blocks

    def _stage_link_bytes(self, sizes: SegmentSizes) -> int:
        """Return bytes of the links between stages."""
        return 0

    def _sample(self, checkpoint: Checkpoint) -> str:
        """Return what ranks compare of the checkpoint before they load; "": nothing, since all read
        the same tensors and compare digests."""
        return ""

    def _compare(self, executor: LeadingExecutor, ranks: Sequence[tuple[int, RankReady]]) -> None:
        """Raise ModelError where a rank has loaded something else than rank 0."""
        loaded = ready_of(executor.recipe, executor.weights_digest)
        for rank, ready in ranks:
            check_ready(rank, ready, loaded)

    def _start(
        self,
        rank: int,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        sizes: SegmentSizes,
        cpus: tuple[int, ...],
    ) -> RankStart:
        cache = options.pack_cache
        return RankStart(
            rank=rank,
            degree=self.num_ranks,
            version=installed_version(),
            program=to_plain(program),
            checkpoint=str(checkpoint.path.resolve()),
            limits=asdict(options.limits),
            num_threads=self._threads(options),
            isa="",  # QUIRE_ISA and the machine are those of rank 0
            cpus=cpus,
            pack_cache=None if cache is None else str(cache.folder),
            slot_bytes=sizes.slot_bytes,
            message_bytes=sizes.message_bytes,
            timeout_s=self.timeout_s,
            log_level=log_module.process_level,
            log_form=log_module.process_form,
            poison=self.poison,
            links_blocks=self._links_blocks,
            **self.kind.start_fields(rank),
        )


def _end(others: OtherRanks, kind: RankKind, unbind: Callable[[], None] | None = None) -> None:
    """End the other ranks, and then what they met by; unbind the thread of rank 0."""
    if unbind is not None:
        unbind()
    try:
        others.end()
    finally:
        kind.remove_files()


def _slot_bytes(program: Program) -> int:
    """Return bytes of the largest part of a row, or more, so that several rows are exchanged at
    once."""
    parts = [_SLOT_BYTES]
    for ops in program.segments.values():
        for op in ops:
            if isinstance(op, AllGather):
                start, end = share_of(op.x.width, op.unit, 0, op.degree)  # rank 0's is the largest
                parts.append((end - start) * op.x.dtype.itemsize)
            if isinstance(op, Attention) and op.degree > 1:
                parts.append(op.heads * (op.head_dim + 2) * DType.F32.itemsize)
            if isinstance(op, AllReduce):
                parts.append(op.x.width * op.x.dtype.itemsize)
            if isinstance(op, Experts) and op.holders:
                parts.append(op.x.width * op.y.dtype.itemsize)  # a row of an expert's output
            elif isinstance(op, Experts):
                own = op.own_inner(program.weights[op.down].columns)
                parts.append(own * op.x.dtype.itemsize)
    return max(parts)
