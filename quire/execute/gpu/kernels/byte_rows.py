"""Rows of activations in a byte an element, int8 or fp8 (e4m3): what products of few bits take.

Twins: quire/quant/int_rows.py and quire/quant/fp8.py, bit for bit. int8 has a scale for each 128
columns; fp8 has that, or one for the row, or one that is given for all. `store_bytes` is what the
kernels share that make such rows: of rows that lie there, or in norm.py and activation.py of their
own results. Always holds: columns past the end are zeros, so that products need no edge in K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, power_of_two
from quire.execute.gpu.kernels.rounding import as_stored, scale_and_inverse
from quire.quant.scheme import ACTIVATION_GROUP

GROUP = tl.constexpr(ACTIVATION_GROUP)
GROUPS_AT_ONCE = 8
MAX_GROUPS = 256  # of a row with one scale: 32,768 columns
SCALES = ("block", "token", "tensor")


@dataclass(frozen=True, slots=True)
class ByteRows:
    """values: int8 or e4m3 [R, groups * 128]; scales: f32 [groups, R] where `scaled` is "block",
    for each 128 columns, [R] where it is "token", [1] where it is "tensor"."""

    values: torch.Tensor
    scales: torch.Tensor
    scaled: str = "block"

    @classmethod
    def empty(
        cls,
        rows: int,
        columns: int,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.int8,
        scaled: str = "block",
    ) -> ByteRows:
        """Return room for `rows` rows of `columns` columns."""
        if scaled not in SCALES:
            raise ValueError(f"scales by {scaled!r}; {', '.join(SCALES)} are allowed")
        groups = cdiv(columns, ACTIVATION_GROUP)
        shape = {"block": (groups, rows), "token": (rows,), "tensor": (1,)}[scaled]
        return cls(
            values=torch.empty((rows, groups * ACTIVATION_GROUP), dtype=dtype, device=device),
            scales=torch.empty(shape, dtype=torch.float32, device=device),
            scaled=scaled,
        )

    @property
    def groups(self) -> int:
        """Of 128 columns, the last filled up with zeros."""
        return self.values.shape[1] // ACTIVATION_GROUP

    @property
    def largest(self) -> float:
        """What a scale is made for."""
        return 127.0 if self.values.dtype == torch.int8 else 448.0

    def first(self, rows: int) -> ByteRows:
        """So many rows of them."""
        scales = self.scales if self.scaled == "tensor" else self.scales[..., :rows]
        return ByteRows(self.values[:rows], scales, self.scaled)


@triton.jit
def store_bytes(
    x,
    row,
    groups,
    values,
    scales,
    scale_stride,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
):
    """Of a row the columns x [AT_ONCE, 128] of `groups`, zeros past the end, as bytes with their
    scales; all of them where the row has one scale."""
    finite = tl.abs(x) < float("inf")
    kept = tl.where(finite, x, 0.0)
    if KIND == "tensor":
        steps = tl.where(finite, kept * tl.div_rn(1.0, tl.load(scales)), float("nan"))
    else:
        largest = tl.max(tl.abs(kept), axis=1)
        odd = tl.sum(tl.where(finite, 0, 1), axis=1)
        if KIND == "token":
            largest = tl.zeros([AT_ONCE], tl.float32) + tl.max(largest, axis=0)
            odd = tl.zeros([AT_ONCE], tl.int32) + tl.sum(odd, axis=0)
        scale, inverse = scale_and_inverse(tl.where(odd > 0, float("nan"), largest), LARGEST)
        steps = kept * inverse[:, None]
        if KIND == "token":
            tl.store(scales + row + groups, scale, mask=groups == 0)
        else:
            tl.store(scales + groups * scale_stride + row, scale, mask=groups < GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = values + row * (GROUPS * GROUP) + columns
    tl.store(at, as_stored(steps, values.dtype.element_ty), mask=(groups < GROUPS)[:, None])


@triton.jit
def _quantize(
    x,
    values,
    scales,
    x_stride,
    scale_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    loaded = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    store_bytes(loaded, row, groups, values, scales, scale_stride, GROUPS, AT_ONCE, LARGEST, KIND)


def room_for(out: ByteRows, rows: int, columns: int) -> ByteRows:
    """out's first rows, where all of these rows fit."""
    width = cdiv(columns, ACTIVATION_GROUP) * ACTIVATION_GROUP
    if out.values.shape[0] < rows or out.values.shape[1] != width or out.scales.stride(-1) != 1:
        raise ValueError(
            f"room for values {tuple(out.values.shape)} and scales {tuple(out.scales.shape)}; "
            f"at least {rows} rows of {width} are needed"
        )
    if out.scaled == "token" and out.groups > MAX_GROUPS:
        raise ValueError(f"{columns} columns; up to {MAX_GROUPS * 128} may share a scale")
    return out.first(rows)


def quantize_rows(x: torch.Tensor, out: ByteRows) -> ByteRows:
    """out = x [R, K] (f32 or bf16, any row stride) in bytes; gives out's first R rows. The scale of
    a tensor is read, all others are made."""
    rows, columns = x.shape
    check_rows("x", x)
    taken = room_for(out, rows, columns)
    groups = out.groups
    at_once = power_of_two(groups) if out.scaled == "token" else GROUPS_AT_ONCE
    if rows == 0:
        return taken
    _quantize[rows, cdiv(groups, at_once)](
        x,
        out.values,
        out.scales,
        x.stride(0),
        out.scales.stride(0),
        K=columns,
        GROUPS=groups,
        AT_ONCE=at_once,
        LARGEST=out.largest,
        KIND=out.scaled,
        num_warps=power_of_two(at_once // 4, least=4, most=16),
        **EXACT,
    )
    return taken
