"""Time products of bf16 and fp8: ours beside the vendor's, for few rows and many.

In the shapes of an 8B model's layer, with several copies of a weight in turn if one would fit the
GPU's cache. Results of both are compared before either is timed. fp8 has per-token scales and
static ones; fast mode uses the vendor's if the installed PyTorch has it
(quire/execute/gpu/library_fp8.py). For bf16 it uses the vendor's; "ours up to" are the rows up to
which ours would be the faster one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from bench.gpu.limits import device_limits
from bench.gpu.models import generator_of
from bench.gpu.stage import Stage
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.kernels.linear_fixed import Workspace, linear, max_sums
from quire.execute.gpu.library_fp8 import BY_ROW, BY_TENSOR, E4M3, bound, is_known

# Outputs and columns: q, k and v; attention output; gate and up; down.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 16, 64, 512, 8192)
HEAD = (128256, 4096)
BF16_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048, 8192)
IN_TURN_BYTES = 256 * 2**20  # several times an H200's second-level cache
# Both round once to bf16, with steps of a 256th: as a share of the largest value.
ALLOWED = 0.01


def bf16_products(stage: Stage) -> None:
    """Report the time of both, as shares of the time to read the weight or to multiply, and the
    rows up to which ours is not slower."""
    limits = device_limits(stage)
    shapes, counts = ((32, 256),), (1, 3)
    if not stage.is_dry:
        shapes, counts = (*SHAPES, HEAD), BF16_ROWS
    for outputs, columns in shapes:
        prices: dict[int, float] = {}
        copies = 1 if stage.is_dry else max(1, IN_TURN_BYTES // (2 * outputs * columns))
        weights = [_normal(stage, outputs, columns) * columns**-0.5 for _ in range(copies)]
        for rows in counts:
            if not stage.has_time():
                return
            found = _bf16(stage, weights, rows)
            seconds = found["seconds"]
            floor = max(
                2 * outputs * columns / limits["copy_bytes_per_s"],
                2 * rows * outputs * columns / limits["bf16_ops_per_s"],
            )
            found["share_of_floor"] = {name: floor / taken for name, taken in seconds.items()}
            prices[rows] = found["price"] = seconds["ours"] / seconds["vendor"] - 1
            stage.report(f"{rows} x {columns} -> {outputs}", found)
            if not found["largest_error"] <= ALLOWED:
                raise SystemExit(f"the vendor's product differs from ours: {found}")
        stage.report(f"ours up to: {columns} -> {outputs}", ours_up_to(prices))


def ours_up_to(prices: Mapping[int, float]) -> int:
    """Return the rows up to which ours is never slower, from prices in the order of rows."""
    return max(takewhile(lambda rows: prices[rows] <= 0, prices), default=0)


def _normal(stage: Stage, *size: int) -> torch.Tensor:
    return torch.randn(size, device=stage.device, dtype=stage.dtype)


def _bf16(stage: Stage, weights: list[torch.Tensor], rows: int) -> dict[str, Any]:
    """Measure both products of the weights in turn."""
    outputs, columns = weights[0].shape
    x = _normal(stage, rows, columns)
    y, theirs = (torch.empty(rows, outputs, dtype=stage.dtype, device=stage.device) for _ in "ab")
    workspace = Workspace.of(max_sums(outputs, columns, rows), stage.device)
    works = {
        "ours": [partial(linear, x, w, y, workspace=workspace) for w in weights],
        "vendor": [partial(torch.mm, x, w.T, out=theirs) for w in weights],
    }
    for kind in works.values():
        kind[0]()
    error = (y.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    return {
        "largest_error": stage.number(error),
        "seconds": {name: stage.replayed_seconds(kind) for name, kind in works.items()},
    }


def fp8_products(stage: Stage) -> None:
    """Report, for each kind of scales, whether the vendor supports it, and both times."""
    limits = device_limits(stage)
    shapes, counts = (((32, 256),), (1, 3)) if stage.is_dry else (SHAPES, ROWS)
    for form, scaled in ((BY_ROW, "token"), (BY_ROW, "tensor"), (BY_TENSOR, "tensor")):
        title = f"scales by {form}, rows by {scaled}"
        if not stage.is_rehearsal and not is_known(form, stage.device):
            stage.report(title, "the installed PyTorch refuses them: ours is taken")
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
                stage.report(f"{title}: {rows} x {columns} -> {outputs}", found)
                if not found["largest_error"] <= ALLOWED:
                    raise SystemExit(f"{title}: the vendor's product differs from ours: {found}")


def _both(stage: Stage, form: str, scaled: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    rows, outputs, columns = shape
    generator = generator_of(stage.device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=stage.device, generator=generator)

    scales = torch.full((outputs,), 0.01, device=stage.device)
    if form == BY_ROW:
        scales *= torch.linspace(0.5, 2, outputs, device=stage.device)
    copies = 1 if stage.is_dry else max(1, IN_TURN_BYTES // (outputs * columns))
    weights = [
        ByteWeight.of((40 * normal(outputs, columns)).to(E4M3), scales) for _ in range(copies)
    ]
    room = ByteRows.empty(rows, columns, stage.device, dtype=E4M3, scaled=scaled)
    room.scales.fill_(0.01)
    x = quantize_rows(normal(rows, columns).to(stage.dtype), room)
    y, theirs = (torch.empty(rows, outputs, dtype=stage.dtype, device=stage.device) for _ in "ab")
    works = {"ours": [partial(linear_bytes, x, weight, y) for weight in weights]}
    if not stage.is_rehearsal:
        works["vendor"] = [partial(bound(weight, x, form), x, theirs) for weight in weights]
    for kind in works.values():
        kind[0]()
    error = (y.float() - theirs.float()).abs().max() / y.float().abs().max()
    return {
        "largest_error": stage.number(error),
        "seconds": {name: stage.replayed_seconds(kind) for name, kind in works.items()},
    }
