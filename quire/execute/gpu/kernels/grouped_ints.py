"""Grouped products of integer matrices: each slot of a row by the int8 or int4 matrix of its own.

Twin: reference_ops.int_linear of a slot's row and matrix, bit for bit. Rows are int8 with a scale
for each 128 columns (byte_rows.py), shared by all slots of a row. Sums of integers are exact and
scales come in as in linear_bytes.py and linear_int4.py, in the order of K, so that tiles change no
bit. Knows slots (grouped.py) and no router. Invariant: slots without a matrix are neither read nor
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.byte_rows import GROUP, ByteRows
from quire.execute.gpu.kernels.grouped import FEW_OUTPUTS, Groups, store_slots
from quire.execute.gpu.kernels.int4_layout import BLOCK, Int4Weight
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, launch_staged
from quire.execute.gpu.kernels.linear_bytes import UNROLLED, WAITING_ROWS, ByteWeight
from quire.execute.gpu.kernels.linear_int4 import folded, group_sums, zero_of
from quire.execute.gpu.kernels.rounding import dot


@dataclass(frozen=True, slots=True)
class StackedBytes:
    """Matrices of int8. values: int8 [count, N, groups * 128]; scales: f32 [count, N]."""

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class StackedInt4:
    """Matrices of 4 bits, each as in Int4Weight: packed uint8 [count, panels, blocks, 64, 64];
    scales bf16 or f32 [count, groups, N]; zeros uint8 [count, groups, N] or None."""

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    columns: int


def stacked(
    weights: Sequence[ByteWeight | Int4Weight], device: torch.device
) -> StackedBytes | StackedInt4:
    """Return matrices of one shape and scheme as one weight on a device."""
    ints = [weight for weight in weights if isinstance(weight, ByteWeight)]
    if len(ints) == len(weights):
        values = torch.stack([weight.values for weight in ints])
        scales = torch.stack([weight.scales for weight in ints])
        return StackedBytes(values.to(device), scales.to(device))
    fours = [weight for weight in weights if isinstance(weight, Int4Weight)]
    zeros = [weight.zeros for weight in fours if weight.zeros is not None]
    of_all = [weight.scales for weight in fours]
    if len({scales.dtype for scales in of_all}) > 1:
        of_all = [scales.float() for scales in of_all]
    return StackedInt4(
        packed=torch.stack([weight.packed for weight in fours]).to(device),
        scales=torch.stack(of_all).to(device),
        zeros=torch.stack(zeros).to(device) if zeros else None,
        group=fours[0].group,
        columns=fours[0].columns,
    )


@triton.jit
def _grouped_bytes(
    x,
    x_scales,
    weights,
    scales,
    y,
    slots,
    matrices,
    scale_stride,
    y_stride,
    SLOTS_A_ROW: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    WIDTH: tl.constexpr = GROUPS * GROUP
    matrix = tl.load(matrices + tl.program_id(0))
    if matrix >= 0:
        outputs = tl.program_id(1) * BN + tl.arange(0, BN)
        slot = tl.load(slots + tl.program_id(0) * BR + tl.arange(0, BR))
        ks = tl.arange(0, GROUP)
        output = tl.where(outputs < N, outputs, 0)
        own = matrix.to(tl.int64) * N + output
        row = tl.maximum(slot, 0) // SLOTS_A_ROW
        w_at = weights + own[:, None] * WIDTH + ks[None, :]
        x_at = x + row.to(tl.int64)[None, :] * WIDTH + ks[:, None]
        total = tl.zeros([BN, BR], tl.float32)
        for group in tl.range(0, GROUPS, loop_unroll_factor=UNROLL):
            w, columns = tl.load(w_at + group * GROUP), tl.load(x_at + group * GROUP)
            part = dot(w, columns, tl.zeros([BN, BR], tl.int32)).to(tl.float32)
            by = tl.load(x_scales + group * scale_stride + row)
            total = tl.fma(part, tl.broadcast_to(by[None, :], [BN, BR]), total)
        total *= tl.load(scales + own)[:, None]
        store_slots(total, y, slot, outputs, y_stride, N)


@triton.jit
def _grouped_int4(
    x,
    x_scales,
    packed,
    scales,
    zeros,
    y,
    slots,
    matrices,
    x_stride,
    x_scale_stride,
    y_stride,
    SLOTS_A_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PANELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BY_MASKS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    matrix = tl.load(matrices + tl.program_id(0)).to(tl.int64)
    if matrix >= 0:
        outputs = tl.program_id(1) * BN + tl.arange(0, BN)
        inside = outputs < N
        slot = tl.load(slots + tl.program_id(0) * BR + tl.arange(0, BR))
        row = tl.maximum(slot, 0) // SLOTS_A_ROW
        ks = tl.arange(0, HALF)
        own_scales, own_zeros = scales + matrix * (GROUPS * N), zeros + matrix * (GROUPS * N)
        panel = matrix * PANELS + (outputs // 64)
        byte_at = packed + panel[:, None] * (BLOCKS * 4096)
        byte_at += (outputs % 64)[:, None] * 64 + ks[None, :]
        x_at = x + row.to(tl.int64)[None, :] * x_stride + ks[:, None]
        total = tl.zeros([BN, BR], tl.float32)
        NUM_RUNS: tl.constexpr = 64 // HALF  # of bytes in a block
        for block in tl.range(0, BLOCKS, loop_unroll_factor=UNROLL):
            by_weight = tl.zeros([BN, BR], tl.float32)
            for run in tl.static_range(NUM_RUNS):
                k = block * 128 + run * (2 * HALF)
                bytes_ = tl.load(byte_at + block * 4096 + run * HALF)
                # Groups past the end are of zeros; they read the last one's scale.
                group = tl.minimum(k // GROUP_SIZE, GROUPS - 1)
                zero = zero_of(own_zeros, group, outputs, inside, N, HAS_ZEROS)
                sums = tl.zeros([BN, BR], tl.int32)
                sums = group_sums(bytes_, x_at + k, zero, k + ks, K, False, True, BY_MASKS, sums)
                if GROUP_SIZE == HALF:  # the other nibble is of the next group
                    by_weight = folded(sums, own_scales, group, outputs, inside, by_weight, N)
                    group = tl.minimum(group + 1, GROUPS - 1)
                    zero = zero_of(own_zeros, group, outputs, inside, N, HAS_ZEROS)
                    sums = tl.zeros([BN, BR], tl.int32)
                k += HALF
                sums = group_sums(bytes_, x_at + k, zero, k + ks, K, True, True, BY_MASKS, sums)
                by_weight = folded(sums, own_scales, group, outputs, inside, by_weight, N)
            by = tl.load(x_scales + block * x_scale_stride + row)
            total = tl.fma(by_weight, tl.broadcast_to(by[None, :], [BN, BR]), total)
        store_slots(total, y, slot, outputs, y_stride, N)


def grouped_ints(
    x: ByteRows,
    weights: StackedBytes | StackedInt4,
    y: torch.Tensor,
    groups: Groups,
    *,
    slots_a_row: int = 1,
) -> None:
    """y [S, N] of each slot s = the row s // slots_a_row of x (byte_rows.quantize_rows of int8), by
    its matrix of weights. y: f32 or bf16, any row stride."""
    outputs = weights.scales.shape[-1]
    blocks = weights.packed.shape[2] if isinstance(weights, StackedInt4) else x.groups
    width = weights.values.shape[2] if isinstance(weights, StackedBytes) else blocks * BLOCK
    check_rows("x", x.values, cdiv(y.shape[0], slots_a_row), width)
    check_rows("y", y, columns=outputs)
    if x.values.dtype != torch.int8 or x.scaled != "block":
        raise ValueError(f"rows of {x.values.dtype} by {x.scaled}; int8 by block is needed")
    if not y.shape[0]:
        return
    is_waiting = groups.rows <= WAITING_ROWS
    grid = (len(groups.matrices), cdiv(outputs, FEW_OUTPUTS))
    shared = {
        "SLOTS_A_ROW": slots_a_row,
        "N": outputs,
        "BN": FEW_OUTPUTS,
        "BR": groups.rows,
        "UNROLL": UNROLLED if is_waiting else 1,
        "num_warps": 4,
        "num_stages": 4,
        **EXACT,
    }
    if isinstance(weights, StackedBytes):
        launch_staged(
            _grouped_bytes,
            grid,
            x.values,
            x.scales,
            weights.values,
            weights.scales,
            y,
            groups.slots,
            groups.matrices,
            x.scales.stride(0),
            y.stride(0),
            GROUPS=x.groups,
            **shared,
        )
        return
    launch_staged(
        _grouped_int4,
        grid,
        x.values,
        x.scales,
        weights.packed,
        weights.scales,
        weights.packed if weights.zeros is None else weights.zeros,
        y,
        groups.slots,
        groups.matrices,
        x.values.stride(0),
        x.scales.stride(0),
        y.stride(0),
        K=weights.columns,
        PANELS=weights.packed.shape[1],
        BLOCKS=blocks,
        GROUPS=weights.scales.shape[1],
        GROUP_SIZE=weights.group,
        HALF=min(weights.group, 64),
        BY_MASKS=is_waiting,
        HAS_ZEROS=weights.zeros is not None,
        **shared,
    )
