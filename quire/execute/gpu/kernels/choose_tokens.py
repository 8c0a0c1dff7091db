"""Token choice on the device: temperature, top_k, top_p, min_p and the same noise as the CPU.

Twin: quire.sampling.reference.choose, token for token. Two launches: one program for 1024 tokens
of a row finds the best of them under the noise, one program a row takes the best of these; a row
with filters is searched there instead, digit by digit of the values' bits, since what top_k, top_p
and min_p keep is the beginning of one order (value down, id up) and so a last value and a last id.
Counts and masses are whole numbers: no order of adding them matters.

What is in the logits before (bias, penalties, bans, masks) is edit_logits.py's; which rows
the host samples instead is decided by `rows_for_the_host` of device_params.py. Invariants: a row's
token depends on its own logits and parameters only; a row with NaN, +inf or nothing to choose
gets -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.device_params import DeviceSamplingParams
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, power_of_two
from quire.execute.gpu.kernels.noise import gumbel, mass, minus_log, row_key

BLOCK = 1024  # tokens
SMALLEST_TEMPERATURE = tl.constexpr(2.0**-40)
SMALLEST_MIN_P = tl.constexpr(2.0**-126)
NOTHING = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**30)
DIGITS = tl.constexpr(16)  # of four bits
# Their addresses depend on the number of rows (DeviceSamplingParams): not compiled in.
OF_ROWS = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "streams", "positions")


@triton.jit
def _values(edited, row, ids, inside, V: tl.constexpr, temperature):
    """Return the row's values after the temperature; -inf past the end."""
    values = tl.load(edited + row * V + ids, mask=inside, other=NOTHING)
    is_greedy = temperature < SMALLEST_TEMPERATURE
    # + 0: no negative zeros
    return tl.where(
        is_greedy, values, tl.div_rn(values, tl.where(is_greedy, 1.0, temperature)) + 0.0
    )


@triton.jit
def _has_filters(temperature, top_k, top_p, min_p, V: tl.constexpr):
    some = ((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p >= SMALLEST_MIN_P)
    return some & (temperature >= SMALLEST_TEMPERATURE)


@triton.jit(do_not_specialize=OF_ROWS)
def _scan(
    logits,
    edited,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    streams,
    positions,
    largest,
    best_values,
    best_ids,
    fails,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_EDITED: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    values = _values(edited, row, ids, inside, V, temperature)
    fine = values < float("inf")
    if IS_EDITED:
        fine = fine & (tl.load(logits + row * V + ids, mask=inside, other=0.0) < float("inf"))
    place = row * BLOCKS + block
    tl.store(fails + place, tl.max((~fine).to(tl.int32), axis=0))
    tl.store(largest + place, tl.max(values, axis=0))
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    if not _has_filters(temperature, top_k, top_p, min_p, V):
        if temperature >= SMALLEST_TEMPERATURE:
            key = row_key(tl.load(seeds + row), tl.load(streams + row), tl.load(positions + row))
            values += gumbel(key, ids)
        best = tl.max(values, axis=0)
        tl.store(best_values + place, best)
        tl.store(best_ids + place, tl.min(tl.where(values == best, ids, NO_ID), axis=0))


@triton.jit
def _ordered(values):
    """f32 as int64 of the same order, 0 to 2^32 - 1; no negative zeros."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 2147483648


@triton.jit
def _kept(keys, ids, last_key, last_id):
    """Return whether a token is in the beginning of the order that ends with (last_key,
    last_id)."""
    return (keys > last_key) | ((keys == last_key) & (ids <= last_id))


@triton.jit
def _end_of(
    edited,
    largest,
    row,
    temperature,
    most,
    needed,
    last_key,
    last_id,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Of the order up to (last_key, last_id), the shortest beginning that holds `needed` tokens
    (by mass: so many units below `most`, the largest value); its last key and id. All of it must
    hold as much."""
    at = tl.arange(0, BLOCK)
    digits = tl.arange(0, DIGITS)
    prefix = tl.zeros([], tl.int64)
    rest = needed
    for place in range(8):
        shift = 28 - 4 * place
        sums = tl.zeros([BLOCK, DIGITS], tl.int64 if BY_MASS else tl.int32)
        for block in range(BLOCKS):
            # Blocks in which all tokens lie below the sought value are not read.
            if (_ordered(tl.load(largest + row * BLOCKS + block)) >> (shift + 4)) >= prefix:
                ids = block * BLOCK + at
                values = _values(edited, row, ids, ids < V, V, temperature)
                keys = _ordered(values)
                counts = _kept(keys, ids, last_key, last_id) & (ids < V)
                counts = counts & ((keys >> (shift + 4)) == prefix)
                if BY_MASS:
                    amount = tl.where(counts, mass(tl.where(counts, values - most, 0.0)), 0)
                else:
                    amount = counts.to(tl.int32)
                is_digit = ((keys >> shift) & 15)[:, None] == digits[None, :]
                sums += tl.where(is_digit, amount[:, None], 0)
        by_digit = tl.sum(sums, axis=0).to(tl.int64)
        above = tl.sum(tl.where(digits[None, :] > digits[:, None], by_digit[None, :], 0), axis=1)
        # The digit at which the sum from above reaches the rest.
        digit = tl.max(tl.where(above + by_digit >= rest, digits, 0), axis=0)
        rest = rest - tl.sum(tl.where(digits == digit, above, 0), axis=0)
        prefix = prefix * 16 + digit
    if BY_MASS:  # equal values have equal masses
        value = _value_of(prefix)
        unit = tl.max(mass(tl.zeros([16], tl.float32) + (value - most)), axis=0)
        rest = (rest + unit - 1) // tl.maximum(unit, 1)
    return prefix, _id_of(edited, largest, row, temperature, prefix, rest, V, BLOCK, BLOCKS)


@triton.jit
def _value_of(key):
    bits = (key - 2147483648).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(
    edited,
    largest,
    row,
    temperature,
    key,
    number,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the id of the number-th token with this key, in the order of ids."""
    at = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int64)
    found = tl.zeros([], tl.int32) + NO_ID
    for block in range(BLOCKS):
        if (before < number) & (_ordered(tl.load(largest + row * BLOCKS + block)) >= key):
            ids = block * BLOCK + at
            values = _values(edited, row, ids, ids < V, V, temperature)
            same = ((_ordered(values) == key) & (ids < V)).to(tl.int64)
            reached = before + tl.cumsum(same, axis=0)
            here = tl.where((reached == number) & (same == 1), ids, NO_ID)
            found = tl.minimum(found, tl.min(here, axis=0))
            before += tl.sum(same, axis=0)
    return found


@triton.jit
def _mass_of(
    edited,
    largest,
    row,
    temperature,
    most,
    last_key,
    last_id,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the mass of the order up to (last_key, last_id)."""
    sums = tl.zeros([BLOCK], tl.int64)
    for block in range(BLOCKS):
        if _ordered(tl.load(largest + row * BLOCKS + block)) >= last_key:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            values = _values(edited, row, ids, ids < V, V, temperature)
            counts = _kept(_ordered(values), ids, last_key, last_id) & (ids < V)
            sums += tl.where(counts, mass(tl.where(counts, values - most, 0.0)), 0)
    return tl.sum(sums, axis=0)


@triton.jit
def _drawn(
    edited,
    largest,
    row,
    temperature,
    key,
    last_key,
    last_id,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the largest of value + noise over what is kept, ties to the lowest id."""
    best = tl.full([BLOCK], NOTHING, tl.float32)
    best_ids = tl.full([BLOCK], NO_ID, tl.int32)
    for block in range(BLOCKS):
        if _ordered(tl.load(largest + row * BLOCKS + block)) >= last_key:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            values = _values(edited, row, ids, ids < V, V, temperature)
            counts = _kept(_ordered(values), ids, last_key, last_id) & (ids < V)
            noisy = tl.where(counts, values + gumbel(key, ids), NOTHING)
            better = noisy > best
            best, best_ids = tl.where(better, noisy, best), tl.where(better, ids, best_ids)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_ids, NO_ID), axis=0)


@triton.jit(do_not_specialize=OF_ROWS)
def _finish(
    edited,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    streams,
    positions,
    largest,
    best_values,
    best_ids,
    fails,
    token_ids,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MANY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, MANY)
    there = at < BLOCKS
    place = row * BLOCKS + at
    failed = tl.max(tl.load(fails + place, mask=there, other=0), axis=0) > 0
    most = tl.max(tl.load(largest + place, mask=there, other=NOTHING), axis=0)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    token = tl.full([], -1, tl.int32)
    if (not failed) & (most > NOTHING):
        if _has_filters(temperature, top_k, top_p, min_p, V):
            last_key = tl.zeros([], tl.int64)
            last_id = tl.full([], NO_ID, tl.int32)
            if min_p >= SMALLEST_MIN_P:
                reach = tl.max(minus_log(tl.zeros([16], tl.float32) + min_p, False), axis=0)
                last_key = _ordered(most - reach + 0.0)
            if (top_k > 0) & (top_k < V):
                count = top_k.to(tl.int64)
                end, end_id = _end_of(
                    edited, largest, row, temperature, most, count,
                    tl.zeros([], tl.int64), tl.full([], NO_ID, tl.int32), V, BLOCK, BLOCKS, False,
                )  # fmt: skip
                if end >= last_key:
                    last_key, last_id = end, end_id
            if top_p < 1.0:
                whole = _mass_of(
                    edited, largest, row, temperature, most, last_key, last_id, V, BLOCK, BLOCKS
                ).to(tl.float64)
                share = top_p.to(tl.float64) * whole
                needed = share.to(tl.int64)
                needed = tl.maximum(needed + (needed.to(tl.float64) < share).to(tl.int64), 1)
                last_key, last_id = _end_of(
                    edited, largest, row, temperature, most, needed, last_key, last_id,
                    V, BLOCK, BLOCKS, True,
                )  # fmt: skip
            key = row_key(tl.load(seeds + row), tl.load(streams + row), tl.load(positions + row))
            token = _drawn(
                edited, largest, row, temperature, key, last_key, last_id, V, BLOCK, BLOCKS
            )
        else:
            values = tl.load(best_values + place, mask=there, other=NOTHING)
            ids = tl.load(best_ids + place, mask=there, other=NO_ID)
            token = tl.min(tl.where(values == tl.max(values, axis=0), ids, NO_ID), axis=0)
    tl.store(token_ids + row, token)


def choose_tokens(
    logits: torch.Tensor,
    params: DeviceSamplingParams,
    token_ids: torch.Tensor,
    *,
    edited: torch.Tensor | None = None,
) -> None:
    """token_ids int32 [R] = a token of each row of logits f32 [R, V], both side by side.

    edited: logits after bias, penalties, bans and masks, where some row has any. Only what is in
    `params` (temperature, top_k, top_p, min_p) is looked at: params.rows_for_the_host says which
    rows ask for more.
    """
    rows, vocabulary = logits.shape
    source = logits if edited is None else edited
    for name, tensor in (("logits", logits), ("edited", source)):
        check_rows(name, tensor, rows, vocabulary)
        if tensor.dtype != torch.float32 or (rows > 1 and tensor.stride(0) != vocabulary):
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}; f32 is needed")
    if token_ids.shape != (rows,) or params.temperature.shape[0] < rows:
        raise ValueError(
            f"{rows} rows of logits, room for {tuple(token_ids.shape)} tokens, params for "
            f"{params.temperature.shape[0]}"
        )
    if rows == 0:
        return
    blocks = cdiv(vocabulary, BLOCK)
    device = logits.device
    largest = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    best_values, fails = torch.empty_like(largest), torch.empty_like(largest, dtype=torch.int32)
    best_ids = torch.empty_like(fails)
    parameters = (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seeds,
        params.streams,
        params.positions,
    )
    found = (largest, best_values, best_ids, fails)
    _scan[rows, blocks](
        logits,
        source,
        *parameters,
        *found,
        V=vocabulary,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        IS_EDITED=edited is not None,
        num_warps=4,
        **EXACT,
    )
    _finish[rows,](
        source,
        *parameters,
        *found,
        token_ids,
        V=vocabulary,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        MANY=power_of_two(blocks),
        num_warps=16,
        **EXACT,
    )
