"""Choice of experts, and the sum of their outputs: a mixture of experts without its products.

A slot is one (row, choice) pair; a row has `top_k` slots, which hold the experts that it chose in
the order of their ids, -1 where it chose fewer. Twin: quire/execute/reference_experts.py, within
the error of exp and of f32 sums. Knows no weights. Always holds: one program computes a row from
its own numbers, so that its bits depend on no other row; outputs are added in the order of ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, check_vector, power_of_two
from quire.execute.gpu.kernels.rounding import as_type

MAX_COLUMNS = 1024  # of one program
# Keeps the sum of chosen scores above 0, as quire/execute/reference_experts.py.
SMALLEST_SUM = tl.constexpr(1e-20)
LOWEST = tl.constexpr(float("-inf"))
PAST = tl.constexpr(1 << 30)


@triton.jit
def _best_groups(values, places, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr):
    """Return whether a group of values [groups, experts] is among those in which the two largest
    add up to most; a tie goes to the lower group."""
    groups = tl.arange(0, values.shape[0])
    sums = tl.max(values, axis=1)
    if SIZE > 1:
        at = tl.min(tl.where(values == sums[:, None], places, PAST), axis=1)
        sums += tl.max(tl.where(places == at[:, None], LOWEST, values), axis=1)
    sums = tl.where(sums == sums, sums, LOWEST)
    free = groups < GROUPS
    for _ in tl.static_range(TOP):
        best = tl.max(tl.where(free, sums, LOWEST), axis=0)
        free = free & (groups != tl.min(tl.where(free & (sums == best), groups, PAST), axis=0))
    return (groups < GROUPS) & (free == 0)


@triton.jit
def _route(
    x,
    bias,
    y,
    x_stride,
    y_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, BG)[:, None], tl.arange(0, BS)[None, :]
    inside = (groups < GROUPS) & (places < SIZE)
    experts = groups * SIZE + places
    logits = tl.load(x + row * x_stride + experts, mask=inside, other=LOWEST)
    if IS_SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = tl.div_rn(powers, tl.sum(tl.sum(powers, axis=1), axis=0))
    values = scores
    if HAS_BIAS:
        values += tl.load(bias + experts, mask=inside, other=0.0)
    values = tl.where(inside & (values == values), values, LOWEST)  # NaN comes last
    if TOP_GROUPS > 0:
        kept = _best_groups(values, places, GROUPS, SIZE, TOP_GROUPS)
        values = tl.where(kept[:, None], values, LOWEST)
    free = inside
    for _ in tl.static_range(TOP_K):
        best = tl.max(tl.max(tl.where(free, values, LOWEST), axis=1), axis=0)
        ids = tl.where(free & (values == best), experts, PAST)
        free = free & (experts != tl.min(tl.min(ids, axis=1), axis=0))
    weights = tl.where(inside & (free == 0), scores, 0.0)
    if IS_NORMALIZED:
        weights = tl.div_rn(weights, tl.sum(tl.sum(weights, axis=1), axis=0) + SMALLEST_SUM)
    chosen = tl.where(inside & (free == 0), weights * SCALE, 0.0)
    tl.store(y + row * y_stride + experts, chosen, mask=inside)


def route(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    top_k: int,
    groups: int = 0,
    top_groups: int = 0,
    scale: float = 1.0,
    is_sigmoid: bool = False,
    is_normalized: bool = False,
) -> None:
    """y [R, E] = the routing weights by logits x [R, E], and the bias f32 [E] of the choice: see
    quire.program.expert_ops.Route. x and y are f32, any row stride."""
    rows, experts = x.shape
    check_rows("x", x)
    check_rows("y", y, rows, experts)
    check_vector("bias", bias, experts, torch.float32)
    if rows == 0:
        return
    count = groups or 1
    _route[(rows,)](
        x,
        x if bias is None else bias,
        y,
        x.stride(0),
        y.stride(0),
        GROUPS=count,
        SIZE=experts // count,
        BG=power_of_two(count),
        BS=power_of_two(experts // count),
        TOP_K=top_k,
        TOP_GROUPS=top_groups if groups else 0,
        SCALE=scale,
        IS_SIGMOID=is_sigmoid,
        IS_NORMALIZED=is_normalized,
        HAS_BIAS=bias is not None,
        num_warps=4 if experts > 64 else 1,
        **EXACT,
    )


@dataclass(frozen=True, slots=True)
class HolderTables:
    """Which ranks have each expert, int32: ranks [E, most copies], of which the first copies [E]
    count; places [E] of the experts that this rank has, among its own."""

    ranks: torch.Tensor
    copies: torch.Tensor
    places: torch.Tensor
    rank: int


@dataclass(frozen=True, slots=True)
class OwnSlots:
    """Where experts are whole on ranks: the rank that computes each slot, -1 of an empty one, and
    of this rank's the place of the expert among its own, else -1; int32 [R, C]."""

    owners: torch.Tensor
    places: torch.Tensor


@triton.jit(do_not_specialize=["sequences"])
def _choose_slots(
    routing,
    ids,
    shares,
    starts,
    loads,
    holders,
    copies,
    places,
    owners,
    own_places,
    sequences,
    routing_stride,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    MAX_COPIES: tl.constexpr,
    RANK: tl.constexpr,
    HAS_LOADS: tl.constexpr,
):
    row = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    at = routing + row.to(tl.int64) * routing_stride + experts
    weights = tl.load(at, mask=experts < EXPERTS, other=0.0)
    # Rows past the step's, up to those of a captured one, choose nothing.
    held = (weights != 0.0) & (row < tl.load(starts + sequences))
    order = tl.cumsum(held.to(tl.int32), axis=0)
    for choice in tl.static_range(CHOICES):
        hit = held & (order == choice + 1)
        expert = tl.max(tl.where(hit, experts, -1), axis=0)
        tl.store(ids + row * CHOICES + choice, expert)
        tl.store(shares + row * CHOICES + choice, tl.sum(tl.where(hit, weights, 0.0), axis=0))
        if HAS_LOADS:
            tl.atomic_add(loads + tl.maximum(expert, 0), 1, mask=expert >= 0)
        if MAX_COPIES > 0:
            known = tl.maximum(expert, 0)
            # The rows of an expert with copies take turns, so that all ranks choose alike.
            turn = row % tl.load(copies + known)
            owner = tl.where(expert < 0, -1, tl.load(holders + known * MAX_COPIES + turn))
            tl.store(owners + row * CHOICES + choice, owner)
            place = tl.where(owner == RANK, tl.load(places + known), -1)
            tl.store(own_places + row * CHOICES + choice, place)


def choose_slots(
    routing: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    *,
    starts: torch.Tensor,
    sequences: int,
    loads: torch.Tensor | None = None,
    holders: HolderTables | None = None,
    own: OwnSlots | None = None,
) -> None:
    """ids int32 [R, C] and shares f32 [R, C] = the slots of routing weights [R, E]: the first C
    experts with a weight that is not 0, and these weights.

    starts: int32, of which element `sequences` is the number of rows that count. loads: int64 [E],
    to which each choice adds 1. own: written where experts are whole on ranks, by `holders`.
    """
    rows, experts = routing.shape
    choices = ids.shape[1]
    check_rows("routing", routing)
    if ids.shape != (rows, choices) or ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}; int32 [{rows}, any]")
    if shares.shape != ids.shape or not shares.is_contiguous():
        raise ValueError(f"shares are {tuple(shares.shape)}; {tuple(ids.shape)}, side by side")
    check_vector("loads", loads, experts, torch.int64)
    if rows == 0:
        return
    _choose_slots[(rows,)](
        routing,
        ids,
        shares,
        starts,
        starts if loads is None else loads,
        ids if holders is None else holders.ranks,
        ids if holders is None else holders.copies,
        ids if holders is None else holders.places,
        ids if own is None else own.owners,
        ids if own is None else own.places,
        sequences,
        routing.stride(0),
        EXPERTS=experts,
        BLOCK=power_of_two(experts),
        CHOICES=choices,
        MAX_COPIES=0 if holders is None or own is None else holders.ranks.shape[1],
        RANK=0 if holders is None else holders.rank,
        HAS_LOADS=loads is not None,
        num_warps=4 if experts > 64 else 1,
        **EXACT,
    )


@triton.jit
def _weighted_sum(
    outputs,
    ids,
    shares,
    owners,
    y,
    part_stride,
    output_stride,
    y_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        slot = row * CHOICES + choice
        if tl.load(ids + slot) >= 0:
            at = outputs + slot * output_stride + columns
            if HAS_OWNERS:
                at += tl.load(owners + slot).to(tl.int64) * part_stride
            share = tl.zeros([BLOCK], tl.float32) + tl.load(shares + slot)
            total = tl.fma(tl.load(at, mask=inside, other=0.0), share, total)
    tl.store(y + row * y_stride + columns, as_type(total, y.dtype.element_ty), mask=inside)


def weighted_sum(
    outputs: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    y: torch.Tensor,
    *,
    owners: torch.Tensor | None = None,
) -> None:
    """y [R, N] = the sum of each row's outputs times their shares, slot by slot.

    outputs: f32 [R * C, N]; with owners int32 [R, C] it is [parts, R * C, N] and a slot's output is
    in the part of its owner. ids, shares: see choose_slots. y: f32 or bf16, any row stride.
    """
    rows, choices = ids.shape
    of_slots = outputs if owners is None else outputs[0]
    width = y.shape[1]
    check_rows("y", y, rows)
    check_rows("outputs", of_slots, rows * choices, of_slots.shape[1])
    if of_slots.shape[1] < width or outputs.dtype != torch.float32:
        raise ValueError(f"outputs are {outputs.dtype} {tuple(outputs.shape)}; f32 of {width}")
    if rows == 0:
        return
    block = power_of_two(width, most=MAX_COLUMNS)
    _weighted_sum[rows, cdiv(width, block)](
        outputs,
        ids,
        shares,
        ids if owners is None else owners,
        y,
        0 if owners is None else outputs.stride(0),
        of_slots.stride(0),
        y.stride(0),
        WIDTH=width,
        BLOCK=block,
        CHOICES=choices,
        HAS_OWNERS=owners is not None,
        num_warps=4,
        **EXACT,
    )
