"""y = x @ W.T (+ bias) in bf16 or f32 with one order of K for any number of rows: the exact mode.

An output is made of pieces of PIECE columns of K. A piece is one chain of a tile's products in the
order of K; pieces are added in order, then the bias. How many rows a tile takes, and whether pieces
go to programs of their own (few rows: all of the chip must read weights) or one after the other
(many rows), changes no bit: weights are always the first operand and rows the second, so that every
tile is made of the same instruction with another number of rows.

Twin: reference_ops.linear, within the error of f32 sums. Knows no other scheme. Scratch for pieces
is the caller's (`Workspace`), used by one launch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, check_rows, check_vector
from quire.execute.gpu.kernels.rounding import as_type, dot

PIECE = 1024  # columns of K that are one chain; part of the mode's numerics
STEP = {torch.bfloat16: 64, torch.float32: 32}  # columns of K at a time
SPLIT_BELOW = 264  # programs: two for each of an H200's multiprocessors
NUM_COUNTERS = 4096


class Tile(NamedTuple):
    """Outputs and rows that one program makes, and how it is compiled."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int


FEW_ROWS = tuple(Tile(outputs=64, rows=rows, num_warps=4, num_stages=5) for rows in (16, 32, 64))
MANY_ROWS = Tile(outputs=128, rows=128, num_warps=8, num_stages=4)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Room for pieces of few rows: f32 `sums`, and int32 `arrived` [NUM_COUNTERS], zeros between
    launches. A launch for which it is too small makes its pieces one after the other."""

    sums: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def of(cls, elements: int, device: torch.device | str) -> Workspace:
        """Room for `elements` sums: pieces * rows * outputs of the largest product of few rows."""
        return cls(
            sums=torch.full((elements,), float("nan"), dtype=torch.float32, device=device),
            arrived=torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device),
        )


@triton.jit
def tile_of(index, NUM_N: tl.constexpr, num_r, GROUP: tl.constexpr):
    """(output tile, row tile) of a program: GROUP output tiles go over all rows together, so that
    the rows they share stay in cache."""
    of_group = GROUP * num_r
    first = (index // of_group) * GROUP
    size = min(NUM_N - first, GROUP)
    inside = index % of_group
    return first + inside % size, inside // size


@triton.jit(do_not_specialize=["rows", "num_r"])
def _linear(
    x,
    weight,
    bias,
    y,
    sums,
    arrived,
    rows,
    x_stride,
    weight_stride,
    y_stride,
    num_r,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PER_PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    tile_n, tile_r = tile_of(tl.program_id(0), NUM_N, num_r, 8)
    outputs = tile_n * BN + tl.arange(0, BN)
    r = tile_r * BR + tl.arange(0, BR)
    ks = tl.arange(0, BK)
    # Rows and outputs past the end read the first ones; what they give is not stored.
    w_at = weight + tl.where(outputs < N, outputs, 0).to(tl.int64)[:, None] * weight_stride
    x_at = x + tl.where(r < rows, r, 0).to(tl.int64)[None, :] * x_stride
    STEPS: tl.constexpr = (K + BK - 1) // BK
    piece = tl.program_id(1)
    part = tl.zeros([BN, BR], tl.float32)
    total = tl.zeros([BN, BR], tl.float32)
    if IS_SPLIT:
        for step in range(PER_PIECE):
            k = (piece * PER_PIECE + step) * BK + ks
            part = _step(w_at, x_at, k, part, K, K % (PER_PIECE * BK) == 0)
        stored = (r < rows)[None, :] & (outputs < N)[:, None]
        at = sums + r.to(tl.int64)[None, :] * N + outputs[:, None]
        size = rows.to(tl.int64) * N
        tl.store(at + piece * size, part, mask=stored)
        tl.debug_barrier()
        # Whoever comes last adds all pieces, in order.
        before = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel")
        if before == PIECES - 1:
            for other in range(PIECES):
                total += tl.load(at + other * size, mask=stored, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
            _store(total, bias, y, r, outputs, rows, y_stride, N, HAS_BIAS)
    else:
        for step in range(STEPS):
            k = step * BK + ks
            part = _step(w_at, x_at, k, part, K, K % BK == 0)
            if PIECES > 1:  # noqa: SIM102 (a constant: decided when compiled)
                if step % PER_PIECE == PER_PIECE - 1:
                    total += part
                    part = tl.zeros([BN, BR], tl.float32)
        if STEPS % PER_PIECE != 0 or PIECES == 1:
            total += part
        _store(total, bias, y, r, outputs, rows, y_stride, N, HAS_BIAS)


@triton.jit
def _step(w_at, x_at, k, part, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """part + the product of columns k, those past K counted as zeros."""
    if IS_WHOLE:
        w, columns = tl.load(w_at + k[None, :]), tl.load(x_at + k[:, None])
    else:
        w = tl.load(w_at + k[None, :], mask=(k < K)[None, :], other=0.0)
        columns = tl.load(x_at + k[:, None], mask=(k < K)[:, None], other=0.0)
    return dot(w, columns, part)


@triton.jit
def _store(total, bias, y, r, outputs, rows, y_stride, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0)[:, None]
    at = y + r.to(tl.int64)[None, :] * y_stride + outputs[:, None]
    stored = (r < rows)[None, :] & (outputs < N)[:, None]
    tl.store(at, as_type(total, y.dtype.element_ty), mask=stored)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> None:
    """y [R, N] = x [R, K] @ weight [N, K].T (+ bias f32 [N]).

    x and weight: both bf16 or both f32, any row stride (fast where strides are whole numbers of 16
    bytes). y: f32 or bf16. Without a workspace pieces are never split over programs.
    """
    (rows, columns), outputs = x.shape, weight.shape[0]
    check_rows("x", x)
    check_rows("weight", weight, columns=columns)
    check_rows("y", y, rows, outputs)
    check_vector("bias", bias, outputs, torch.float32)
    if x.dtype != weight.dtype or x.dtype not in STEP:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}; both bf16 or both f32 are needed")
    if rows == 0:
        return
    tile = next((tile for tile in FEW_ROWS if rows <= tile.rows), MANY_ROWS)
    step = STEP[x.dtype]
    num_n, num_r = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows)
    pieces = triton.cdiv(columns, PIECE)
    is_split = (
        workspace is not None
        and pieces > 1
        and num_n * num_r < min(SPLIT_BELOW, NUM_COUNTERS)
        and workspace.sums.numel() >= pieces * rows * outputs
    )
    _linear[num_n * num_r, pieces if is_split else 1](
        x,
        weight,
        bias if bias is not None else x,
        y,
        workspace.sums if workspace is not None else x,
        workspace.arrived if workspace is not None else x,
        rows,
        x.stride(0),
        weight.stride(0),
        y.stride(0),
        num_r,
        N=outputs,
        K=columns,
        BN=tile.outputs,
        BR=tile.rows,
        BK=step,
        PER_PIECE=PIECE // step,
        PIECES=pieces,
        IS_SPLIT=is_split,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )
