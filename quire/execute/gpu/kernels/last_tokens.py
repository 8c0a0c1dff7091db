"""The last token of each slot, on the device: taken as a row's input, kept when it was chosen.

Twins: NumPy's own indexing (tests). Always holds: what is taken is an id, 0 where the row that
chose it had failed. A slot with several rows in a launch (draft tokens) keeps the token of one of
them; no step takes it, because its request has no further row before the host knows its tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import cdiv, check_vector

AT_ONCE = 256


@triton.jit(do_not_specialize=["count"])
def _take(token_ids, late_slots, last, count, AT_ONCE: tl.constexpr):
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    slots = tl.load(late_slots + at, mask=at < count, other=-1)
    is_late = slots >= 0
    tokens = tl.load(last + slots, mask=is_late, other=0)
    tl.store(token_ids + at, tl.maximum(tokens, 0), mask=is_late)


@triton.jit(do_not_specialize=["count"])
def _keep(last, slots, token_ids, count, AT_ONCE: tl.constexpr):
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = at < count
    tokens = tl.load(token_ids + at, mask=inside, other=0)
    tl.store(last + tl.load(slots + at, mask=inside, other=0), tokens, mask=inside)


def take_last_tokens(token_ids: torch.Tensor, late_slots: torch.Tensor, last: torch.Tensor) -> None:
    """Replace token_ids int32 [T] of rows with late_slots int32 [T] other than -1 by the last token
    of that slot, from last int32 [slots]."""
    count = len(token_ids)
    check_vector("token_ids", token_ids, count, torch.int32)
    check_vector("late_slots", late_slots, count, torch.int32)
    check_vector("last", last, len(last), torch.int32)
    if count:
        _take[cdiv(count, AT_ONCE),](
            token_ids, late_slots, last, count, AT_ONCE=AT_ONCE, num_warps=4
        )


def keep_last_tokens(last: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """last int32 [slots]: token_ids int32 [R] are the last of slots int32 [R] now."""
    count = len(slots)
    check_vector("last", last, len(last), torch.int32)
    check_vector("slots", slots, count, torch.int32)
    check_vector("token_ids", token_ids, count, torch.int32)
    if count:
        _keep[cdiv(count, AT_ONCE),](last, slots, token_ids, count, AT_ONCE=AT_ONCE, num_warps=4)
