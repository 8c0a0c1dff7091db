"""Compare products of int8 and int4 weights on the device with NumPy, bit for bit.

Sums of integers are exact, so order does not matter and there is no tolerance. Row counts select
each tile of the kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from bench.gpu.stage import Stage
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.linear_fixed import Workspace
from quire.execute.gpu.kernels.linear_gemv import max_gemv_sums
from quire.execute.gpu.products import int_product, pack_ints
from quire.execute.reference_ops import int_linear
from quire.quant.int_weights import quantize_matrix
from quire.quant.scheme import SCHEMES

INTEGERS = [name for name, scheme in SCHEMES.items() if not scheme.is_float]
# Outputs, columns and rows. Neither of the first two is a multiple of tiles or groups; so many
# outputs as in the second case are not split along K for one row or two.
CASES = ((200, 1000, (1, 2, 16, 17, 33, 65, 300)), (17_000, 300, (1, 2)))


def integers(stage: Stage) -> None:
    """Report, for each precision, how many values differ in bits; end the section on any."""
    for outputs, columns, counts in ((40, 200, (1, 17)),) if stage.is_dry else CASES:
        for name in INTEGERS:
            wrong = _num_wrong(stage, name, outputs, columns, counts)
            found = {"rows": counts, "other_bits": wrong}
            stage.report(f"{name} products, {columns} -> {outputs}", found)
            if wrong:
                raise SystemExit(f"{name}: {wrong} numbers differ from what the product means")


def _num_wrong(stage: Stage, name: str, outputs: int, columns: int, counts: tuple[int, ...]) -> int:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((max(counts), columns)).astype(np.float32)
    # Skewed, so that zero points differ.
    skewed = rng.standard_normal((outputs, columns)) + rng.standard_normal((outputs, 1))
    matrix = quantize_matrix(skewed.astype(np.float32), SCHEMES[name])
    weight, right = pack_ints(matrix, stage.device), int_linear(x, matrix, None)
    workspace = Workspace.of(max_gemv_sums(outputs, columns, SCHEMES[name].bits), stage.device)
    wrong = 0
    for rows in counts:
        y = torch.empty(rows, outputs, dtype=torch.float32, device=stage.device)
        room = ByteRows.empty(rows, columns, stage.device)
        taken = quantize_rows(torch.from_numpy(x[:rows]).to(stage.device), room)
        int_product(taken, weight, y, workspace=workspace)
        if not stage.is_rehearsal:
            wrong += int((stage.values(y) != right[:rows]).sum())
    return wrong
