"""Measure the device's limits in the same process as everything else: copies and a large product.

Shares in the other sections refer to these, measured again by `device_limits`.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu.stage import Stage

COPY_BYTES = 2 * 2**30
PRODUCT = 8192


def limits(stage: Stage) -> None:
    """Report the limits of the card."""
    for name, value in device_limits(stage).items():
        stage.report(name, value)


def device_limits(stage: Stage) -> dict[str, Any]:
    """Return bytes/s of a copy (read and written) and operations/s of a bf16 product."""
    size = 2**16 if stage.is_dry else COPY_BYTES
    source = torch.ones(size // 4, dtype=torch.int32, device=stage.device)
    target = torch.empty_like(source)
    copy_s = stage.seconds(lambda: target.copy_(source))
    width = 64 if stage.is_dry else PRODUCT
    a, b = (torch.randn(width, width, device=stage.device).to(stage.dtype) for _ in range(2))
    product_s = stage.seconds(lambda: a @ b)
    return {
        "copy_bytes_per_s": 2 * size / copy_s,
        "bf16_ops_per_s": 2 * width**3 / product_s,
    }
