"""TorchExecutorClass: what is said of a program before it is loaded, and how an executor is made.

Knows a device and a mode; no steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.base.errors import CapacityError, ModelError, SettingError
from quire.config.machine import MachineMemory
from quire.execute.executor import HEAD_ROWS, ExecutorMemory, ExecutorOptions, StepLimits
from quire.execute.gpu.device import lacks_memory
from quire.execute.gpu.device_buffers import step_sizes
from quire.execute.gpu.exchange import ALONE, RankEnds
from quire.execute.gpu.executor import LaunchOptions, TorchExecutor
from quire.execute.gpu.expert_ops import scratch_bytes
from quire.execute.gpu.graphs import capture_of
from quire.execute.gpu.limits import FULL_STEP_TOKENS
from quire.execute.gpu.load import IntWeight, Pack, Stack, in_a_row, load
from quire.execute.gpu.memory import device_memory
from quire.execute.gpu.offload import to_host
from quire.execute.gpu.offload_plan import NO_OFFLOAD, OffloadPlan, OffloadSize
from quire.execute.gpu.place import GatherBuffers
from quire.execute.gpu.step_buffers import StepBuffers
from quire.execute.gpu.stream import stream_of
from quire.execute.gpu.support import unsupported
from quire.execute.layout import lay_out
from quire.execute.rope_table import rope_bytes
from quire.program.program import Program
from quire.weights.binding import bind
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TorchExecutorClass:
    """An ExecutorClass (see quire/execute/executor.py) for a device, in a mode.

    exact: a row's bits do not depend on the rows beside it. has_fp8: its kernels know it.
    captures: whether a GPU's steps are replayed from graphs. offload: device memory that weights in
    host memory save. ends: what a rank exchanges with others through. executor: the class of what
    is made. poison: fill buffers with NaN before each run, for tests.
    """

    device: torch.device
    exact: bool = True
    has_fp8: bool = True
    captures: bool = True
    offload: OffloadSize | None = None
    ends: RankEnds = ALONE
    executor: type[TorchExecutor] = TorchExecutor
    poison: bool = False

    def check_program(self, program: Program) -> None:
        """Raise ModelError listing what cannot be held, before anything is loaded."""
        problems = unsupported(
            program,
            str(self.device),
            is_gpu=self.device.type != "cpu",
            has_fp8=self.has_fp8,
        )
        if problems:
            raise ModelError(
                f"{program.name}: the torch executor cannot hold this model "
                "(--executor reference can):" + "".join(f"\n  - {problem}" for problem in problems)
            )

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """Return weights and cache as the program says, without what is in host memory; buffers
        share one arena."""
        whole = self._whole_memory(program, limits)
        saved = self.offloaded(program, limits).saved_bytes
        return replace(whole, weights_bytes=whole.weights_bytes - saved)

    def _whole_memory(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        return ExecutorMemory(
            weights_bytes=self._weight_bytes(program),
            step_bytes=lay_out(program, limits).arena_bytes
            + rope_bytes(program)
            + StepBuffers.num_bytes(**step_sizes(program, limits, self.device))
            + GatherBuffers.num_bytes(program, limits)
            + self._scratch_bytes(program, limits),
            token_bytes=sum(cache.token_bytes for cache in program.caches),
        )

    def offloaded(self, program: Program, limits: StepLimits) -> OffloadPlan:
        """Return which layers are in host memory. Raises SettingError, CapacityError."""
        if self.offload is None:
            return NO_OFFLOAD
        return self.offload.plan(
            program,
            self._whole_memory(program, limits),
            self.available_memory,
            max_sequences=limits.max_sequences,
            is_gpu=self.device.type != "cpu",
        )

    def _weight_bytes(self, program: Program) -> int:
        """As the program says; plain PyTorch holds integers of 4 bits in a byte each."""
        if self.device.type != "cpu":
            return program.weight_bytes
        return sum(
            weight.num_bytes
            if weight.ints is None
            else weight.rows * (weight.columns + 4 * weight.ints.num_groups(weight.columns))
            for weight in program.weights.values()
        )

    def _scratch_bytes(self, program: Program, limits: StepLimits) -> int:
        """Of what operations keep between their operands."""
        if self.device.type == "cpu":
            return scratch_bytes(program, limits)
        from quire.execute.gpu.attention_steps import partial_bytes
        from quire.execute.gpu.context_steps import context_bytes
        from quire.execute.gpu.expert_kernels import ExpertScratch
        from quire.execute.gpu.products import Scratch

        partials = partial_bytes(program, limits, exact=self.exact)
        partials += context_bytes(program, exact=self.exact)
        experts = ExpertScratch.num_bytes(program, limits)
        return partials + experts + Scratch.num_bytes(program, limits)

    def head_rows(self, max_sequences: int) -> int:
        """On a GPU all sequences' at once: their step and its head are one graph."""
        return HEAD_ROWS if self.device.type == "cpu" else max(HEAD_ROWS, max_sequences)

    def available_memory(self) -> MachineMemory:
        """See ExecutorClass."""
        return device_memory(self.device)

    def plans_in_flight(self) -> int:
        """See ExecutorClass: a GPU's next step is queued while it computes one."""
        return 1 if self.device.type == "cpu" else 2

    def full_step_tokens(self) -> int:
        """See ExecutorClass."""
        return 128 if self.device.type == "cpu" else FULL_STEP_TOKENS

    def __call__(
        self, program: Program, checkpoint: Checkpoint, options: ExecutorOptions
    ) -> TorchExecutor:
        if options.pack_cache is not None:
            raise SettingError(
                "pack_cache: the torch executor packs nothing; leave it out, or take the native "
                "executor"
            )
        self.check_program(program)
        if self.device.type == "cpu":
            torch.set_num_threads(options.num_threads)
        try:
            pack, stack = _packing(runs_kernels=self.device.type != "cpu")
            binding = bind(program, checkpoint)
            offload = self.offloaded(program, options.limits)
            in_host = {name for layer in offload.layers for name in layer}
            stream = stream_of(self.device)
            weights = load(
                program,
                binding,
                self.device,
                options.progress,
                pack=pack,
                stack=stack,
                kept=lambda name, weight: to_host(weight, stream) if name in in_host else weight,
            )
            captures = self.captures and not offload.layers
            return self.executor(
                program,
                weights,
                device=self.device,
                exact=self.exact,
                limits=options.limits,
                launch=LaunchOptions(
                    capture=capture_of(self.device) if captures else None,
                    offload=offload,
                    ends=self.ends,
                ),
                poison=self.poison,
            )
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            raise CapacityError(
                f"{program.name}: {program.weight_bytes} bytes of weights and a step of "
                f"{options.limits.max_tokens} tokens do not fit into the memory of "
                f"{self.device}; lower --max-num-batched-tokens or take a smaller model"
            ) from error


def _packing(*, runs_kernels: bool) -> tuple[Pack, Stack]:
    """Return how integer weights are packed for the operations, and those of experts together."""
    if not runs_kernels:
        return IntWeight.of, in_a_row
    from quire.execute.gpu.kernels.grouped_ints import stacked
    from quire.execute.gpu.products import pack_ints

    return pack_ints, stacked
