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
    problems += _of_experts(program, is_gpu=is_gpu)
    if is_gpu and any(cache.ranks > 1 for cache in program.caches):
        problems.append(
            "positions of its KV cache are divided over ranks, which have no kernel for it on a "
            "GPU yet (--context-parallel-size 1, --device cpu, or --executor native)"
        )
    if not has_fp8 and _uses_fp8(program):
        problems.append(
            f"its weights, or keys and values, are kept in fp8, which {device} cannot "
            "compute with: compute capability 8.9 and newer can (Ada, Hopper); --quantization "
            "int8 and --kv-cache-dtype int8 take as much memory"
        )
    return problems


def _of_experts(program: Program, *, is_gpu: bool) -> list[str]:
    weights = [weight for weight in program.weights.values() if weight.experts]
    problems = []
    if is_gpu and weights:
        problems.append(
            "it is a mixture of experts, which has no operations on a GPU yet "
            "(--executor native runs it, on CPUs)"
        )
    if any(weight.quantized is not None and weight.quantized.is_float for weight in weights):
        problems.append(
            "its experts are kept in fp8, in blocks that would span experts (--quantization int8, "
            "int4 or none)"
        )
    return problems


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
