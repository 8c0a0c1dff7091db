"""Each operation in plain PyTorch: what runs on CPU tensors, and what kernels are compared with.

Operands are tensors of any float type, computed with in float32; a result is float32 and rounded
by the caller that stores it. With `by_row` each row is computed alone, in its own memory, so that
its bits depend on it alone: libraries choose instructions by row count and by alignment.
Knows no program, no cache and no batch. Letters: R rows, K inputs, N outputs, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.quant.scheme import ACTIVATION_GROUP, Scheme

TINY = 2.0**-100  # as quire/quant/int_rows.py
E4M3 = torch.float8_e4m3fn


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    form: str,
    group: int,
    by_row: bool,
) -> Tensor:
    """RMS or layer norm of x [R, N], or of each run of `group` columns by itself."""

    def normed(rows: Tensor) -> Tensor:
        runs = rows.reshape(len(rows), -1, group or rows.shape[1])
        if form == "layer":
            runs = runs - runs.mean(dim=-1, keepdim=True)
        mean_square = (runs * runs).mean(dim=-1, keepdim=True)
        y = runs * torch.rsqrt(mean_square + eps)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).reshape(rows.shape)

    return _rows(normed, x, by_row=by_row)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, by_row: bool) -> Tensor:
    """x [R, K] @ weight [N, K].T (+ bias [N]): [R, N]."""
    wide = weight.float()
    if by_row:
        y = _rows(lambda row: torch.mv(wide, row[0])[None], x, by_row=True, width=len(weight))
    else:
        y = x.float() @ wide.T
    return y if bias is None else y + bias


def int_linear(
    x: Tensor, values: Tensor, scales: Tensor, scheme: Scheme, bias: Tensor | None
) -> Tensor:
    """x [R, K], made integers, by an integer weight [N, K] with scales [N, groups]: [R, N].

    As quire/execute/reference_ops.py says: sums of a group's products are whole numbers that
    float32 holds exactly in any order; scales come in by fused steps in the order of K.
    """
    rows, row_scales = quantize_rows(x, scheme)
    size = scheme.group or ACTIVATION_GROUP
    y = torch.zeros(len(x), len(values), dtype=torch.float32, device=x.device)
    for first in range(0, values.shape[1], ACTIVATION_GROUP):
        factor = row_scales[:, first // ACTIVATION_GROUP, None]
        total = torch.zeros_like(y)
        for start in range(first, min(first + ACTIVATION_GROUP, values.shape[1]), size):
            sums = rows[:, start : start + size] @ values[:, start : start + size].float().T
            if not scheme.group:
                total = sums
                break
            total = _fused(sums, scales[:, start // size], total)
        y = _fused(total, factor, y)
    if not scheme.group:
        y = y * scales[:, 0]
    return y if bias is None else y + bias


def fp8_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    scheme: Scheme,
    bias: Tensor | None,
    *,
    input_scale: Tensor | None = None,
    by_row: bool,
) -> Tensor:
    """x [R, K], made fp8, by an fp8 weight [N, K]: [R, N]. scales: [N], or of blocks [B, groups].
    input_scale: of all rows [1], where it is fixed.

    As quire/execute/reference_ops.py says: sums of 128 columns in the order of K.
    """
    if input_scale is None:
        rows, row_scales = quantize_rows(x, scheme)
    else:
        rows, row_scales = quantize_rows_by(x, input_scale), input_scale
    y = torch.zeros(len(x), len(values), dtype=torch.float32, device=x.device)
    for first in range(0, values.shape[1], ACTIVATION_GROUP):
        part = slice(first, first + ACTIVATION_GROUP)
        total = linear(rows[:, part], values[:, part], None, by_row=by_row)
        if not scheme.group:
            y = y + total
            continue
        group = first // ACTIVATION_GROUP
        by_output = scales[:, group].repeat_interleave(scheme.group)[: len(values)]
        y = _fused(total, row_scales[:, group, None] * by_output, y)
    if not scheme.group:
        y = y * row_scales * scales
    return y if bias is None else y + bias


def quantize_rows(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Rows as a weight's scheme has them beside it, values [R, K] in float32: with scales [R,
    groups of 128], or [R, 1] where fp8 has no groups."""
    columns = x.shape[1]
    size = ACTIVATION_GROUP if scheme.group or not scheme.is_float else columns
    groups = torch.nn.functional.pad(x.float(), (0, -columns % size)).reshape(len(x), -1, size)
    values, scales = quantize_groups(groups, is_float=scheme.is_float)
    return values.reshape(len(x), -1)[:, :columns].contiguous(), scales


def quantize_rows_by(x: Tensor, scale: Tensor) -> Tensor:
    """Rows as e4m3 has them by a scale [1] that is given, in float32; NaN where not finite."""
    wide = x.float()
    values = (wide * (torch.ones_like(scale) / scale)).clamp(-448, 448).to(E4M3).float()
    return torch.where(torch.isfinite(wide), values, torch.full_like(wide, torch.nan))


def quantize_fp8(w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """A weight w [N, K] in e4m3 and its scales: [N], or [blocks of rows, groups]."""
    (rows, columns), group = w.shape, scheme.group
    if not group:
        values, scales = quantize_groups(w.float(), is_float=True)
        return values.to(E4M3), scales
    padded = torch.nn.functional.pad(w.float(), (0, -columns % group, 0, -rows % group))
    blocks = padded.reshape(len(padded) // group, group, -1, group).transpose(1, 2)
    values, scales = quantize_groups(blocks.flatten(2), is_float=True)
    whole = values.reshape(blocks.shape).transpose(1, 2).reshape(padded.shape)
    return whole[:rows, :columns].to(E4M3), scales


def quantize_groups(groups: Tensor, *, is_float: bool) -> tuple[Tensor, Tensor]:
    """[..., G] as whole numbers from -127 to 127, or as e4m3 has them, in float32; and the scale of
    each group."""
    largest = groups.abs().amax(dim=-1)
    finite = torch.isfinite(largest)
    counts = finite & (largest >= TINY)
    divisor = torch.where(counts, largest, torch.ones_like(largest))
    # A division rounded once: dividing a tensor by a number may multiply by its reciprocal.
    steps = torch.full_like(divisor, 448.0 if is_float else 127.0)
    zero = torch.zeros_like(largest)
    scales = torch.where(finite, torch.where(counts, divisor / steps, zero), zero + torch.nan)
    inverse = torch.where(counts, steps / divisor, zero)
    kept = torch.where(torch.isfinite(groups), groups, torch.zeros_like(groups))
    scaled = kept * inverse[..., None]
    return (scaled.to(E4M3).float() if is_float else torch.round(scaled)), scales


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, head_dim: int) -> Tensor:
    """Turn the pairs (i, i + half) of each head of x [R, heads * D]; cos, sin [R, half]."""
    half = cos.shape[1]
    y = x.float().reshape(len(x), heads, head_dim).clone()
    first, second = y[:, :, :half].clone(), y[:, :, half : 2 * half].clone()
    cos, sin = cos[:, None, :], sin[:, None, :]
    y[:, :, :half] = first * cos - second * sin
    y[:, :, half : 2 * half] = second * cos + first * sin
    return y.reshape(x.shape)


def activation(gate: Tensor, up: Tensor | None, *, form: str, by_row: bool) -> Tensor:
    """form(gate), times up where there is one."""
    y = _rows(FORMS[form], gate, by_row=by_row)
    return y if up is None else y * up.float()


def soft_cap(x: Tensor, cap: float, *, by_row: bool) -> Tensor:
    """cap * tanh(x / cap): next to x where it is small, never beyond cap."""
    divisor = torch.tensor(cap, dtype=torch.float32, device=x.device)
    return _rows(lambda rows: torch.tanh(rows / divisor) * divisor, x, by_row=by_row)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: torch.clamp(x, min=0),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)))
    ),
}


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c; the product exact, the sum rounded once to float64 and then to float32."""
    return (a.double() * b.double() + c.double()).float()


def _rows(
    compute: Callable[[Tensor], Tensor], x: Tensor, *, by_row: bool, width: int = 0
) -> Tensor:
    """compute of all rows at once, or of each by itself in fresh (so equally aligned) memory."""
    if not by_row:
        return compute(x.float().contiguous())
    y = torch.empty(len(x), width or x.shape[1], dtype=torch.float32, device=x.device)
    for index in range(len(x)):
        y[index] = compute(x[index : index + 1].float().clone())[0]
    return y
