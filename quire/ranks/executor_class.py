"""RankedExecutorClass: an executor of several ranks, as one to what uses it.

Sizes the sum of all ranks' memory, since they share a machine; starts the other ranks' processes
and loads rank 0's share meanwhile. Always holds: its answers are those of the native executor, bit
for bit (quire/program/shard.py).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from quire.base import log as log_module
from quire.base.log import Log
from quire.base.version import installed_version
from quire.comm.shared_memory import (
    TIMEOUT_S,
    SegmentSizes,
    SharedMemoryRank,
    create_segment,
)
from quire.execute.executor import (
    PART_TOKENS,
    ExecutorMemory,
    ExecutorOptions,
    StepLimits,
)
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import NativeSizing
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.expert_ops import Experts
from quire.program.expert_parallel import ExpertPlacement, ExpertPlan
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.serialize import to_plain
from quire.program.shard import SPLIT_EXPERTS, check_degree, shard
from quire.ranks.commands import command_bytes
from quire.ranks.placement import cpus_of_ranks, run_on
from quire.ranks.processes import RankProcesses
from quire.ranks.rank_executor import MirroredExecutor
from quire.ranks.start import RankReady, RankStart, check_ready, ready_of
from quire.weights.checkpoint import Checkpoint

# Rows of a step that are exchanged at once: more than this are exchanged in parts.
_SLOT_BYTES = 1 << 20


class RankedExecutor(MirroredExecutor):
    """The executor of rank 0, with the processes of the others."""

    processes: RankProcesses


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedExecutorClass(NativeSizing):
    """An ExecutorClass (see quire/execute/executor.py).

    experts: how whole experts are placed on ranks; None: each expert is split by columns. mode:
    whether products are split by inputs too. binds: whether ranks are bound to processors. poison:
    fill buffers with NaN before each run, for tests. timeout_s: the longest wait for a rank that
    responds.
    """

    degree: int
    experts: ExpertPlan | None = None
    mode: TpMode = TpMode.EXACT
    binds: bool = True
    poison: bool = False
    timeout_s: float = TIMEOUT_S

    @property
    def num_ranks(self) -> int:
        """How many processes there are."""
        return self.degree

    def check_program(self, program: Program) -> None:
        """Raise SettingError where it cannot be split so, ModelError where a kernel lacks."""
        check_degree(program, self.degree, self.placement(program))
        NativeExecutor.check_program(program)

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """The memory of all ranks together."""
        programs = self.programs(program)
        parts = [NativeExecutor.memory_for(own, limits) for own in programs]
        slots = 2 * self.num_ranks * max(map(_slot_bytes, programs))
        return ExecutorMemory(
            weights_bytes=sum(part.weights_bytes for part in parts),
            step_bytes=sum(part.step_bytes for part in parts) + slots,
            token_bytes=sum(part.token_bytes for part in parts),
        )

    def programs(self, program: Program) -> list[Program]:
        """Return each rank's share."""
        placement = self.placement(program)
        return [
            shard(program, degree=self.degree, rank=rank, placement=placement, mode=self.mode)
            for rank in range(self.degree)
        ]

    def placement(self, program: Program) -> ExpertPlacement:
        """Return the ranks of whole experts. Raises SettingError."""
        if self.experts is None:
            return SPLIT_EXPERTS
        return self.experts.placement(program, self.degree)

    def plans_in_flight(self) -> int:
        """See ExecutorClass."""
        return NativeExecutor.plans_in_flight()

    def __call__(
        self, program: Program, checkpoint: Checkpoint, options: ExecutorOptions
    ) -> RankedExecutor:
        parts = self.programs(program)
        sizes = self._sizes(parts, options.limits)
        cpus = cpus_of_ranks(self.num_ranks) if self.binds else [()] * self.num_ranks
        segment = create_segment(self.num_ranks, sizes, link_bytes=self._link_bytes(sizes))
        try:
            group = SharedMemoryRank(
                segment,
                rank=0,
                degree=self.num_ranks,
                sizes=sizes,
                timeout_s=self.timeout_s,
                members=self.degree,
            )
            with ExitStack() as undo:
                processes = RankProcesses(group)
                undo.callback(processes.end)
                for rank, part in enumerate(parts[1:], start=1):
                    start = self._start(rank, part, checkpoint, options, sizes, cpus[rank])
                    processes.start(start, segment)
                run_on(cpus[0])
                executor = self._rank_zero(parts, checkpoint, options, group, sizes, segment)
                self._compare(executor, processes.ready())
                undo.pop_all()
        finally:
            os.close(segment)
        Log("engine").event(
            "ranks are started",
            ranks=self.num_ranks,
            threads_of_each=self._threads(options),
            cpus="; ".join(",".join(map(str, own_cpus)) or "any" for own_cpus in cpus),
        )
        weakref.finalize(executor, processes.end)  # where a later part of the start fails
        executor.processes = processes
        executor.reason, executor.end = processes.reason, processes.end
        return executor

    def _threads(self, options: ExecutorOptions) -> int:
        return max(options.num_threads // self.num_ranks, 1)

    def _rank_zero(
        self,
        programs: Sequence[Program],
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        sizes: SegmentSizes,
        segment: int,
    ) -> RankedExecutor:
        own = replace(options, num_threads=self._threads(options), beside=None)
        return RankedExecutor(programs[0], checkpoint, own, group, poison=self.poison)

    def _sizes(self, programs: Sequence[Program], limits: StepLimits) -> SegmentSizes:
        return SegmentSizes(
            slot_bytes=max(map(_slot_bytes, programs)),
            message_bytes=command_bytes(
                tokens=max(limits.max_tokens, PART_TOKENS),
                samples=limits.max_samples,
                sequences=limits.max_sequences,
                positions=programs[0].max_positions,
            ),
        )

    def _link_bytes(self, sizes: SegmentSizes) -> int:
        """Bytes of the segment beside what the group of ranks uses."""
        return 0

    def _compare(self, executor: RankedExecutor, ranks: Sequence[tuple[int, RankReady]]) -> None:
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
        )


def _slot_bytes(program: Program) -> int:
    """Bytes of the largest part of a row, or more, so that several rows are exchanged at once."""
    parts = [_SLOT_BYTES]
    for ops in program.segments.values():
        for op in ops:
            if isinstance(op, AllGather):
                start, end = share_of(op.x.width, op.unit, 0, op.degree)  # rank 0's is the largest
                parts.append((end - start) * op.x.dtype.itemsize)
            if isinstance(op, AllReduce):
                parts.append(op.x.width * op.x.dtype.itemsize)
            if isinstance(op, Experts) and op.holders:
                parts.append(op.x.width * op.y.dtype.itemsize)  # a row of an expert's output
            elif isinstance(op, Experts):
                own = op.own_inner(program.weights[op.down].columns)
                parts.append(own * op.x.dtype.itemsize)
    return max(parts)
