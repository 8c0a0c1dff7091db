"""Weights that do not fit in memory: most of a program's are in memory, the others are read from
the file of packed weights in each step, ahead of their use.

Chooses which weights are read (StreamPlan), of one program or of the shares of several ranks, makes
the file (quire/weights/pack_cache.py) without holding the model, and is an ExecutorClass of
NativeExecutors with such weights. How bytes are read ahead is
native/include/quire/weight_stream.h. Always holds: answers are those of weights in memory, bit for
bit, since only the time differs at which bytes come.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from quire import _native
from quire.base.errors import CapacityError, SettingError
from quire.base.log import Log
from quire.config.machine import MachineMemory
from quire.config.memory import mib
from quire.execute.executor import ExecutorMemory, ExecutorOptions, Progress, StepLimits
from quire.execute.missing_memory import missing_bytes
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import NativeSizing
from quire.execute.packing import (
    Packed,
    empty_weight,
    pack,
    packed_file,
    recipe_of,
    weight_arguments,
)
from quire.program.declarations import Weight
from quire.program.ops import Embed
from quire.program.program import Program
from quire.weights.binding import Binding
from quire.weights.checkpoint import Checkpoint
from quire.weights.pack_cache import (
    PackCache,
    PackedFile,
    PackWriter,
    Unusable,
    stamp_of,
)

# Read ahead at least, where so much is streamed: a fast disk's bytes of some ten milliseconds.
WINDOW_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """names: of the weights that are read in each step, in the order of their use. streamed_bytes:
    of these. window_bytes: memory for those read ahead and in use."""

    names: tuple[str, ...]
    streamed_bytes: int
    window_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Memory that is saved."""
        return self.streamed_bytes - self.window_bytes


def plan_stream(program: Program, offload_bytes: int) -> StreamPlan:
    """Choose weights of at least `offload_bytes`, spread evenly over the layers, so that the disk
    is busy while the others are computed with.

    Only matrices of layers are streamed: the embedding and the head are needed in parts, or several
    times in a step. Raises SettingError where those of all layers are fewer.
    """
    groups = list(_streamable(program))
    sizes = {
        name: empty_weight(program.weights[name]).num_bytes for group in groups for name in group
    }
    total = sum(sizes.values())
    if offload_bytes > total:
        raise _too_much(program.name, offload_bytes, total)
    names: list[str] = []
    seen = streamed = largest = 0
    for group in groups:
        of_group = 0
        for name in group:
            seen += sizes[name]
            if streamed * total < offload_bytes * seen:
                names.append(name)
                streamed += sizes[name]
                of_group += sizes[name]
        largest = max(largest, of_group)
    window = min(streamed, max(WINDOW_BYTES, 2 * largest))
    return StreamPlan(names=tuple(names), streamed_bytes=streamed, window_bytes=window)


def _too_much(name: str, offload_bytes: int, total: int) -> SettingError:
    return SettingError(
        f"disk_offload_gb asks for {mib(offload_bytes)} of weights to stay on disk; {name} has "
        f"{mib(total)} of weights in layers, and only these are read ahead"
    )


def _streamable(program: Program) -> Iterator[tuple[str, ...]]:
    """Yield the matrices of each operation of the trunk that no other operation uses."""
    uses: dict[str, int] = {}
    for ops in program.segments.values():
        for op in ops:
            for name in op.weights:
                uses[name] = uses.get(name, 0) + 1
    for op in program.segments["trunk"]:
        if isinstance(op, Embed):
            continue
        names = tuple(
            name
            for name in op.weights
            if uses[name] == 1 and str(program.weights[name].form) == "matrix"
        )
        if names:
            yield names


def plan_streams(programs: Sequence[Program], offload_bytes: int) -> tuple[StreamPlan, ...]:
    """Choose weights of at least `offload_bytes` over the programs of all ranks, of each as large a
    part of what it can stream. Raises SettingError as plan_stream does."""
    sizes = [streamable_bytes(own) for own in programs]
    total = sum(sizes)
    if offload_bytes > total:
        raise _too_much(programs[0].name, offload_bytes, total)
    return tuple(
        plan_stream(own, -(-offload_bytes * size // max(total, 1)))
        for own, size in zip(programs, sizes, strict=True)
    )


def without_streamed(
    memory: Sequence[ExecutorMemory], plans: Sequence[StreamPlan]
) -> list[ExecutorMemory]:
    """Return the memory of each rank without its weights on disk, with its window for reading
    ahead."""
    return [
        replace(whole, weights_bytes=whole.weights_bytes - plan.saved_bytes)
        for whole, plan in zip(memory, plans, strict=True)
    ]


@dataclass(slots=True, kw_only=True)
class StreamSize:
    """How many weights stay on disk: offload_bytes of all ranks together; None: as many as do not
    fit beside step buffers and a KV cache of kv_bytes (None: the default share of what is left
    without weights on disk). buffers: of KV blocks on their way, in bytes, given those of a cached
    token; None: there are none."""

    offload_bytes: int | None
    kv_bytes: int | None = None
    buffers: Callable[[int], int] | None = None
    # The choice for programs is made once: memory is free or not at different times.
    _plans: dict[tuple[tuple[Weight, ...], ...], tuple[StreamPlan, ...]] = field(
        default_factory=dict
    )

    def plans(
        self,
        programs: Sequence[Program],
        memory_with: Callable[[Sequence[StreamPlan]], ExecutorMemory],
        available: Callable[[], MachineMemory],
        *,
        max_sequences: int,
    ) -> tuple[StreamPlan, ...]:
        """Return what each rank reads, by its program. memory_with: see fitting_streams.

        Raises SettingError.
        """
        key = tuple(tuple(own.weights.values()) for own in programs)
        if key not in self._plans:
            self._plans[key] = self._chosen(programs, memory_with, available, max_sequences)
        return self._plans[key]

    def _chosen(
        self,
        programs: Sequence[Program],
        memory_with: Callable[[Sequence[StreamPlan]], ExecutorMemory],
        available: Callable[[], MachineMemory],
        max_sequences: int,
    ) -> tuple[StreamPlan, ...]:
        if self.offload_bytes is not None:
            return plan_streams(programs, self.offload_bytes)
        whole = memory_with(plan_streams(programs, 0))
        return fitting_streams(
            programs,
            memory_with,
            available().available_bytes,
            kv_bytes=self.kv_bytes,
            max_sequences=max_sequences,
            buffer_bytes=0 if self.buffers is None else self.buffers(whole.token_bytes),
        )


@dataclass(frozen=True, slots=True)
class StreamingExecutorClass(NativeSizing):
    """An ExecutorClass (see quire/execute/executor.py) of one rank. size: of what stays on disk."""

    size: StreamSize

    def check_program(self, program: Program) -> None:
        """See ExecutorClass."""
        NativeExecutor.check_program(program)

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """See ExecutorSizing: without the weights on disk, with the window for reading ahead."""
        whole = NativeExecutor.memory_for(program, limits)
        return without_streamed([whole], [self._plan(program, limits)])[0]

    def plans_in_flight(self) -> int:
        """See ExecutorClass."""
        return NativeExecutor.plans_in_flight()

    def __call__(
        self, program: Program, checkpoint: Checkpoint, options: ExecutorOptions
    ) -> NativeExecutor:
        plan = self._plan(program, options.limits)
        return NativeExecutor(
            program, checkpoint, options, load_weights=partial(load_streamed, plan)
        )

    def _plan(self, program: Program, limits: StepLimits) -> StreamPlan:
        def memory_with(plans: Sequence[StreamPlan]) -> ExecutorMemory:
            return without_streamed([NativeExecutor.memory_for(program, limits)], plans)[0]

        (plan,) = self.size.plans(
            [program], memory_with, self.available_memory, max_sequences=limits.max_sequences
        )
        return plan


def fitting_streams(
    programs: Sequence[Program],
    memory_with: Callable[[Sequence[StreamPlan]], ExecutorMemory],
    available_bytes: int,
    *,
    kv_bytes: int | None,
    max_sequences: int,
    buffer_bytes: int = 0,
) -> tuple[StreamPlan, ...]:
    """Choose as few weights as do not fit in memory beside buffers, reserve and KV cache; all that
    can be read from disk where even these are too few, which the memory plan then reports.

    memory_with: returns what the programs of all ranks take of the memory with weights on disk.
    kv_bytes: of the KV cache; None: the default share of what is left beside the buffers, and of
    the tables of max_sequences requests. buffer_bytes: see missing_bytes.
    """
    plans, everything = plan_streams(programs, 0), sum(map(streamable_bytes, programs))
    while True:
        excess = missing_bytes(
            programs[0],
            memory_with(plans),
            available_bytes,
            kv_bytes=kv_bytes,
            max_sequences=max_sequences,
            buffer_bytes=buffer_bytes,
        )
        streamed = sum(plan.streamed_bytes for plan in plans)
        if excess <= 0 or streamed >= everything:
            return plans
        # The windows take a part of what is saved.
        plans = plan_streams(programs, min(streamed + excess, everything))


def streamable_bytes(program: Program) -> int:
    """Return the bytes of all weights that can be read from disk in each step."""
    return sum(
        empty_weight(program.weights[name]).num_bytes
        for group in _streamable(program)
        for name in group
    )


def load_streamed(
    plan: StreamPlan,
    program: Program,
    binding: Binding,
    pool: _native.Pool,
    progress: Progress | None,
    cache: PackCache | None,
) -> Packed:
    """Return all weights, those of the plan read from the cache's file; it is made where it is
    missing.

    Raises CapacityError where the file cannot be written, ValueError without a cache.
    """
    if cache is None:
        raise ValueError("weights are read from the file of a pack cache, and there is none")
    path = cache.path(recipe_of(program, binding.checkpoint.path), binding.checkpoint.path)
    try:
        found = packed_file(path, program, binding, pool, progress)
    except (FileNotFoundError, Unusable) as why:
        if isinstance(why, Unusable):
            cache.log.warning("packed weights are made anew", file=str(path), reason=str(why))
        _make_file(cache, program, binding, pool, progress)
        found = packed_file(path, program, binding, pool, None)
    except OSError as error:
        raise CapacityError(f"{path} cannot be read: {error.strerror}") from error
    stream = _stream(plan, found, cache.log)
    streamed = {name: index for index, name in enumerate(plan.names)}
    weights = {
        name: _native.Weight(*weight_arguments(weight), stream, streamed[name])
        if name in streamed
        else _native.Weight(*weight_arguments(weight), found.weights[name])
        for name, weight in program.weights.items()
    }
    return Packed(weights=weights, digest=found.weights_digest, coarse_rows=found.coarse_rows)


def _make_file(
    cache: PackCache,
    program: Program,
    binding: Binding,
    pool: _native.Pool,
    progress: Progress | None,
) -> None:
    """Pack into the cache's file, one weight in memory at a time."""
    recipe = recipe_of(program, binding.checkpoint.path)
    path = cache.path(recipe, binding.checkpoint.path)
    writer = None
    try:
        writer = PackWriter(
            path,
            recipe,
            total_bytes=program.weight_bytes,
            stamp=stamp_of(binding.checkpoint.files),
        )
        packed = pack(program, binding, pool, progress, _Written(writer))
        writer.finish(packed.digest, packed.coarse_rows)
        cache.log.event("packed weights are kept", file=str(path), num_bytes=writer.num_bytes)
        writer = None
    except OSError as error:
        raise CapacityError(
            f"{path} cannot be written ({error.strerror or error}), and weights that stay on disk "
            f"are read from it: {mib(program.weight_bytes)} are needed; free them, or give another "
            "--pack-cache"
        ) from error
    finally:
        if writer is not None:
            writer.abandon()


@dataclass(frozen=True, slots=True)
class _Written:
    """Takes packed weights one by one and keeps none in memory."""

    writer: PackWriter

    def add(self, name: str, weight: _native.Weight, pool: _native.Pool) -> bool:
        """Append a weight to the file; returns whether it stays in memory, too."""
        packed = weight.packed
        self.writer.add(name, packed, _native.content_digest(packed, pool))
        return False


def _stream(plan: StreamPlan, found: PackedFile, log: Log) -> _native.WeightStream:
    """Open the file once more, past the page cache where the file system can."""
    ranges = [(found.starts[name], len(found.weights[name])) for name in plan.names]
    found.forget(plan.names)
    flags, direct = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, getattr(os, "O_DIRECT", 0)
    try:
        descriptor, is_direct = os.open(found.path, flags | direct), bool(direct)
    except OSError:  # some file systems have no direct reads
        descriptor, is_direct = os.open(found.path, flags), False
    try:
        if not found.is_same(os.fstat(descriptor)):
            raise CapacityError(
                f"{found.path} was replaced while it was opened; start again, and let one engine "
                "at a time make the file"
            )
        if hasattr(os, "posix_fadvise"):
            for start, size in ranges:
                os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
        stream = _native.WeightStream(descriptor, ranges, plan.window_bytes, is_direct=is_direct)
    finally:
        os.close(descriptor)
    log.event(
        "weights are read from disk in each step",
        file=str(found.path),
        bytes_per_step=plan.streamed_bytes,
        window_bytes=plan.window_bytes,
        past_the_page_cache=is_direct,
    )
    return stream
