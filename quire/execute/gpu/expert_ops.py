"""Route and Experts bound to tensors: mixtures of experts, and what their ranks exchange.

Of each row `top_k` slots hold the experts that it chose, in the order of their ids. Ranks compute
the same routing weights, so that all have the same slots. Where experts are split by columns, ranks
gather the inner columns of all slots; where ranks have whole experts, each computes the slots of
its own, and gets its columns of all outputs (all_to_all). Knows operations, tensors and ends
(exchange.py); no transport. Always holds: a row's bits depend on its own choices, and its outputs
are added in the order of ids, whichever rank computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.execute.executor import StepLimits
from quire.execute.gpu import plain
from quire.execute.gpu.place import Call, Place, rows_exchanged
from quire.execute.gpu.plain_routing import Slots, route, slots_of, weighted_sum
from quire.execute.gpu.rank_ops import exchange_of
from quire.execute.gpu.step_buffers import Counts
from quire.program.comm_ops import share_of
from quire.program.expert_ops import Experts, Route
from quire.program.program import Program

# An expert's product: x [r, K] by the matrix of an expert, [r, N] in float32.
Product = Callable[[int, Tensor], Tensor]


def bind_route(op: Route, place: Place) -> Call:
    """Return the call of a choice of experts."""

    def call(counts: Counts) -> None:
        place.of(op.y, counts).copy_(route(op, place.of(op.x, counts), place.vector(op.bias)))

    return call


def bind_experts(op: Experts, place: Place) -> Call:
    """Return the call of a mixture. Raises ValueError where there are no such other ranks."""
    if op.degree > 1:
        exchange_of(op, place.ends)
    gate_up, down = (_product_of(place, name) for name in (op.gate_up, op.down))
    if op.holders:
        holders = Holders.of(op, place.step.token_ids.device)
        return partial(_expert_parallel, op, place, gate_up, down, holders)
    return partial(_experts, op, place, gate_up, down)


def _experts(op: Experts, place: Place, gate_up: Product, down: Product, counts: Counts) -> None:
    x = place.of(op.x, counts)
    slots = slots_of(place.of(op.routing, counts), op.top_k)
    place.count_experts(op, slots.experts)
    inner = _inner(op, x, slots.experts.flatten(), gate_up, _columns(op, place))
    if op.degree > 1:
        inner = _whole_inner(op, place, inner)
    outputs = _by_expert(inner, slots.experts.flatten(), down, op.y.width, slots_a_row=1)
    place.of(op.y, counts).copy_(weighted_sum(outputs, slots))


def _columns(op: Experts, place: Place) -> int:
    """Return the inner columns that this rank computes."""
    return op.own_inner(place.program.weights[op.down].columns)


def _inner(op: Experts, x: Tensor, experts: Tensor, gate_up: Product, columns: int) -> Tensor:
    """Return form(gate) * up [S, columns] of each slot, in x's dtype; zeros where it is empty."""
    slots_a_row = len(experts) // max(len(x), 1)
    both = _by_expert(x, experts, gate_up, 2 * columns, slots_a_row=slots_a_row).to(x.dtype)
    gate, up = both[:, :columns], both[:, columns:]
    return plain.activation(gate, up, form=op.form).to(x.dtype)


def _by_expert(
    x: Tensor, experts: Tensor, product: Product, width: int, *, slots_a_row: int
) -> Tensor:
    """Return [S, width]: slot s is row s / slots_a_row of x by its expert's matrix."""
    y = torch.zeros(len(experts), width, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if expert >= 0:
            at = (experts == expert).nonzero()[:, 0]
            y[at] = product(expert, x[at // slots_a_row])
    return y


def _product_of(place: Place, name: str) -> Product:
    """Return the products of a weight with an expert axis."""
    rows: int = place.program.weights[name].expert_rows
    few: Any = place.weights.few.get(name)

    def by_integers(expert: int, x: Tensor) -> Tensor:
        weight = few[expert]
        return plain.int_linear(x, weight.values, weight.scales, weight.scheme, None)

    def as_is(expert: int, x: Tensor) -> Tensor:
        own = place.weights.plain[name][expert * rows : (expert + 1) * rows]
        return plain.linear(x, own, None, exact=place.exact)

    return as_is if few is None else by_integers


# ---- experts that are split by columns


def _whole_inner(op: Experts, place: Place, inner: Tensor) -> Tensor:
    """Return all inner columns [S, I] of all slots, from those of this rank."""
    width = place.program.weights[op.down].columns
    shares = [share_of(width, op.unit, rank, op.degree) for rank in range(op.degree)]
    widest = max(end - start for start, end in shares)
    own, every = place.room.parts(len(inner), widest, op.degree, inner.dtype)
    own[:, : inner.shape[1]] = inner
    exchange_of(op, place.ends).all_gather(own, every)
    parts = [part[:, : end - start] for part, (start, end) in zip(every, shares, strict=True)]
    return torch.cat(parts, dim=1)


# ---- whole experts on ranks


@dataclass(frozen=True, slots=True)
class Holders:
    """Which ranks have each expert: ranks [E, most copies], of which the first copies [E] count.
    own: of this rank's experts, their places among its weights; -1 of the others."""

    ranks: Tensor
    copies: Tensor
    own: Tensor

    @classmethod
    def of(cls, op: Experts, device: torch.device) -> Holders:
        """Return those of an operation."""
        held = [[r for r in range(op.degree) if mask >> r & 1] for mask in op.holders]
        most = max(map(len, held))
        places = {expert: place for place, expert in enumerate(op.own_experts)}
        return cls(
            ranks=torch.tensor([row + row[:1] * (most - len(row)) for row in held], device=device),
            copies=torch.tensor([len(row) for row in held], device=device),
            own=torch.tensor([places.get(e, -1) for e in range(len(held))], device=device),
        )

    def rank_of(self, experts: Tensor) -> Tensor:
        """Return the rank that computes each slot of experts [R, C]; -1 of an empty one. The rows
        of an expert with copies take turns, so that all ranks choose alike without an exchange."""
        known = experts.clamp(min=0)
        turn = torch.arange(len(experts), device=experts.device)[:, None] % self.copies[known]
        ranks = self.ranks[known].gather(2, turn[:, :, None])[:, :, 0]
        return torch.where(experts >= 0, ranks, -1)


def _expert_parallel(
    op: Experts,
    place: Place,
    gate_up: Product,
    down: Product,
    holders: Holders,
    counts: Counts,
) -> None:
    x = place.of(op.x, counts)
    slots = slots_of(place.of(op.routing, counts), op.top_k)
    place.count_experts(op, slots.experts)
    ranks = holders.rank_of(slots.experts)
    own = torch.where(ranks == op.rank, holders.own[slots.experts.clamp(min=0)], -1).flatten()
    inner = _inner(op, x, own, gate_up, _columns(op, place))
    outputs = _by_expert(inner, own, down, op.x.width, slots_a_row=1)
    y, at_once = place.of(op.y, counts), rows_exchanged(op)
    for first in range(0, len(x), at_once):
        some = slice(first, first + at_once)
        of_slots = slice(first * op.top_k, (first + at_once) * op.top_k)
        columns = _own_columns(op, place, outputs[of_slots], ranks[some].flatten())
        y[some] = weighted_sum(columns, Slots(slots.experts[some], slots.weights[some]))


def _own_columns(op: Experts, place: Place, outputs: Tensor, ranks: Tensor) -> Tensor:
    """Return this rank's columns [S, share] of the outputs of all slots, of which outputs [S, H]
    has those that this rank computed."""
    shares = [share_of(op.x.width, op.unit, rank, op.degree) for rank in range(op.degree)]
    widest = max(end - start for start, end in shares)
    of_rank = [(ranks == rank).nonzero()[:, 0] for rank in range(op.degree)]
    most = max(map(len, of_rank))
    own, every = place.room.to_each(most, widest, op.degree, outputs.dtype)
    computed = outputs[of_rank[op.rank]]
    for part, (start, end) in zip(own, shares, strict=True):
        part[: len(computed), : end - start] = computed[:, start:end]
    exchange_of(op, place.ends).all_to_all(own, every)
    start, end = shares[op.rank]
    columns = torch.zeros(len(ranks), end - start, dtype=outputs.dtype, device=outputs.device)
    for part, at in zip(every, of_rank, strict=True):
        columns[at] = part[: len(at), : end - start]
    return columns


def scratch_bytes(program: Program, limits: StepLimits) -> int:
    """Return the bytes of what the largest mixture of a step computes between its operands."""
    return max((_scratch_of(op, program, limits) for op in mixtures_of(program)), default=0)


def mixtures_of(program: Program) -> Iterator[Experts]:
    """Yield the mixtures of a program, those of one expert behind a gate too."""
    return (op for op in program.operations() if isinstance(op, Experts))


def _scratch_of(op: Experts, program: Program, limits: StepLimits) -> int:
    whole, size = program.weights[op.down].columns, op.x.dtype.itemsize
    inner = op.own_inner(whole)
    outputs = op.x.width if op.holders else op.y.width
    of_slot = 2 * inner * (op.y.dtype.itemsize + size) + (inner + whole) * size
    slots = limits.rows(op.x.buffer.rows) * op.top_k
    return slots * (of_slot + outputs * op.y.dtype.itemsize)
