"""The choice of experts, and the sum of their outputs, in plain PyTorch.

As quire/execute/reference_experts.py says, by sums and curves of which a row's bits depend on that
row alone (plain_curves.py). Knows the operations and no weights. Letters: R rows, E experts, C
slots of a row, N columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.execute.gpu import plain_curves
from quire.program.expert_ops import Route
from quire.program.forms import RouterScore, RoutingForm

# Keeps the sum of chosen scores above 0; too small to change any other sum.
SMALLEST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class Slots:
    """The chosen experts [R, C] of rows in the order of ids, -1 where a row chose fewer; and their
    routing weights, 0 there."""

    experts: Tensor
    weights: Tensor


def route(op: Route, logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return routing weights [R, E] by logits [R, E] and the bias [E] of the choice."""
    scores = _scores(logits, op.score)
    ids = _chosen(op, scores if bias is None else scores + bias)
    weights = scores.gather(1, ids)
    if op.form is RoutingForm.NORMALIZED:
        weights = weights / (_sum_in_order(weights) + SMALLEST_SUM)[:, None]
    scale = torch.tensor(op.scale, dtype=torch.float32, device=logits.device)
    return torch.zeros_like(logits).scatter(1, ids, weights * scale)


def slots_of(routing: Tensor, top_k: int) -> Slots:
    """Return the first `top_k` experts of each row with a routing weight that is not 0."""
    experts = routing.shape[1]
    ids = torch.arange(experts, device=routing.device)
    ordered = torch.where(routing != 0, ids, experts).sort(dim=1).values[:, :top_k]
    is_held = ordered < experts
    weights = routing.gather(1, ordered.clamp(max=experts - 1))
    return Slots(torch.where(is_held, ordered, -1), torch.where(is_held, weights, 0.0))


def weighted_sum(outputs: Tensor, slots: Slots) -> Tensor:
    """Return the sum [R, N] of the outputs [R * C, N] of each row's slots, in order."""
    rows, count = slots.experts.shape
    of_rows = outputs.view(rows, count, -1)
    y = torch.zeros(rows, of_rows.shape[2], dtype=torch.float32, device=outputs.device)
    for slot in range(count):
        added = y + of_rows[:, slot] * slots.weights[:, slot, None]
        y = torch.where(slots.experts[:, slot, None] >= 0, added, y)
    return y


def _scores(logits: Tensor, score: RouterScore) -> Tensor:
    """Return softmax or sigmoid of logits [R, E]."""
    if score is RouterScore.SIGMOID:
        return 1 / (1 + plain_curves.exp(-logits))
    powers = plain_curves.exp(logits - logits.amax(dim=1, keepdim=True))
    return powers / plain_curves.sum_last(powers.clone())[:, None]


def _chosen(op: Route, ranked: Tensor) -> Tensor:
    """Return ids [R, C] of the chosen experts, ascending, by what they are ranked by [R, E]."""
    if op.groups:
        grouped = ranked.unflatten(1, (op.groups, -1))
        best = (-grouped).sort(dim=2).values[:, :, :2]  # NaN comes last
        kept = _largest(-_sum_in_order(best.transpose(1, 2)), op.top_groups)
        outside = torch.ones(len(ranked), op.groups, dtype=torch.bool, device=ranked.device)
        outside = outside.scatter(1, kept, value=False)
        ranked = ranked.masked_fill(outside.repeat_interleave(grouped.shape[2], dim=1), -torch.inf)
    return _largest(ranked, op.top_k)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return places [R, count] of the largest values, ascending; a tie goes to the lower place, NaN
    comes last."""
    keys = torch.where(values.isnan(), torch.inf, -values)
    order = keys.sort(dim=1, stable=True).indices[:, :count]
    return order.sort(dim=1).values


def _sum_in_order(values: Tensor) -> Tensor:
    """Return the sum over axis 1, term by term."""
    total = torch.zeros_like(values[:, 0])
    for at in range(values.shape[1]):
        total = total + values[:, at]
    return total
