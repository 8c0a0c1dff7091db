"""y = x @ W.T (+ bias) in bf16 or f32 with one order of K for any number of rows: the exact mode.

An output is made of pieces of K: as few, by the shape of the undivided weight alone, as give few
rows enough programs to read it (`piece_of`); a rank's share of the outputs has the same pieces. A
piece is one chain of a tile's products in the order of K; pieces are added in order, then the bias.
How many rows and outputs a tile takes, and whether pieces go to programs of their own (few tiles:
all of the chip must read weights) or one after the other, changes no bit: weights are always the
first operand and rows the second, so that every tile is made of the same instruction with another
number of rows.

Twin: reference_ops.linear, within the error of f32 sums. Knows no other scheme. Scratch for pieces
is the caller's (`Workspace`), used by one launch at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, check_vector, launch_staged
from quire.execute.gpu.kernels.rounding import as_type, dot

FILL = 128  # programs that keep an H200 busy, about one for each of its multiprocessors
MAX_TILES = 1024  # that several programs share: at most 528 (linear_gemv.py)
PIECE_OUTPUTS = PIECE_ROWS = 64  # of the largest tile of few rows
# Part of the mode's numerics, with FILL and PIECE_OUTPUTS: pieces of a weight at most, and columns
# of K of the shortest; lengths are whole numbers of PIECE_STEP.
MAX_PIECES, SHORTEST_PIECE, PIECE_STEP = 8, 256, 128


class Tile(NamedTuple):
    """Outputs and rows that one program makes, how it is compiled, and columns of K at a time."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int
    columns: int = 128


# Large ones first. The largest reads least for what it multiplies (85 operations a byte); small
# ones have 32 KB of weights or more on their way, so that one for each multiprocessor will do.
BF16_TILES = (
    Tile(outputs=128, rows=256, num_warps=8, num_stages=4, columns=64),
    Tile(outputs=128, rows=128, num_warps=8, num_stages=4, columns=64),
    Tile(outputs=128, rows=64, num_warps=4, num_stages=4, columns=64),
    Tile(outputs=64, rows=64, num_warps=4, num_stages=3),
    Tile(outputs=64, rows=32, num_warps=4, num_stages=4),
    Tile(outputs=64, rows=16, num_warps=4, num_stages=5),
)
F32_TILES = (
    Tile(outputs=128, rows=64, num_warps=8, num_stages=4, columns=32),
    *(Tile(outputs=64, rows=r, num_warps=4, num_stages=5, columns=32) for r in (64, 32, 16)),
)
TILES = {torch.bfloat16: BF16_TILES, torch.float32: F32_TILES}


def piece_of(outputs: int, columns: int) -> tuple[int, int]:
    """(columns of a piece, pieces) of an undivided weight [outputs, columns]."""
    wanted = min(cdiv(FILL, cdiv(outputs, PIECE_OUTPUTS)), MAX_PIECES)
    wanted = max(min(wanted, columns // SHORTEST_PIECE), 1)
    length = cdiv(cdiv(columns, wanted), PIECE_STEP) * PIECE_STEP
    return length, cdiv(columns, length)


def max_sums(outputs: int, columns: int, max_rows: int, *, undivided: int = 0) -> int:
    """Return elements that a Workspace needs for a weight's pieces to be split whenever that helps.
    undivided: outputs of the whole weight, where this is a share."""
    _, pieces = piece_of(undivided or outputs, columns)
    # Where FILL tiles of few rows and more are needed, nothing is split.
    most = FILL * PIECE_OUTPUTS * PIECE_ROWS
    return pieces * min(max_rows * outputs, most) if pieces > 1 else 0


def choose_tile(
    tiles: Sequence[Tile], rows: int, outputs: int, *, pieces: int
) -> tuple[Tile, bool]:
    """Return the largest tile with enough programs, and whether each piece has a program of its own
    (`pieces` 1: they have not). Up to 64 rows are one tile's: weights are read once."""
    least = min(rows, PIECE_ROWS)
    fits = [tile for tile in tiles if least <= tile.rows < 2 * rows] or [tiles[-1]]
    for is_split in (False, True):
        for tile in fits:
            num_tiles = cdiv(outputs, tile.outputs) * cdiv(rows, tile.rows)
            if num_tiles * (pieces if is_split else 1) >= FILL:
                return tile, is_split
    return fits[-1], pieces > 1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch for partial sums of a tile that several programs share: f32 `sums`, and int32
    `arrived` [MAX_TILES], zeros between launches. Where it is too small, `linear` computes pieces
    one after the other, and `gemv` raises ValueError."""

    sums: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def of(cls, elements: int, device: torch.device | str) -> Workspace:
        """Return room for `elements` sums: the largest of max_sums and max_gemv_sums."""
        return cls(
            sums=torch.full((elements,), float("nan"), dtype=torch.float32, device=device),
            arrived=torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
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
    IS_WHOLE: tl.constexpr = K % (PER_PIECE * BK) == 0
    if IS_SPLIT:
        piece = tl.program_id(1)
        part = _piece(w_at, x_at, piece, ks, K, BN, BR, BK, PER_PIECE, IS_WHOLE)
        stored = (r < rows)[None, :] & (outputs < N)[:, None]
        at = sums + r.to(tl.int64)[None, :] * N + outputs[:, None]
        size = tl.cast(rows, tl.int64) * N
        tl.store(at + piece * size, part, mask=stored)
        tl.debug_barrier()
        # The last program adds all pieces, in order.
        before = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel")
        if before == PIECES - 1:
            total = tl.zeros([BN, BR], tl.float32)
            for other in tl.static_range(PIECES):
                total += tl.load(at + other * size, mask=stored, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
            _store(total, bias, y, r, outputs, rows, y_stride, N, HAS_BIAS)
    elif PIECES > 1:
        # What does not fit into registers lies in memory while a piece is made, and only then.
        total = tl.zeros([BN, BR], tl.float32)
        for piece in range(PIECES):
            total += _piece(w_at, x_at, piece, ks, K, BN, BR, BK, PER_PIECE, IS_WHOLE)
        _store(total, bias, y, r, outputs, rows, y_stride, N, HAS_BIAS)
    else:
        part = _piece(w_at, x_at, 0, ks, K, BN, BR, BK, PER_PIECE, IS_WHOLE)
        _store(part, bias, y, r, outputs, rows, y_stride, N, HAS_BIAS)


@triton.jit
def _piece(
    w_at,
    x_at,
    piece,
    ks,
    K: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PER_PIECE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Return the sums of one piece: a chain in the order of K."""
    part = tl.zeros([BN, BR], tl.float32)
    for step in range(PER_PIECE):
        part = _step(w_at, x_at, (piece * PER_PIECE + step) * BK + ks, part, K, IS_WHOLE)
    return part


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
    undivided: int = 0,
) -> None:
    """y [R, N] = x [R, K] @ weight [N, K].T (+ bias f32 [N]).

    x and weight: both bf16 or both f32, any row stride (fast where strides are whole numbers of 16
    bytes). y: f32 or bf16. Without a workspace pieces are never split over programs. undivided:
    outputs of the weight that this one is a share of; 0: it is whole.
    """
    (rows, columns), outputs = x.shape, weight.shape[0]
    check_rows("x", x)
    check_rows("weight", weight, columns=columns)
    check_rows("y", y, rows, outputs)
    check_vector("bias", bias, outputs, torch.float32)
    if x.dtype != weight.dtype or x.dtype not in TILES:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}; both bf16 or both f32 are needed")
    if rows == 0:
        return
    length, pieces = piece_of(undivided or outputs, columns)
    room = 0 if workspace is None else workspace.sums.numel()
    tile, is_split = choose_tile(
        TILES[x.dtype], rows, outputs, pieces=pieces if pieces * rows * outputs <= room else 1
    )
    num_n, num_r = cdiv(outputs, tile.outputs), cdiv(rows, tile.rows)
    launch_staged(
        _linear,
        (num_n * num_r, pieces if is_split else 1),
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
        BK=tile.columns,
        PER_PIECE=length // tile.columns,
        PIECES=pieces,
        IS_SPLIT=is_split,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )
