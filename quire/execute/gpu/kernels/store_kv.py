"""Heads on their way to attention: q/k norm, rope, keys and values into the cache, in one launch.

`prepare_heads` does what the operations norm (by heads), rope and store_kv do one after the other,
and rounds where each of them stores: q [T, heads * D] is normed and turned, k is normed, turned and
stored in the cache, v is stored. `rope` and `store_kv` are those two operations alone, by the same
code. Twins: reference_ops.norm and rope, PagedRows.store. In a cache of integers or fp8 each head's
row has a scale of its own. Always holds: one program per row and run of heads, so a row's bits
depend on the row alone; a slot of -1 stores nothing. Letters: T rows, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.cache_layout import LayerCache
from quire.execute.gpu.kernels.launch import EXACT, check_rows, check_vector, power_of_two
from quire.execute.gpu.kernels.rounding import as_stored, as_type, scale_and_inverse

ELEMENTS = 512  # of a program: one warp
MAX_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class Angles:
    """Which rows turn how: cos, sin f32 [positions, rotary_dim / 2], rope_positions int32 [T]."""

    cos: torch.Tensor
    sin: torch.Tensor
    rope_positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each head with one weight for queries and one for keys, f32 [D]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@triton.jit
def _prepare(
    q_ptr,
    q_out_ptr,
    k_ptr,
    v_ptr,
    values_ptr,
    scales_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    rope_positions_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_stride,
    q_out_stride,
    k_stride,
    v_stride,
    block_stride,
    scale_block_stride,
    eps,
    steps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    RUN: tl.constexpr,
    KV_RUN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """One row's run of heads: of q, then of k, then of v, by the second program id."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1)
    Q_RUNS: tl.constexpr = (HEADS + RUN - 1) // RUN
    KV_RUNS: tl.constexpr = (KV_HEADS + KV_RUN - 1) // KV_RUN
    if run < Q_RUNS:
        if HEADS > 0:
            q_head = run * RUN + tl.arange(0, RUN)
            q_first, q_second, q_rest = _load(
                q_ptr + row * q_stride, q_head, HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD
            )
            q_first, q_second, q_rest = _normed_and_turned(
                q_first, q_second, q_rest, q_weight_ptr, eps, cos_ptr, sin_ptr, rope_positions_ptr,
                row, q_out_ptr.dtype.element_ty, HEAD_DIM, HALF, HALF_PAD, REST_PAD, HAS_NORM,
            )  # fmt: skip
            q_out = q_out_ptr + row * q_out_stride + q_head * HEAD_DIM
            is_head = q_head < HEADS
            _store(q_out, q_first, q_second, q_rest, is_head, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
    else:
        if KV_HEADS > 0:
            is_value = run - Q_RUNS >= KV_RUNS
            head = ((run - Q_RUNS) % KV_RUNS) * KV_RUN + tl.arange(0, KV_RUN)
            if is_value:
                first, second, rest = _load(
                    v_ptr + row * v_stride, head, KV_HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD
                )
            else:
                first, second, rest = _load(
                    k_ptr + row * k_stride, head, KV_HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD
                )
                first, second, rest = _normed_and_turned(
                    first, second, rest, k_weight_ptr, eps, cos_ptr, sin_ptr, rope_positions_ptr,
                    row, k_ptr.dtype.element_ty, HEAD_DIM, HALF, HALF_PAD, REST_PAD, HAS_NORM,
                )  # fmt: skip
            slot = tl.load(slots_ptr + row).to(tl.int64)
            is_stored = head < tl.where(slot >= 0, KV_HEADS, 0)
            block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            line = (is_value.to(tl.int32) * KV_HEADS + head) * BLOCK_SIZE + place  # in its block
            if HAS_SCALES:
                scale, inverse = scale_and_inverse(_largest(first, second, rest), steps)
                tl.store(scales_ptr + block * scale_block_stride + line, scale, mask=is_stored)
                is_finite = (scale == scale)[:, None]
                first = tl.where(is_finite, first, 0.0) * inverse[:, None]
                second = tl.where(is_finite, second, 0.0) * inverse[:, None]
                rest = tl.where(is_finite, rest, 0.0) * inverse[:, None]
            out = values_ptr + block * block_stride + line * HEAD_DIM
            _store(out, first, second, rest, is_stored, HEAD_DIM, HALF, HALF_PAD, REST_PAD)


@triton.jit
def _load(
    row_ptr,
    head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """Return heads in f32 as their first rotated half, their second, and what is not rotated."""
    half = tl.arange(0, HALF_PAD)[None, :]
    tail = tl.arange(0, REST_PAD)[None, :]
    is_head = (head < HEADS)[:, None]
    start = row_ptr + head[:, None] * HEAD_DIM
    first = tl.load(start + half, mask=is_head & (half < HALF), other=0.0)
    second = tl.load(start + HALF + half, mask=is_head & (half < HALF), other=0.0)
    rest = tl.load(start + 2 * HALF + tail, mask=is_head & (tail < HEAD_DIM - 2 * HALF), other=0.0)
    return first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)


@triton.jit
def _normed_and_turned(
    first,
    second,
    rest,
    weight_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    rope_positions_ptr,
    row,
    TYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """After q/k norm and rope, each rounded to TYPE, in f32 again."""
    half = tl.arange(0, HALF_PAD)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        mean_square = tl.div_rn(squares, HEAD_DIM * 1.0)
        factor = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))[:, None]
        tail = tl.arange(0, REST_PAD)
        first_weight = tl.load(weight_ptr + half, mask=half < HALF, other=0.0)
        second_weight = tl.load(weight_ptr + HALF + half, mask=half < HALF, other=0.0)
        is_rest = tail < HEAD_DIM - 2 * HALF
        rest_weight = tl.load(weight_ptr + 2 * HALF + tail, mask=is_rest, other=0.0)
        first = as_type(first * factor * first_weight[None, :], TYPE).to(tl.float32)
        second = as_type(second * factor * second_weight[None, :], TYPE).to(tl.float32)
        rest = as_type(rest * factor * rest_weight[None, :], TYPE).to(tl.float32)
    if HALF > 0:
        at = tl.load(rope_positions_ptr + row).to(tl.int64) * HALF + half
        cos = tl.load(cos_ptr + at, mask=half < HALF, other=0.0)[None, :]
        sin = tl.load(sin_ptr + at, mask=half < HALF, other=0.0)[None, :]
        turned = first * cos - second * sin
        second = as_type(second * cos + first * sin, TYPE).to(tl.float32)
        first = as_type(turned, TYPE).to(tl.float32)
    return first, second, rest


@triton.jit
def _store(
    start,
    first,
    second,
    rest,
    is_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """Heads at `start`, a pointer for each, in the pointers' type."""
    half = tl.arange(0, HALF_PAD)[None, :]
    tail = tl.arange(0, REST_PAD)[None, :]
    start = start[:, None]
    TYPE: tl.constexpr = start.dtype.element_ty
    is_half = is_head[:, None] & (half < HALF)
    is_rest = is_head[:, None] & (tail < HEAD_DIM - 2 * HALF)
    tl.store(start + half, as_stored(first, TYPE), mask=is_half)
    tl.store(start + HALF + half, as_stored(second, TYPE), mask=is_half)
    tl.store(start + 2 * HALF + tail, as_stored(rest, TYPE), mask=is_rest)


@triton.jit
def _largest(first, second, rest):
    """Return the largest magnitude of each head; NaN where one is not finite."""
    first, second, rest = tl.abs(first), tl.abs(second), tl.abs(rest)
    largest = tl.maximum(tl.max(first, 1), tl.maximum(tl.max(second, 1), tl.max(rest, 1)))
    # A maximum passes NaN by; a sum of what is less than infinity does not.
    odd = tl.sum(tl.where(first < float("inf"), 0, 1), 1)
    odd += tl.sum(tl.where(second < float("inf"), 0, 1), 1)
    odd += tl.sum(tl.where(rest < float("inf"), 0, 1), 1)
    return tl.where(odd > 0, float("nan"), largest)


def prepare_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    kv_slots: torch.Tensor,
    *,
    angles: Angles | None,
    norm: HeadNorm | None = None,
    q_out: torch.Tensor | None = None,
) -> None:
    """Norm and turn q [T, heads * D] into q_out (q itself where None); store k and v
    [T, kv_heads * D] at kv_slots int32 [T]. k stays as it is: it is read from the cache only."""
    _launch(q, q_out if q_out is not None else q, k, v, cache, kv_slots, angles, norm)


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, kv_slots: torch.Tensor) -> None:
    """Store k and v [T, kv_heads * D] at kv_slots int32 [T], -1 nowhere."""
    _launch(None, None, k, v, cache, kv_slots, None, None)


def rope(x: torch.Tensor, angles: Angles, *, head_dim: int) -> None:
    """Turn the heads of x [T, heads * D] in place."""
    check_rows("x", x)
    cos = angles.cos
    half = cos.shape[1]
    if cos.stride(1) != 1 or 2 * half > head_dim or x.shape[1] % head_dim:
        raise ValueError(
            f"angles of {half} pairs and {x.shape[1]} columns do not suit heads of {head_dim}"
        )
    _run(x, x, None, None, None, None, angles, None, head_dim=head_dim, kv_heads=0)


def _launch(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    kv_slots: torch.Tensor,
    angles: Angles | None,
    norm: HeadNorm | None,
) -> None:
    head_dim, kv_heads = cache.head_dim, cache.kv_heads
    rows = len(kv_slots)
    check_rows("k", k, rows, kv_heads * head_dim)
    check_rows("v", v, rows, kv_heads * head_dim)
    if q is not None and q_out is not None:
        check_rows("q", q, rows, q_out.shape[1])
        check_rows("q_out", q_out, rows)
    if norm is not None:
        check_vector("q_weight", norm.q_weight, head_dim, torch.float32)
        check_vector("k_weight", norm.k_weight, head_dim, torch.float32)
    if cache.scales is None and cache.values.dtype != k.dtype:
        raise ValueError(f"a cache of {cache.values.dtype} without scales for rows of {k.dtype}")
    _run(q, q_out, k, v, cache, kv_slots, angles, norm, head_dim=head_dim, kv_heads=kv_heads)


def _run(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: LayerCache | None,
    kv_slots: torch.Tensor | None,
    angles: Angles | None,
    norm: HeadNorm | None,
    *,
    head_dim: int,
    kv_heads: int,
) -> None:
    some: Any = q if q is not None else k
    heads = 0 if q is None else q.shape[1] // head_dim
    half = 0 if angles is None else angles.cos.shape[1]
    run, kv_run = (
        power_of_two(max(ELEMENTS // head_dim, 1), most=power_of_two(count))
        for count in (max(heads, 1), max(kv_heads, 1))
    )
    programs = -(-heads // run) + 2 * -(-kv_heads // kv_run)
    if not len(some) or not programs:
        return
    scales = None if cache is None else cache.scales
    is_int8 = cache is not None and cache.values.dtype == torch.int8
    _prepare[(len(some), programs)](
        some if q is None else q,
        some if q_out is None else q_out,
        some if k is None else k,
        some if v is None else v,
        some if cache is None else cache.values,
        some if scales is None else scales,
        some if kv_slots is None else kv_slots,
        some if angles is None else angles.cos,
        some if angles is None else angles.sin,
        some if angles is None else angles.rope_positions,
        some if norm is None else norm.q_weight,
        some if norm is None else norm.k_weight,
        0 if q is None else q.stride(0),
        0 if q_out is None else q_out.stride(0),
        0 if k is None else k.stride(0),
        0 if v is None else v.stride(0),
        0 if cache is None else cache.values.stride(0),
        0 if scales is None else scales.stride(0),
        0.0 if norm is None else norm.eps,
        127.0 if is_int8 else MAX_FP8,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=1 if cache is None else cache.block_size,
        HALF=half,
        HALF_PAD=power_of_two(half),
        REST_PAD=power_of_two(head_dim - 2 * half),
        RUN=run,
        KV_RUN=kv_run,
        HAS_NORM=norm is not None,
        HAS_SCALES=scales is not None,
        num_warps=1,
        **EXACT,
    )
