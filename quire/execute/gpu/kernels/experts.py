"""The feed-forward layer of a mixture of experts, after its router. No program calls it yet.

A choice is one of the top-k experts of a row; its share is the router's weight of it; a slot is one
(row, choice) pair. Twin: twins.experts. Gate, up and the activation are one launch, down is one,
and the outputs of a row's experts are summed in f32, in the order of the choices (the router's
ranks). Invariant: a row's output depends on its own choices only, not on other rows of the same
experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.grouped import Groups, grouped
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, power_of_two
from quire.execute.gpu.kernels.rounding import as_type

MAX_COLUMNS = 1024  # of one program


@triton.jit
def _combine(
    answers,
    ids,
    shares,
    y,
    count,
    y_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        slot = row * CHOICES + choice
        expert = tl.load(ids + slot)
        if (expert >= 0) & (expert < count):
            answer = tl.load(answers + slot * WIDTH + columns, mask=inside, other=0.0)
            share = tl.zeros([BLOCK], tl.float32) + tl.load(shares + slot)
            total = tl.fma(answer.to(tl.float32), share, total)
    tl.store(y + row * y_stride + columns, as_type(total, y.dtype.element_ty), mask=inside)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    y: torch.Tensor,
    *,
    form: str = "silu",
) -> None:
    """y [R, H] = sum over choices c of shares[r, c] * down[e] @ (form(gate[e] x) * (up[e] x)).

    x [R, H]; gate_up [E, 2 M, H], gate first; down [E, H, M]: all bf16 or all f32. ids int32 [R, C]
    and shares f32 [R, C], side by side; an id that is no expert's counts nothing. Between the
    products numbers are in x's dtype, and so are the experts' answers.
    """
    (rows, width), choices, middle = x.shape, ids.shape[1], down.shape[2]
    check_rows("y", y, rows, width)
    if ids.shape != shares.shape or len(ids) != rows or not ids.is_contiguous():
        raise ValueError(f"ids {tuple(ids.shape)}, shares {tuple(shares.shape)}, {rows} rows")
    if not shares.is_contiguous() or shares.dtype != torch.float32:
        raise ValueError(f"shares are {shares.dtype}, strides {shares.stride()}; f32 side by side")
    if rows == 0:
        return
    groups = Groups.of(ids, len(down))
    slots = rows * choices
    hidden = torch.empty((slots, middle), dtype=x.dtype, device=x.device)
    answers = torch.empty((slots, width), dtype=x.dtype, device=x.device)
    grouped(x, gate_up, hidden, groups, slots_a_row=choices, form=form)
    grouped(hidden, down, answers, groups)
    block = power_of_two(width, most=MAX_COLUMNS)
    _combine[rows, cdiv(width, block)](
        answers,
        ids,
        shares,
        y,
        len(down),
        y.stride(0),
        WIDTH=width,
        BLOCK=block,
        CHOICES=choices,
        num_warps=4,
        **EXACT,
    )
