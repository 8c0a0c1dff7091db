"""Which layers of a model keep their matrices in host memory, for models larger than the device.

Whole layers are chosen, spread evenly over the model, so that a copy has the time in which the
layers between are computed. Matrices of products only: the embedding and the head are needed in
parts, or several times in a step. Imports no PyTorch. Always holds: a plan saves what was asked
for, or there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from quire.base.errors import CapacityError, SettingError
from quire.config.machine import MachineMemory, machine_memory, shared_memory
from quire.config.memory import mib
from quire.execute.executor import ExecutorMemory
from quire.execute.missing_memory import missing_bytes
from quire.program.declarations import Weight
from quire.program.ops import Linear
from quire.program.program import Program
from quire.quant.scheme import ACTIVATION_GROUP

# Layers on the device at once of those in host memory: one that is computed with, two ahead.
SLOTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """layers: the matrices of each layer in host memory, in the order of their use. copied_bytes:
    of all of them, the most that a step copies. slot_bytes: of the largest layer."""

    layers: tuple[tuple[str, ...], ...] = ()
    copied_bytes: int = 0
    slot_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Memory of the device that is saved."""
        return max(self.copied_bytes - SLOTS * self.slot_bytes, 0)


NO_OFFLOAD = OffloadPlan()


def plan_offload(program: Program, saved_bytes: int, *, is_gpu: bool) -> OffloadPlan:
    """Choose as few layers as save `saved_bytes` of the device's memory.

    Raises SettingError where those of all layers save less.
    """
    if saved_bytes <= 0:
        return NO_OFFLOAD
    layers = list(matrices_of_layers(program))
    sizes = [
        sum(moved_bytes(program.weights[name], is_gpu=is_gpu) for name in layer) for layer in layers
    ]
    plan = NO_OFFLOAD
    for count in range(SLOTS + 1, len(layers) + 1):
        chosen = [(2 * at + 1) * len(layers) // (2 * count) for at in range(count)]
        plan = OffloadPlan(
            layers=tuple(layers[at] for at in chosen),
            copied_bytes=sum(sizes[at] for at in chosen),
            slot_bytes=max(sizes[at] for at in chosen),
        )
        if plan.saved_bytes >= saved_bytes:
            return plan
    raise SettingError(
        f"cpu_offload_gb asks for {mib(saved_bytes)} of weights less on the device; the "
        f"{len(layers)} layers of {program.name} have {mib(sum(sizes))}, of which {SLOTS} layers "
        f"are on the device at any time, so that at most {mib(plan.saved_bytes)} are saved: lower "
        "it, or take fewer bits (--quantization int4)"
    )


def matrices_of_layers(program: Program) -> Iterable[tuple[str, ...]]:
    """Yield the matrices of each layer's products that can be copied for each step."""
    trunk, starts = program.segments["trunk"], program.layer_starts
    uses: dict[str, int] = {}
    for ops in program.segments.values():
        for op in ops:
            for name in op.weights:
                uses[name] = uses.get(name, 0) + 1
    firsts = [0, *starts[1:], len(trunk)]
    for first, end in pairwise(firsts):
        names = tuple(
            op.weight
            for op in trunk[first:end]
            if isinstance(op, Linear)
            and uses[op.weight] == 1
            and _keeps_its_form(program.weights[op.weight])
        )
        if names:
            yield names


def moved_bytes(weight: Weight, *, is_gpu: bool) -> int:
    """Return the bytes of a matrix that are copied: its scales stay on the device. Plain PyTorch
    holds integers of 4 bits in a byte each."""
    elements = weight.rows * weight.columns
    scheme = weight.quantized
    if scheme is None:
        return elements * weight.dtype.itemsize
    return elements * scheme.bits // 8 if is_gpu else elements


def _keeps_its_form(weight: Weight) -> bool:
    """Return whether products take the matrix as it was loaded: fp8 is padded to whole groups
    first."""
    scheme = weight.quantized
    return scheme is None or not scheme.is_float or weight.columns % ACTIVATION_GROUP == 0


@dataclass(slots=True, kw_only=True)
class OffloadSize:
    """How much device memory is to be saved: saved_bytes; None: as much as weights lack beside step
    buffers and a KV cache of kv_bytes (None: the default share of what is left without offload).
    buffers: of KV blocks on their way and of what drafts, in bytes of the device, given those of a
    cached token; None: there are none. exchange_bytes: of the device that exchanges with other
    ranks take. host_bytes: of the host's memory that something else of the engine takes.
    num_engines, num_ranks: engines that share the host, and ranks of each of them there."""

    saved_bytes: int | None
    kv_bytes: int | None = None
    buffers: Callable[[int], int] | None = None
    exchange_bytes: int = 0
    host_bytes: int = 0
    num_engines: int = 1
    num_ranks: int = 1
    # The choice of each program is made once: memory is free or not at different times.
    _plans: dict[tuple[Weight, ...], OffloadPlan] = field(default_factory=dict)

    def beside(self, buffers: Callable[[int], int], host_bytes: int) -> OffloadSize:
        """Return the same beside other buffers and more host memory, with nothing chosen yet."""
        host_bytes += self.host_bytes
        return replace(self, buffers=buffers, host_bytes=host_bytes, _plans={})

    def plan(
        self,
        program: Program,
        whole: ExecutorMemory,
        available: Callable[[], MachineMemory],
        *,
        max_sequences: int,
        is_gpu: bool,
    ) -> OffloadPlan:
        """Return which layers are in host memory. whole: the memory without offload.

        Raises SettingError, CapacityError.
        """
        key = tuple(program.weights.values())  # shares of ranks differ in their sizes only
        if key not in self._plans:
            saved = self.saved_bytes
            if saved is None:
                saved = missing_bytes(
                    program,
                    whole,
                    available().available_bytes,
                    kv_bytes=self.kv_bytes,
                    max_sequences=max_sequences,
                    buffer_bytes=self._buffer_bytes(whole.token_bytes),
                )
            plan = plan_offload(program, saved, is_gpu=is_gpu)
            self._check_host(plan)
            self._plans[key] = plan
        return self._plans[key]

    def _buffer_bytes(self, token_bytes: int) -> int:
        blocks = 0 if self.buffers is None else self.buffers(token_bytes)
        return blocks + self.exchange_bytes

    def _check_host(self, plan: OffloadPlan) -> None:
        free = shared_memory(machine_memory(), self.num_engines)
        left_bytes = max(free.available_bytes - self.host_bytes, 0) // self.num_ranks
        beside = f", for each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        if self.host_bytes:
            beside += f", beside KV blocks and what drafts ({mib(self.host_bytes)})"
        if plan.copied_bytes > left_bytes:
            raise CapacityError(
                f"cpu_offload_gb: {mib(plan.copied_bytes)} of weights would stay in host memory, "
                f"of which {mib(left_bytes)} are available ({free.limit}{beside}); lower it, or "
                "take fewer bits (--quantization int4)"
            )
