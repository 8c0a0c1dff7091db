"""Each operation in plain PyTorch: what runs on CPU tensors, and what kernels are compared with.

Operands are tensors of any float type, computed with in float32; a result is float32 and rounded
by the caller that stores it. Always holds: but for products that are not exact, an element's bits
depend neither on the rows and columns beside it nor on its place among them (plain_curves.py).
Knows no program, no cache and no batch. Letters: R rows, K inputs, N outputs, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.execute.gpu import plain_curves
from quire.quant.scheme import ACTIVATION_GROUP, Scheme

TINY = 2.0**-100  # as quire/quant/int_rows.py
E4M3 = torch.float8_e4m3fn
# Elements that are multiplied at once by an exact product.
_PRODUCTS_AT_ONCE = 1 << 20


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    form: str,
    group: int,
) -> Tensor:
    """RMS or layer norm of x [R, N], or of each run of `group` columns by itself."""
    runs = x.float().reshape(len(x), -1, group or x.shape[1])
    if form == "layer":
        runs = runs - _mean(runs.clone())
    y = runs / torch.sqrt(_mean(runs * runs) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).reshape(x.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, exact: bool) -> Tensor:
    """x [R, K] @ weight [N, K].T (+ bias [N]): [R, N]. exact: an output's sum has one order,
    whatever rows and outputs are computed with it."""
    y = _exact_product(x.float(), weight) if exact else x.float() @ weight.float().T
    return y if bias is None else y + bias


def _exact_product(x: Tensor, weight: Tensor) -> Tensor:
    rows, (outputs, columns) = len(x), weight.shape
    y = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    outputs_at_once = max(min(outputs, _PRODUCTS_AT_ONCE // columns), 1)
    rows_at_once = max(_PRODUCTS_AT_ONCE // (columns * outputs_at_once), 1)
    for first in range(0, outputs, outputs_at_once):
        part = slice(first, first + outputs_at_once)
        wide = weight[part].float()
        for row in range(0, rows, rows_at_once):
            some = slice(row, row + rows_at_once)
            y[some, part] = plain_curves.sum_last(x[some, None] * wide)
    return y


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
    exact: bool,
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
        total = linear(rows[:, part], values[:, part], None, exact=exact)
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
    """Return rows as a weight's scheme has them beside it, values [R, K] in float32: with scales
    [R, groups of 128], or [R, 1] where fp8 has no groups."""
    columns = x.shape[1]
    size = ACTIVATION_GROUP if scheme.group or not scheme.is_float else columns
    groups = torch.nn.functional.pad(x.float(), (0, -columns % size)).reshape(len(x), -1, size)
    values, scales = quantize_groups(groups, is_float=scheme.is_float)
    return values.reshape(len(x), -1)[:, :columns].contiguous(), scales


def quantize_rows_by(x: Tensor, scale: Tensor) -> Tensor:
    """Return rows as e4m3 has them by a scale [1] that is given, in float32; NaN where not
    finite."""
    wide = x.float()
    values = (wide * (torch.ones_like(scale) / scale)).clamp(-448, 448).to(E4M3).float()
    return torch.where(torch.isfinite(wide), values, torch.full_like(wide, torch.nan))


def quantize_fp8(w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return a weight w [N, K] in e4m3 and its scales: [N], or [blocks of rows, groups]."""
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


def activation(gate: Tensor, up: Tensor | None, *, form: str) -> Tensor:
    """form(gate), times up where there is one."""
    y = FORMS[form](gate.float())
    return y if up is None else y * up.float()


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): next to x where it is small, never beyond cap."""
    divisor = torch.tensor(cap, dtype=torch.float32, device=x.device)
    return plain_curves.tanh(x.float() / divisor) * divisor


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + plain_curves.exp(-x)),
    "relu": lambda x: torch.clamp(x, min=0),
    "gelu": lambda x: 0.5 * x * (1 + plain_curves.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + plain_curves.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)))
    ),
}


def _mean(terms: Tensor) -> Tensor:
    """Return the mean over the last axis, which stays with one element; overwrites `terms`."""
    count = torch.tensor(terms.shape[-1], dtype=torch.float32, device=terms.device)
    return (plain_curves.sum_last(terms) / count)[..., None]


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c; the product exact, the sum rounded once to float64 and then to float32."""
    return (a.double() * b.double() + c.double()).float()
