"""RankKind: what the ranks of a model compute with, as executor_class.py needs it; and NativeRanks,
the compiled kernels.

Knows executors; no process. The kind of the torch executor is in torch_kind.py, since it imports
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from quire.comm.shared_memory import SharedMemoryRank
from quire.config.machine import MachineMemory
from quire.execute.executor import ExecutorClass, ExecutorMemory, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import NativeSizing
from quire.execute.packing import LoadWeights, load
from quire.execute.streamed_weights import (
    StreamPlan,
    StreamSize,
    load_streamed,
    without_streamed,
)
from quire.program.program import Program
from quire.ranks.leading import LeadingExecutor
from quire.ranks.rank_executor import MirroredExecutor
from quire.ranks.stage_executor import PipelineExecutor
from quire.ranks.stage_lead import LeadingStages
from quire.ranks.stages import StageLinks
from quire.weights.checkpoint import Checkpoint

# What ranks that take so much memory each take of the memory that they share, or of the largest
# one's.
Together = Callable[[Sequence[ExecutorMemory]], ExecutorMemory]


class RankKind(Protocol):
    """Sizes, checks and makes the executors of ranks, each as an ExecutorClass does one."""

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of a machine share its memory, or each has a device of its own."""

    def check_program(self, program: Program) -> None:
        """Raise ModelError listing what executors of this kind do not support."""

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """Return the memory of one rank, by its program, as if no weights were read from disk."""

    def memory_of_each(
        self, programs: Sequence[Program], limits: StepLimits, together: Together
    ) -> Sequence[ExecutorMemory]:
        """Return the memory of each rank, without what is read from a disk."""

    def head_rows(self, max_sequences: int) -> int:
        """See ExecutorSizing."""

    def full_step_tokens(self) -> int:
        """See ExecutorSizing."""

    def available_memory(self) -> MachineMemory:
        """See ExecutorClass."""

    def plans_in_flight(self) -> int:
        """See ExecutorClass."""

    def class_beside(self) -> ExecutorClass:
        """Return the class of executors of other models beside rank 0's: they are not divided."""

    def for_programs(
        self, programs: Sequence[Program], limits: StepLimits, together: Together
    ) -> RankKind:
        """Return the kind that makes the executors of these programs, one a rank: what depends on
        the shares of all ranks is decided. Raises SettingError, CapacityError."""

    def start_fields(self, rank: int) -> dict[str, Any]:
        """Return the fields of a rank's start that say how its executor is made."""

    def leading(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        *,
        poison: bool,
    ) -> LeadingExecutor:
        """Load the executor of rank 0."""

    def leading_stages(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        links: StageLinks,
        layers: tuple[int, ...],
        *,
        poison: bool,
    ) -> LeadingStages:
        """Load the executor of rank 0 of a pipeline; layers: how many each stage has."""

    def remove_files(self) -> None:
        """Remove the files that the ranks met by, once all have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRanks(NativeSizing):
    """Ranks with the compiled kernels. on_disk: how many of their weights are read from disk; None:
    all are in memory. streams: what each rank reads, once it is decided."""

    on_disk: StreamSize | None = None
    streams: tuple[StreamPlan, ...] = ()
    shares_memory: bool = True

    def check_program(self, program: Program) -> None:
        """See RankKind."""
        NativeExecutor.check_program(program)

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """See RankKind."""
        return NativeExecutor.memory_for(program, limits)

    def memory_of_each(
        self, programs: Sequence[Program], limits: StepLimits, together: Together
    ) -> Sequence[ExecutorMemory]:
        """See RankKind."""
        whole = [self.memory_for(own, limits) for own in programs]
        plans = self._streams(programs, limits, together)
        return without_streamed(whole, plans) if plans else whole

    def plans_in_flight(self) -> int:
        """See RankKind."""
        return NativeExecutor.plans_in_flight()

    def class_beside(self) -> ExecutorClass:
        """See RankKind."""
        return NativeExecutor

    def for_programs(
        self, programs: Sequence[Program], limits: StepLimits, together: Together
    ) -> NativeRanks:
        """See RankKind: what each reads from disk."""
        return replace(self, streams=self._streams(programs, limits, together))

    def start_fields(self, rank: int) -> dict[str, Any]:
        """See RankKind."""
        return {"stream": asdict(self.streams[rank])} if self.streams else {}

    def leading(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        *,
        poison: bool,
    ) -> LeadingExecutor:
        """See RankKind."""
        return MirroredExecutor(
            program, checkpoint, options, group, poison=poison, load_weights=self._load_weights()
        )

    def leading_stages(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        links: StageLinks,
        layers: tuple[int, ...],
        *,
        poison: bool,
    ) -> LeadingStages:
        """See RankKind."""
        return PipelineExecutor(
            program,
            checkpoint,
            options,
            links.group,
            links,
            layers,
            poison=poison,
            load_weights=self._load_weights(),
        )

    def remove_files(self) -> None:
        """See RankKind: there are none."""

    def _streams(
        self, programs: Sequence[Program], limits: StepLimits, together: Together
    ) -> tuple[StreamPlan, ...]:
        if self.on_disk is None:
            return ()
        whole = [self.memory_for(own, limits) for own in programs]
        return self.on_disk.plans(
            programs,
            lambda plans: together(without_streamed(whole, plans)),
            self.available_memory,
            max_sequences=limits.max_sequences,
        )

    def _load_weights(self) -> LoadWeights:
        """Return what loads the weights of rank 0."""
        return partial(load_streamed, self.streams[0]) if self.streams else load


NATIVE = NativeRanks()
