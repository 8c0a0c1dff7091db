"""with_kv_cache_dtype: the same program with its keys and values kept in another precision.

    with_kv_cache_dtype(program, "int8")

"f32" and "bf16": queries, keys and values are rounded to it where they are computed, and
attention multiplies in it. "int8", "fp8": they are computed as before, and each head's key and
value is stored as integers, or in e4m3, with a scale of its own
(quire/execute/reference_attention.py has the recipe).
A rewrite; loads nothing. Always holds: nothing but attention's operands changes its dtype.
"""

from __future__ import annotations

from dataclasses import replace

from quire.program.declarations import FP8_CACHE, INT8_CACHE
from quire.program.ops import Attention, StoreKV
from quire.program.program import Program
from quire.program.quantize import AUTO
from quire.program.tensors import DType, View

KV_CACHE_DTYPES = (AUTO, *(dtype.value for dtype in DType), INT8_CACHE, FP8_CACHE)


def with_kv_cache_dtype(program: Program, dtype: str) -> Program:
    """Return the program with its caches in `dtype`, one of KV_CACHE_DTYPES; "auto" leaves them."""
    if dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"{dtype!r} is no precision of a KV cache: {', '.join(KV_CACHE_DTYPES)}")
    if dtype == AUTO:
        return program
    if dtype in (INT8_CACHE, FP8_CACHE):
        caches = tuple(replace(cache, scheme=dtype) for cache in program.caches)
        return replace(program, caches=caches)
    return _computed_in(program, DType(dtype))


def kv_cache_text(program: Program) -> str:
    """Return how keys and values are kept: "f32", "bf16", "int8" or "fp8"."""
    return ", ".join(dict.fromkeys(cache.precision for cache in program.caches))


def _computed_in(program: Program, dtype: DType) -> Program:
    operands = {
        view.buffer.index
        for ops in program.segments.values()
        for op in ops
        if isinstance(op, (StoreKV, Attention))
        for view in op.inputs
    }
    buffers = tuple(
        replace(buffer, dtype=dtype) if buffer.index in operands else buffer
        for buffer in program.buffers
    )

    def over(view: View) -> View:
        return replace(view, buffer=buffers[view.buffer.index])

    return replace(
        program,
        buffers=buffers,
        segments={
            name: tuple(op.with_views(over) for op in ops) for name, ops in program.segments.items()
        },
        outputs={name: over(view) for name, view in program.outputs.items()},
        caches=tuple(replace(cache, dtype=dtype) for cache in program.caches),
    )
