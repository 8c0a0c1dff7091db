"""Products of fp8 by the vendor's library, in fast mode: when one is taken, and how it is called.

`scales_for` decides by what is known when an operation is bound, and `is_known` asks the installed
PyTorch once by a small product, since which scales it takes has changed between its versions and
between cards: where it refuses, or answers wrongly, kernels/linear_bytes.py does it. Knows no
operation. Always holds: a product here means what linear_bytes means, but for the order of its sums
and the rounding of one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from quire.execute.gpu.device import FP8_CAPABILITY
from quire.execute.gpu.kernels.byte_rows import ByteRows
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes

E4M3 = torch.float8_e4m3fn
OUTPUTS = 16  # the library's products need multiples of it
BY_TENSOR, BY_ROW = "tensor", "row"
# Up to so many rows, with scales of rows, the Triton kernel is faster (8B shapes, H200).
MAX_TRITON_ROWS = 64
LibraryProduct = Callable[[ByteRows, Tensor], None]


def scales_for(
    *,
    exact: bool,
    capability: tuple[int, int] | None,
    x_scaled: str,
    w_scaled: str,
    outputs: int,
    y_dtype: torch.dtype,
    y_is_whole: bool,
    has_bias: bool,
) -> str:
    """Return how the library would be given the scales, BY_TENSOR or BY_ROW; "" where it is not
    asked.

    capability: of the card, None of what is none of NVIDIA's. x_scaled: block, token or tensor;
    w_scaled: block, channel or tensor. y_is_whole: its rows follow one another.
    """
    is_able = capability is not None and capability >= FP8_CAPABILITY
    if exact or not is_able or has_bias or y_dtype != torch.bfloat16 or not y_is_whole:
        return ""
    if outputs % OUTPUTS or "block" in (x_scaled, w_scaled):
        return ""
    return BY_TENSOR if x_scaled == w_scaled == "tensor" else BY_ROW


def product_for(
    weight: ByteWeight, rows: ByteRows, y: Tensor, *, has_bias: bool, exact: bool
) -> LibraryProduct | None:
    """Return the library's product of rows like these into the first rows of y; None: it has
    none."""
    device, outputs = weight.values.device, len(weight.values)
    capability = _capability(device)
    if exact or capability is None:
        return None
    scales = weight.scales
    if scales.dim() == 1 and bool((scales == scales[0]).all()):
        scales = scales[:1]  # of its tensor, which has the faster product
    kinds = {(outputs,): "channel", (1,): "tensor"}
    form = scales_for(
        exact=exact,
        capability=capability,
        x_scaled=rows.scaled,
        w_scaled=kinds.get(tuple(scales.shape), "block"),
        outputs=outputs,
        y_dtype=y.dtype,
        y_is_whole=y.is_contiguous(),
        has_bias=has_bias,
    )
    if not form or not is_known(form, device):
        return None
    library = bound(weight, rows, form)
    if form == BY_TENSOR:
        return library

    def by_rows(x: ByteRows, y: Tensor) -> None:
        if len(y) <= MAX_TRITON_ROWS:
            linear_bytes(x, weight, y)
        else:
            library(x, y)

    return by_rows


def bound(weight: ByteWeight, rows: ByteRows, form: str) -> LibraryProduct:
    """Return the library's product with a weight, of rows like these."""
    turned, outputs = weight.values.T, len(weight.values)
    if form == BY_TENSOR:
        one = weight.scales[:1]
        return lambda x, y: multiply(x.values, turned, x.scales, one, y)
    channels = weight.scales.expand(outputs)
    if rows.scaled == "token":
        by_output = channels.contiguous()[None]
        return lambda x, y: multiply(x.values, turned, x.scales[:, None], by_output, y)
    # One scale of all rows goes into those of the outputs.
    by_output = (channels * rows.scales).contiguous()[None]
    ones = torch.ones(len(rows.values), 1, dtype=torch.float32, device=turned.device)
    return lambda x, y: multiply(x.values, turned, ones[: len(x.values)], by_output, y)


def multiply(x: Tensor, turned: Tensor, x_scales: Tensor, scales: Tensor, y: Tensor) -> None:
    """y [R, N] = (x [R, K] @ turned [K, N]) * x_scales * scales, in bf16."""
    torch._scaled_mm(x, turned, scale_a=x_scales, scale_b=scales, out_dtype=torch.bfloat16, out=y)


@cache
def is_known(form: str, device: torch.device) -> bool:
    """Return whether the installed PyTorch multiplies so on a device, and rightly."""
    x, w = (torch.ones(16, 128, device=device).to(E4M3) for _ in range(2))
    size = 1 if form == BY_TENSOR else 16
    scales = torch.full((size,), 0.5, device=device)
    x_scales, w_scales = (scales, scales) if form == BY_TENSOR else (scales[:, None], scales[None])
    y = torch.empty(16, 16, dtype=torch.bfloat16, device=device)
    try:
        multiply(x, w.T, x_scales, w_scales, y)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return False
    return bool((y == 32.0).all())


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
