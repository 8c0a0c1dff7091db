"""RankKind: what the ranks of a model compute with, as executor_class.py needs it; and NativeRanks,
the compiled kernels.

Knows executors; no process. The kind of the torch executor is in torch_kind.py, since it imports
PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.comm.shared_memory import SharedMemoryRank
from quire.config.machine import MachineMemory
from quire.execute.executor import ExecutorClass, ExecutorMemory, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import NativeSizing
from quire.program.program import Program
from quire.ranks.leading import LeadingExecutor
from quire.ranks.rank_executor import MirroredExecutor
from quire.ranks.stage_executor import PipelineExecutor
from quire.ranks.stage_lead import LeadingStages
from quire.ranks.stages import StageLinks
from quire.weights.checkpoint import Checkpoint


class RankKind(Protocol):
    """Sizes, checks and makes the executors of ranks, each as an ExecutorClass does one."""

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of a machine share its memory, or each has a device of its own."""

    def check_program(self, program: Program) -> None:
        """Raise ModelError listing what executors of this kind do not support."""

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """Return the memory of one rank, by its program."""

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

    def for_programs(self, programs: Sequence[Program], limits: StepLimits) -> RankKind:
        """Return the kind that makes the executors of these programs, one a rank: what depends on
        the shares of all ranks is decided. Raises SettingError, CapacityError."""

    def start_fields(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank's start says of its executor; None for the native one."""

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


@dataclass(frozen=True, slots=True)
class NativeRanks(NativeSizing):
    """Ranks with the compiled kernels."""

    shares_memory: bool = True

    def check_program(self, program: Program) -> None:
        """See RankKind."""
        NativeExecutor.check_program(program)

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """See RankKind."""
        return NativeExecutor.memory_for(program, limits)

    def plans_in_flight(self) -> int:
        """See RankKind."""
        return NativeExecutor.plans_in_flight()

    def class_beside(self) -> ExecutorClass:
        """See RankKind."""
        return NativeExecutor

    def for_programs(self, programs: Sequence[Program], limits: StepLimits) -> NativeRanks:
        """See RankKind: nothing depends on them."""
        return self

    def start_fields(self, rank: int) -> dict[str, Any] | None:
        """See RankKind."""
        return None

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
        return MirroredExecutor(program, checkpoint, options, group, poison=poison)

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
            program, checkpoint, options, links.group, links, layers, poison=poison
        )

    def remove_files(self) -> None:
        """See RankKind: there are none."""


NATIVE = NativeRanks()
