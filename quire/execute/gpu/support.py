"""What the torch executor does not support of a program.

Asked by the executor before loading, and by plans. Imports no PyTorch, so that plans can be made on
machines without it.
"""

from __future__ import annotations

from quire.program.declarations import FP8_CACHE
from quire.program.ops import Embed
from quire.program.program import Program


def unsupported(program: Program, device: str, *, is_gpu: bool, has_fp8: bool) -> list[str]:
    """Return what `device` cannot hold or compute of a program, each with a way out."""
    problems = []
    if len(program.caches) > 1:
        problems.append(f"it has {len(program.caches)} KV caches; one is held")
    if is_gpu and _gathers_in_groups(program):
        problems.append(
            "its embedding is also the head and kept in 4 bits or in blocks, which rows are "
            "not gathered from on a GPU (--head-precision int8, fp8 or none)"
        )
    problems += _of_experts(program)
    if not has_fp8 and _uses_fp8(program):
        problems.append(
            f"its weights, or keys and values, are kept in fp8, which {device} cannot "
            "compute with: compute capability 8.9 and newer can (Ada, Hopper); --quantization "
            "int8 and --kv-cache-dtype int8 take as much memory"
        )
    return problems


def _of_experts(program: Program) -> list[str]:
    schemes = [weight.quantized for weight in program.weights.values() if weight.experts]
    if not any(scheme is not None and scheme.is_float for scheme in schemes):
        return []
    return [
        "its experts are kept in fp8, in blocks that would span experts (--quantization int8, int4 "
        "or none)"
    ]


def _gathers_in_groups(program: Program) -> bool:
    schemes = [
        program.weights[op.weight].quantized
        for ops in program.segments.values()
        for op in ops
        if isinstance(op, Embed)
    ]
    return any(scheme is not None and scheme.group != 0 for scheme in schemes)


def _uses_fp8(program: Program) -> bool:
    schemes = [weight.quantized for weight in program.weights.values()]
    return any(scheme is not None and scheme.is_float for scheme in schemes) or any(
        cache.scheme == FP8_CACHE for cache in program.caches
    )
