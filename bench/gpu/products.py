"""Products of fp8: ours beside the vendor's, for few rows and many, by scales of tokens and fixed.

In the shapes of an 8B model's layer. What both give is compared before either is timed; the fast
mode takes the vendor's where the installed PyTorch has it (quire/execute/gpu/library_fp8.py).
"""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu.limits import device_limits
from bench.gpu.stage import Stage
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.library_fp8 import BY_ROW, BY_TENSOR, E4M3, bound, is_known

# Outputs and columns: q, k and v; attention's; gate and up; down.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 16, 64, 512, 8192)
# Both round once to bf16, whose step is a 256th: as a share of the largest value.
ALLOWED = 0.01


def fp8_products(stage: Stage) -> None:
    """Tell, for each way of scales, whether the vendor has it, and both times."""
    limits = device_limits(stage)
    shapes, counts = (((32, 256),), (1, 3)) if stage.is_dry else (SHAPES, ROWS)
    for form, scaled in ((BY_ROW, "token"), (BY_ROW, "tensor"), (BY_TENSOR, "tensor")):
        title = f"scales by {form}, rows by {scaled}"
        if not is_known(form, stage.device):
            stage.tell(title, "the installed PyTorch refuses them: ours is taken")
            continue
        for outputs, columns in shapes:
            for rows in counts:
                if not stage.has_time():
                    return
                found = _both(stage, form, scaled, (rows, outputs, columns))
                found["ops_of_bf16_peak"] = {
                    name: 2 * rows * outputs * columns / seconds / limits["bf16_ops_per_s"]
                    for name, seconds in found["seconds"].items()
                }
                stage.tell(f"{title}: {rows} x {columns} -> {outputs}", found)
                if not found["largest_error"] <= ALLOWED:
                    raise SystemExit(f"{title}: the vendor's product differs from ours: {found}")


def _both(stage: Stage, form: str, scaled: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    rows, outputs, columns = shape
    generator = torch.Generator(device=stage.device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=stage.device, generator=generator)

    scales = torch.full((outputs,), 0.01, device=stage.device)
    if form == BY_ROW:
        scales *= torch.linspace(0.5, 2, outputs, device=stage.device)
    weight = ByteWeight.of((40 * normal(outputs, columns)).to(E4M3), scales)
    room = ByteRows.empty(rows, columns, stage.device, dtype=E4M3, scaled=scaled)
    room.scales.fill_(0.01)
    x = quantize_rows(normal(rows, columns).to(stage.dtype), room)
    y, theirs = (torch.empty(rows, outputs, dtype=stage.dtype, device=stage.device) for _ in "ab")
    product = bound(weight, x, form)
    linear_bytes(x, weight, y)
    product(x, theirs)
    error = (y.float() - theirs.float()).abs().max() / y.float().abs().max()
    return {
        "largest_error": float(error),
        "seconds": {
            "ours": stage.seconds(lambda: linear_bytes(x, weight, y)),
            "vendor": stage.seconds(lambda: product(x, theirs)),
        },
    }
