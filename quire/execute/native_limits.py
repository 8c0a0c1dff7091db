"""What the native executor can hold, and the memory it needs: asked before anything is packed.

The numbers follow native/include/quire. Knows programs and step limits; runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from quire import _native
from quire.base.errors import SettingError
from quire.config.machine import MachineMemory, machine_memory, num_usable_cores
from quire.execute.executor import (
    HEAD_ROWS,
    PART_LIMITS,
    PART_TOKENS,
    ExecutorMemory,
    StepLimits,
)
from quire.execute.layout import lay_out
from quire.execute.rope_table import rope_bytes
from quire.program.declarations import FP8_CACHE
from quire.program.expert_ops import Experts
from quire.program.ops import Attention, Linear
from quire.program.program import Program

MAX_ROPES = 256
# Where products reach their peak: later on the matrix unit, which takes rows in blocks of 32.
_FEWEST_FULL_TOKENS = 128
_FULL_STEP_TOKENS: Mapping[str, int] = MappingProxyType({"amx": 256})


class NativeSizing:
    """The part of an ExecutorClass that all executors with these kernels have in common."""

    __slots__ = ()

    @staticmethod
    def head_rows(max_sequences: int) -> int:
        """See ExecutorClass."""
        return HEAD_ROWS

    @staticmethod
    def available_memory() -> MachineMemory:
        """See ExecutorClass."""
        return machine_memory()

    @staticmethod
    def full_step_tokens() -> int:
        """See ExecutorClass."""
        try:
            return full_step_tokens(_native.isa())
        except RuntimeError as error:  # its words name the instruction sets
            raise SettingError(str(error)) from error


def full_step_tokens(isa: str) -> int:
    """Return the tokens of a step with which products reach their peak, by instruction set."""
    return _FULL_STEP_TOKENS.get(isa, _FEWEST_FULL_TOKENS)


def problems_of(program: Program) -> list[str]:
    """Return what the kernels cannot hold of a program, in words."""
    return [
        *_cache_problems(program),
        *_rope_problems(program),
        *_weight_problems(program),
        *_expert_problems(program),
    ]


def memory_of(program: Program, limits: StepLimits) -> ExecutorMemory:
    """Return the memory for weights and cache, as the program says, and for the buffers' arena."""
    return ExecutorMemory(
        weights_bytes=program.weight_bytes,
        step_bytes=lay_out(program, limits).arena_bytes
        + lay_out(program, PART_LIMITS).arena_bytes
        + rope_bytes(program)
        + int_row_bytes(program, limits)
        + expert_bytes(program, limits)
        + context_bytes(program, limits),
        token_bytes=sum(cache.token_bytes for cache in program.caches),
    )


def int_row_bytes(program: Program, limits: StepLimits) -> int:
    """Return what rows of a step, or of a part by layers, take as integers, at most:
    native/include/quire/int_rows.h."""
    most = replace(limits, max_tokens=max(limits.max_tokens, PART_TOKENS))
    sizes = [
        most.rows(op.x.buffer.rows) * (-(-weight.columns // 64) * 136 + 64)
        for ops in program.segments.values()
        for op in ops
        if isinstance(op, Linear) and (weight := program.weights[op.weight]).ints is not None
    ]
    return max(sizes, default=0)


def expert_bytes(program: Program, limits: StepLimits) -> int:
    """Return scratch memory of the largest operation with experts, for as many threads as there are
    CPUs: native/include/quire/experts.h."""
    most = replace(limits, max_tokens=max(limits.max_tokens, PART_TOKENS))
    sizes = [
        _native.expert_bytes(
            most.rows(op.x.buffer.rows),
            experts=op.routing.width,
            top_k=op.top_k,
            hidden=op.x.width,
            inner=(inner := program.weights[op.down].columns),
            own=op.own_inner(inner),
            dtype=str(op.x.dtype),
            num_threads=num_usable_cores(),
            degree=op.degree if op.holders else 0,
            share=op.y.width if op.holders else 0,
        )
        for ops in program.segments.values()
        for op in ops
        if isinstance(op, Experts)
    ]
    return max(sizes, default=0)


def context_bytes(program: Program, limits: StepLimits) -> int:
    """Return scratch memory of attention over the pieces of several ranks:
    native/include/quire/context_attention.h."""
    tokens = max(limits.max_tokens, PART_TOKENS)
    sizes = [
        _native.context_bytes(
            tokens, heads=op.heads, head_dim=op.head_dim, rank=op.rank, degree=op.degree
        )
        for op in program.segments["trunk"]
        if isinstance(op, Attention) and op.degree > 1
    ]
    return max(sizes, default=0)


def _expert_problems(program: Program) -> Iterator[str]:
    most = max((weight.experts for weight in program.weights.values()), default=0)
    if most > _native.MAX_EXPERTS:
        yield f"its layers have {most} experts; at most {_native.MAX_EXPERTS} are held"


def _cache_problems(program: Program) -> Iterator[str]:
    if len(program.caches) > 1:
        yield f"it has {len(program.caches)} KV caches; one is held"
    for cache in program.caches:
        if cache.head_dim > _native.MAX_HEAD_DIM:
            yield (
                f"its heads have {cache.head_dim} columns (head_dim); at most "
                f"{_native.MAX_HEAD_DIM} are held"
            )
        if cache.scheme == FP8_CACHE:
            yield (
                "its keys and values are kept in fp8, which --executor torch holds; f32, bf16 and "
                "int8 are held here: --kv-cache-dtype int8 takes as much memory"
            )


def _rope_problems(program: Program) -> Iterator[str]:
    if len(program.ropes) > MAX_ROPES:
        yield f"it has {len(program.ropes)} tables of angles; at most {MAX_ROPES} are held"


def _weight_problems(program: Program) -> Iterator[str]:
    names = [
        weight.name
        for weight in program.weights.values()
        if weight.quantized is not None and weight.quantized.is_float
    ]
    if names:
        yield (
            f"{len(names)} of its weights are kept in fp8 ({names[0]} and so on), which CPUs have "
            "no instructions for and --executor torch multiplies; --quantization none brings them "
            "to --dtype, and int8, where the checkpoint itself is not in fp8, takes as much memory"
        )
