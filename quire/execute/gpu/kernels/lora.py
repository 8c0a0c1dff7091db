"""Adapters of low rank: y += factor * B (A x), each row with the adapter it names, if any.

Twin: twins.adapted. Two grouped products, down to the rank and up again; between them numbers are
in x's dtype. One `Groups` serves all products of a step. Always holds: a row without an adapter
keeps its bits, and an adapter's rows do not depend on others' adapters.
"""

from __future__ import annotations

import torch

from quire.execute.gpu.kernels.grouped import Groups, grouped


def adapt(
    x: torch.Tensor,
    shrink: torch.Tensor,
    expand: torch.Tensor,
    factors: torch.Tensor,
    groups: Groups,
    y: torch.Tensor,
) -> None:
    """y [R, N] += factors[a] * expand[a] @ (shrink[a] @ x), a the adapter of each row.

    x [R, K]; shrink [adapters, rank, K]; expand [adapters, N, rank], ranks filled up with zeros:
    all bf16 or all f32. factors f32 [adapters]. groups: Groups.of(ids [R], adapters), -1 for none.
    """
    low = torch.empty((len(x), shrink.shape[1]), dtype=x.dtype, device=x.device)
    grouped(x, shrink, low, groups)
    grouped(low, expand, y, groups, factors=factors)
