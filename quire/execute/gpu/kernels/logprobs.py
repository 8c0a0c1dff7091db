"""Log-probabilities on the device: of a target token and its rank, of the best, of listed tokens.

Twin: quire/sampling/scoring.py, bit for bit. Three launches: the largest logit of each 1024 tokens;
their masses below the row's largest, whole numbers with an exact sum in any order; one program per
row for the logarithm and the best ones, taken from the blocks' largest one after the other. Always
holds: a row with NaN, +inf or nothing above -inf fails and touches no other. Nothing waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, check_vector, power_of_two
from quire.execute.gpu.kernels.noise import UNITS, mass, minus_log
from quire.sampling.scoring import FAILED, MAX_TOP

BLOCK = 1024  # tokens
NOTHING = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**30)
FAILED_RANK = tl.constexpr(FAILED)


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """What quire.sampling.scoring.Scores has, on the device; and `norms` f32 [2, R]: each row's
    largest logit and minus the logarithm of its mass, NaN where the row failed."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    norms: torch.Tensor


@triton.jit
def _blocks(logits, largest, best_ids, fails, stride, V, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + ids, mask=ids < V, other=NOTHING)
    place = row * BLOCKS + block
    most = tl.max(values, axis=0)
    tl.store(fails + place, tl.max((~(values < float("inf"))).to(tl.int32), axis=0))
    tl.store(largest + place, most)
    tl.store(best_ids + place, tl.min(tl.where(values == most, ids, NO_ID), axis=0))


@triton.jit
def _sums(
    logits,
    targets,
    largest,
    masses,
    before,
    stride,
    V,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MANY: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, MANY)
    most = tl.max(tl.load(largest + row * BLOCKS + at, mask=at < BLOCKS, other=NOTHING), axis=0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + ids, mask=ids < V, other=NOTHING)
    # Failed rows have any sum: they are separated at the end.
    is_usual = (most < float("inf")) & (most > NOTHING)
    below = tl.where(values < float("inf"), values - tl.where(is_usual, most, 0.0), NOTHING)
    below = tl.minimum(below, 0.0)
    place = row * BLOCKS + block
    tl.store(masses + place, tl.sum(mass(below), axis=0))
    target = tl.load(targets + row)
    own = tl.load(logits + row * stride + tl.maximum(target, 0))
    ahead = (values > own) | ((values == own) & (ids < target))
    tl.store(before + place, tl.sum((ahead & (ids < V)).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["norms", "rows"])
def _rows(
    logits,
    targets,
    num_tops,
    largest,
    best_ids,
    fails,
    masses,
    before,
    logprobs,
    ranks,
    top_ids,
    top_logprobs,
    norms,
    stride,
    rows,
    V,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MANY: tl.constexpr,
    TOP: tl.constexpr,
    NEEDS_TARGET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, MANY)
    there = at < BLOCKS
    place = row * BLOCKS + at
    best = tl.load(largest + place, mask=there, other=NOTHING)
    ids = tl.load(best_ids + place, mask=there, other=NO_ID)
    most = tl.max(best, axis=0)
    total = tl.sum(tl.load(masses + place, mask=there, other=0), axis=0)
    target = tl.load(targets + row)
    failed = (tl.max(tl.load(fails + place, mask=there, other=0), axis=0) > 0) | (most == NOTHING)
    if NEEDS_TARGET:
        failed = failed | (target < 0)
    mass_of_all = tl.zeros([16], tl.float32) + (total.to(tl.float64) / UNITS).to(tl.float32)
    minus = tl.max(minus_log(tl.where(failed, 1.0, mass_of_all), False), axis=0)
    nan = float("nan")
    tl.store(norms + row, tl.where(failed, nan, most))
    tl.store(norms + rows + row, tl.where(failed, nan, minus))
    own = tl.load(logits + row * stride + tl.maximum(target, 0))
    has_target = (target >= 0) & (failed == 0)
    tl.store(logprobs + row, tl.where(has_target, (own - most) + minus, nan))
    ahead = tl.sum(tl.load(before + place, mask=there, other=0), axis=0)
    rank = tl.where(target >= 0, ahead + 1, 0)
    tl.store(ranks + row, tl.where(failed, FAILED_RANK, rank))
    wanted = tl.where(failed, 0, tl.load(num_tops + row))
    for number in range(TOP):
        if number < wanted:
            value = tl.max(best, axis=0)
            token = tl.min(tl.where(best == value, ids, NO_ID), axis=0)
            is_real = value > NOTHING
            tl.store(top_ids + row * TOP + number, tl.where(is_real, token, -1))
            logprob = tl.where(is_real, (value - most) + minus, nan)
            tl.store(top_logprobs + row * TOP + number, logprob)
            # The block it came from gives its next one.
            block = tl.minimum(token, V - 1) // BLOCK
            others = block * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(logits + row * stride + others, mask=others < V, other=NOTHING)
            is_after = (values < value) | ((values == value) & (others > token))
            values = tl.where(is_after, values, NOTHING)
            following = tl.max(values, axis=0)
            first = tl.min(tl.where(is_after & (values == following), others, NO_ID), axis=0)
            best = tl.where(at == block, following, best)
            ids = tl.where(at == block, first, ids)
        else:
            tl.store(top_ids + row * TOP + number, -1)
            tl.store(top_logprobs + row * TOP + number, nan)


@triton.jit(do_not_specialize=["norms", "rows", "count"])
def _listed(logits, norms, listed_rows, listed_ids, y, stride, rows, count, AT_ONCE: tl.constexpr):
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = at < count
    row = tl.load(listed_rows + at, mask=inside, other=0).to(tl.int64)
    token = tl.load(listed_ids + at, mask=inside, other=0)
    own = tl.load(logits + row * stride + token, mask=inside, other=0.0)
    most = tl.load(norms + row, mask=inside, other=0.0)
    minus = tl.load(norms + rows + row, mask=inside, other=0.0)
    tl.store(y + at, (own - most) + minus, mask=inside)


def score_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_top: torch.Tensor,
    *,
    max_top: int,
    needs_target: bool = False,
) -> DeviceScores:
    """Return scores of logits f32 [R, V], tokens side by side. targets int32 [R], -1 for none;
    num_top int32 [R], at most max_top. needs_target: a row without target fails, like a row with a
    token choice failed does."""
    rows, vocabulary = logits.shape
    check_rows("logits", logits)
    check_vector("targets", targets, rows, torch.int32)
    check_vector("num_top", num_top, rows, torch.int32)
    if logits.dtype != torch.float32 or not 0 <= max_top <= MAX_TOP:
        raise ValueError(f"logits of {logits.dtype}, max_top {max_top}; f32, 0 to {MAX_TOP}")
    device, blocks = logits.device, cdiv(vocabulary, BLOCK)
    floats = torch.empty((4 * rows,), dtype=torch.float32, device=device)
    scores = DeviceScores(
        logprobs=floats[:rows],
        ranks=torch.empty((rows,), dtype=torch.int32, device=device),
        top_ids=torch.empty((rows, max_top), dtype=torch.int32, device=device),
        top_logprobs=torch.empty((rows, max_top), dtype=torch.float32, device=device),
        norms=floats[rows : 3 * rows].view(2, rows),
    )
    if rows == 0:
        return scores
    largest = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    best_ids = torch.empty_like(largest, dtype=torch.int32)
    fails, before = torch.empty_like(best_ids), torch.empty_like(best_ids)
    masses = torch.empty_like(largest, dtype=torch.int64)
    stride, grid = logits.stride(0), (rows, blocks)
    sizes = {"BLOCK": BLOCK, "BLOCKS": blocks}
    _blocks[grid](
        logits, largest, best_ids, fails, stride, vocabulary, **sizes, num_warps=4, **EXACT
    )
    many = power_of_two(blocks)
    _sums[grid](
        logits, targets, largest, masses, before, stride, vocabulary,
        **sizes, MANY=many, num_warps=4, **EXACT,
    )  # fmt: skip
    _rows[rows,](
        logits, targets, num_top, largest, best_ids, fails, masses, before,
        scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs, scores.norms,
        stride, rows, vocabulary, **sizes, MANY=many, TOP=max_top, NEEDS_TARGET=needs_target,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return scores


def score_listed(
    logits: torch.Tensor,
    scores: DeviceScores,
    listed_rows: torch.Tensor,
    listed_ids: torch.Tensor,
) -> torch.Tensor:
    """Return log-probabilities f32 [L] of tokens listed_ids int32 [L], each of the row listed_rows
    [L]."""
    count = len(listed_ids)
    check_vector("listed_rows", listed_rows, count, torch.int32)
    check_vector("listed_ids", listed_ids, count, torch.int32)
    y = torch.empty((count,), dtype=torch.float32, device=logits.device)
    if count:
        _listed[cdiv(count, 256),](
            logits, scores.norms, listed_rows, listed_ids, y, logits.stride(0), len(logits), count,
            AT_ONCE=256, num_warps=4, **EXACT,
        )  # fmt: skip
    return y
