"""The plain twins of Route and Experts: a mixture of experts in NumPy.

Arithmetic is float32. Each row is computed by itself, its experts in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.execute.reference_ops import ONE, Matrix, activation, copy, product
from quire.program.comm_ops import share_of
from quire.program.expert_ops import Experts, Route
from quire.program.forms import RouterScore, RoutingForm

Float32s = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Keeps the sum of chosen scores above 0; too small to change any other sum.
SMALLEST_SUM = np.float32(1e-20)


def route(op: Route, logits: Float32s, bias: Float32s | None) -> Float32s:
    """Routing weights [R, E] by logits [R, E] and the bias [E] of the choice."""
    y = np.zeros_like(logits)
    for row, of_row in enumerate(logits):
        scores = _scores(of_row, op.score)
        ids = _chosen(op, scores if bias is None else scores + bias)
        weights = scores[ids]
        if op.form is RoutingForm.NORMALIZED:
            weights = weights / (_sum(weights) + SMALLEST_SUM)
        y[row, ids] = weights * np.float32(op.scale)
    return y


def experts(
    op: Experts,
    x: Float32s,
    routing: Float32s,
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    *,
    round_inner: Callable[[Float32s], Float32s],
    whole_inner: Callable[[Float32s], Float32s] = copy,
) -> Float32s:
    """Return weighted sum [R, H] of the experts' outputs for x [R, H]; round_inner: to x's dtype.
    whole_inner: all inner columns [R, I], from those of this rank."""
    chosen = (routing != 0) & (np.cumsum(routing != 0, axis=1) <= op.top_k)
    y = np.zeros((len(x), op.y.width), np.float32)
    for expert in np.flatnonzero(chosen.any(axis=0)).tolist():
        rows = np.flatnonzero(chosen[:, expert])
        gate, up = np.split(round_inner(product(x[rows], gate_up[expert], None)), 2, axis=1)
        inner = whole_inner(round_inner(activation(gate, up, form=op.form)))
        y[rows] += product(inner, down[expert], None) * routing[rows, expert, None]
    return y


def expert_parallel(
    op: Experts,
    x: Float32s,
    routing: Float32s,
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    *,
    round_inner: Callable[[Float32s], Float32s],
    all_ranks: Callable[[Bytes], Bytes],
) -> Float32s:
    """Return this rank's columns [R, share] of the weighted sum; gate_up and down are of its
    experts. all_ranks: gather the bytes of all ranks. An expert of several ranks is computed by the
    first.
    """
    chosen = (routing != 0) & (np.cumsum(routing != 0, axis=1) <= op.top_k)
    start, end = share_of(op.x.width, op.unit, op.rank, op.degree)
    outputs = np.zeros((len(op.holders), len(x), op.x.width), np.float32)
    for own, expert in enumerate(op.own_experts):
        rows = np.flatnonzero(chosen[:, expert])
        if len(rows) and op.first_rank(expert) == op.rank:
            gate, up = np.split(round_inner(product(x[rows], gate_up[own], None)), 2, axis=1)
            inner = round_inner(activation(gate, up, form=op.form))
            outputs[expert, rows] = product(inner, down[own], None)
    parts = all_ranks(outputs.reshape(-1).view(np.uint8))
    y = np.zeros((len(x), end - start), np.float32)
    for expert in np.flatnonzero(chosen.any(axis=0)).tolist():
        of_rank = parts[op.first_rank(expert)].view(np.float32).reshape(outputs.shape)[expert]
        rows = np.flatnonzero(chosen[:, expert])
        y[rows] += of_rank[rows, start:end] * routing[rows, expert, None]
    return y


def _scores(logits: Float32s, score: RouterScore) -> Float32s:
    """Return softmax or sigmoid of one row's logits [E]."""
    if score is RouterScore.SIGMOID:
        with np.errstate(over="ignore"):
            return np.divide(ONE, ONE + np.exp(-logits), dtype=np.float32)
    powers: Float32s = np.exp(logits - logits.max())
    return np.divide(powers, _sum(powers), dtype=np.float32)


def _chosen(op: Route, ranked: Float32s) -> NDArray[np.int64]:
    """Return ids of the chosen experts, ascending, by what they are ranked by [E]."""
    if op.groups:
        grouped = ranked.reshape(op.groups, -1)
        best = -np.sort(-grouped, axis=1)[:, :2].sum(axis=1)
        kept = _largest(best, op.top_groups)
        outside = np.ones(op.groups, bool)
        outside[kept] = False
        ranked = np.where(np.repeat(outside, grouped.shape[1]), np.float32(-np.inf), ranked)
    return _largest(ranked, op.top_k)


def _largest(values: Float32s, count: int) -> NDArray[np.int64]:
    """Return places of the largest values, ascending; a tie goes to the lower place, NaN comes
    last."""
    order = np.argsort(np.where(np.isnan(values), np.inf, -values), kind="stable")
    return np.sort(order[:count])


def _sum(values: Float32s) -> np.float32:
    """Sum in order."""
    total = np.float32(0)
    for value in values:
        total += value
    return total
