"""Token choice in NumPy: the obvious twin of the native one, same tokens bit for bit.

Sorts where the native code selects, goes row by row, and is otherwise the semantics of
sampling/batch.py written down. Knows no threads and no requests. Always holds: a row's result
depends on its own logits and parameters only.

Beside NaN, +inf is a row error (a model that overflowed has no distribution), whether it was in
the logits or comes out of penalties and temperature. Temperatures below 2^-40 are greedy: no
noise could turn a difference that f32 shows. A min_p below the smallest normal f32 is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.sampling.batch import Float32s, Int32s, SampleBatch, TokenChoice
from quire.sampling.noise import MAX_VOCAB, gumbel, mass, minus_log

SMALLEST_TEMPERATURE = np.float32(2.0**-40)
SMALLEST_MIN_P = np.float32(2.0**-126)
NOTHING = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class _Row:
    """What is chosen for one row; token -1 and nothing else where it failed."""

    token_id: int = -1
    logprob: float = float("nan")
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def choose(logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
    """Choose a token for each row of logits [R, V]. Raises ValueError on shapes that disagree."""
    check_shapes(logits, batch)
    num_top = max(0, int(batch.num_logprobs.max(initial=-1)))
    rows = [_choose_row(logits[index], batch, index) for index in range(len(logits))]
    top_ids = np.full((len(rows), num_top), -1, np.int32)
    top_logprobs = np.full((len(rows), num_top), np.nan, np.float32)
    for index, row in enumerate(rows):
        top_ids[index, : len(row.top_ids)] = row.top_ids
        top_logprobs[index, : len(row.top_ids)] = row.top_logprobs
    return TokenChoice(
        token_ids=np.array([row.token_id for row in rows], np.int32),
        logprobs=np.array([row.logprob for row in rows], np.float32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def check_shapes(logits: NDArray[np.float32], batch: SampleBatch) -> None:
    """Raise ValueError where logits and batch do not fit together."""
    rows = len(batch.temperature)
    if logits.ndim != 2 or logits.dtype != np.float32 or len(logits) != rows:
        raise ValueError(
            f"logits are {logits.dtype} {logits.shape}; f32 [{rows}, vocabulary] is needed"
        )
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {logits.shape[1]}; 1 to {MAX_VOCAB} is allowed")
    ids = {"history": batch.history, "bias_ids": batch.bias_ids, "banned_ids": batch.banned_ids}
    for name, array in ids.items():
        if len(array) and not 0 <= array.min() <= array.max() < logits.shape[1]:
            raise ValueError(
                f"{name} holds ids from {array.min()} to {array.max()}; the vocabulary has "
                f"{logits.shape[1]} tokens"
            )
    for name, starts, size in (
        ("history_starts", batch.history_starts, len(batch.history)),
        ("bias_starts", batch.bias_starts, len(batch.bias_ids)),
        ("banned_starts", batch.banned_starts, len(batch.banned_ids)),
    ):
        if len(starts) != rows + 1 or starts[0] < 0 or starts[-1] > size:
            raise ValueError(f"{name} must be {rows + 1} offsets into an array of {size}")
        if (np.diff(starts) < 0).any():
            raise ValueError(f"{name} must not fall: {starts}")


def _choose_row(raw: Float32s, batch: SampleBatch, row: int) -> _Row:
    if not (raw < np.inf).all():  # NaN or +inf
        return _Row()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        edited = _edit(raw, batch, row)
        token_id = _choose_token(edited, batch, row)
    if token_id < 0:
        return _Row()
    if batch.num_logprobs[row] < 0:
        return _Row(token_id)
    logprobs = log_probabilities(raw)
    best = np.argsort(-raw, kind="stable")[: batch.num_logprobs[row]]
    best = best[raw[best] > NOTHING]
    return _Row(
        token_id, float(logprobs[token_id]), tuple(best.tolist()), tuple(logprobs[best].tolist())
    )


def log_probabilities(raw: Float32s) -> Float32s:
    """l - logsumexp(l) of one row [V]."""
    with np.errstate(invalid="ignore"):
        below = raw - raw.max()
    total = mass(below).sum(keepdims=True).astype(np.float32)
    result: Float32s = below + minus_log(total)
    return result


def _edit(raw: Float32s, batch: SampleBatch, row: int) -> Float32s:
    """Bias, penalties and bans (steps 2 to 4)."""
    values = raw.copy()
    bias = slice(batch.bias_starts[row], batch.bias_starts[row + 1])
    for token_id, value in zip(batch.bias_ids[bias], batch.bias_values[bias], strict=True):
        values[token_id] += value
    history = batch.history[batch.history_starts[row] : batch.history_starts[row + 1]]
    repetition = batch.repetition_penalty[row]
    if repetition != 1.0:
        seen = np.unique(history)
        some = values[seen]
        values[seen] = np.where(some > 0, some / repetition, some * repetition)
    frequency, presence = batch.frequency_penalty[row], batch.presence_penalty[row]
    if frequency != 0.0 or presence != 0.0:
        output, counts = np.unique(history[batch.num_prompt_tokens[row] :], return_counts=True)
        values[output] -= frequency * counts.astype(np.float32) + presence
    values[batch.banned_ids[batch.banned_starts[row] : batch.banned_starts[row + 1]]] = NOTHING
    return values


def _choose_token(values: Float32s, batch: SampleBatch, row: int) -> int:
    """The chosen id (step 5), or -1 where no finite logit is left."""
    greedy = batch.temperature[row] < SMALLEST_TEMPERATURE
    if not greedy:
        values = values / batch.temperature[row] + np.float32(0.0)  # + 0: no negative zeros
    largest = values.max()
    if not np.isfinite(largest):
        return -1
    if greedy:
        return int(np.argmax(values))
    kept = _kept(values, largest, batch, row)
    place = (int(batch.seeds[row]), int(batch.streams[row]), int(batch.positions[row]))
    noisy = values[kept] + gumbel(*place, token_ids=kept)
    return int(kept[np.argmax(noisy)])


def _kept(values: Float32s, largest: np.float32, batch: SampleBatch, row: int) -> Int32s:
    """Ids that min_p, top_k and top_p leave, ascending."""
    order = np.argsort(-values, kind="stable")  # largest first, ties: lower ids first
    min_p, top_k, top_p = batch.min_p[row], batch.top_k[row], batch.top_p[row]
    if min_p >= SMALLEST_MIN_P:
        floor = largest - minus_log(np.array([min_p], np.float32))[0]
        order = order[values[order] >= floor]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        reached = np.cumsum(mass(values[order] - largest))
        needed = np.float64(top_p) * reached[-1]
        order = order[: np.searchsorted(reached, needed) + 1]
    order.sort()
    return order.astype(np.int32)
