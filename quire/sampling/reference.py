"""Sample tokens in NumPy: the reference for the native kernels, same tokens bit for bit.

It sorts where the native code selects, works row by row, and otherwise implements the semantics of
sampling/batch.py directly; the rare steps are in sampling/rare.py. Knows no threads and no
requests. Invariant: a row's result depends on its own logits and parameters only.

Like NaN, +inf is a row error (a model that overflowed has no distribution), whether in the logits
or after penalties and temperature. Temperatures below 2^-40 are greedy: no noise could outweigh a
difference representable in f32. A min_p below the smallest normal f32 is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Candidates
from quire.sampling import rare as rarely
from quire.sampling.batch import Float32s, Int32s, RareParameters, SampleBatch, TokenChoice
from quire.sampling.noise import MAX_VOCAB, gumbel, mass, minus_log

SMALLEST_TEMPERATURE = np.float32(2.0**-40)
SMALLEST_MIN_P = rarely.SMALLEST_SHARE
NOTHING = rarely.NOTHING
MIROSTAT = 2


class Picked(NamedTuple):
    """A row's token (-1: it failed), and mirostat's mu after it."""

    token_id: int
    mu: float = 0.0


@dataclass(frozen=True, slots=True)
class _Row:
    """Sample one row; token -1 and nothing else if it failed."""

    token_id: int = -1
    logprob: float = float("nan")
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    mu: float = 0.0
    candidates: tuple[Int32s, Float32s, Float32s] | None = None  # ids, scores, log-probabilities


def choose(logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
    """Sample a token for each row of logits [R, V]. Raises ValueError for inconsistent shapes."""
    check_shapes(logits, batch)
    check_known(batch)
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
        mus=np.array([row.mu for row in rows] if has_mirostat(batch) else [], np.float32),
        candidates=_candidate_arrays(rows, batch),
    )


def has_mirostat(batch: SampleBatch) -> bool:
    """Return whether a row uses mirostat."""
    return batch.rare is not None and bool((batch.rare.mirostat == MIROSTAT).any())


def check_known(batch: SampleBatch) -> None:
    """Raise ValueError if a row's history lacks its last token."""
    if (batch.late_slots >= 0).any():
        raise ValueError("some rows' last tokens are late; SampleBatch.completed adds them")


def check_shapes(logits: NDArray[np.float32], batch: SampleBatch) -> None:
    """Raise ValueError if logits and batch are inconsistent."""
    rows = len(batch.temperature)
    if logits.ndim != 2 or logits.dtype != np.float32 or len(logits) != rows:
        raise ValueError(
            f"logits are {logits.dtype} {logits.shape}; f32 [{rows}, vocabulary] is needed"
        )
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {logits.shape[1]}; 1 to {MAX_VOCAB} is allowed")
    for name, array in (
        ("history", batch.history),
        ("bias_ids", batch.bias_ids),
        ("banned_ids", batch.banned_ids),
    ):
        _check_ids(name, array, logits.shape[1])
    _check_starts("history_starts", batch.history_starts, rows, len(batch.history))
    _check_starts("bias_starts", batch.bias_starts, rows, len(batch.bias_ids))
    _check_starts("banned_starts", batch.banned_starts, rows, len(batch.banned_ids))
    if batch.rare is not None:
        _check_rare(batch.rare, rows, logits.shape[1])
    if len(batch.mask_rows):
        _check_masks(batch, rows, logits.shape[1])
    if len(batch.num_candidates) not in (0, rows):
        raise ValueError(f"num_candidates has {len(batch.num_candidates)} rows of {rows}")


def _check_masks(batch: SampleBatch, rows: int, vocabulary: int) -> None:
    shape = (len(batch.masks), -(-vocabulary // 32))
    if len(batch.mask_rows) != rows or batch.masks.shape != shape:
        raise ValueError(
            f"{len(batch.mask_rows)} mask_rows and masks {batch.masks.shape}; {rows} and "
            f"[any, {shape[1]}] are needed"
        )
    if not -1 <= batch.mask_rows.min() <= batch.mask_rows.max() < len(batch.masks):
        raise ValueError(f"mask_rows {batch.mask_rows} name other than {len(batch.masks)} masks")


def _check_rare(rare: RareParameters, rows: int, vocabulary: int) -> None:
    ragged = ("breaker", "sequence", "allowed")
    for item in fields(rare):
        if not item.name.startswith(ragged) and len(getattr(rare, item.name)) != rows:
            raise ValueError(
                f"{item.name} has {len(getattr(rare, item.name))} rows; the batch has {rows}"
            )
    _check_ids("breaker_ids", rare.breaker_ids, vocabulary)
    _check_ids("sequence_ids", rare.sequence_ids, vocabulary)
    _check_ids("allowed_ids", rare.allowed_ids, vocabulary)
    num_sequences = len(rare.sequence_starts) - 1
    _check_starts("breaker_starts", rare.breaker_starts, rows, len(rare.breaker_ids))
    _check_starts("allowed_starts", rare.allowed_starts, rows, len(rare.allowed_ids))
    _check_starts("sequence_rows", rare.sequence_rows, rows, num_sequences)
    _check_starts("sequence_starts", rare.sequence_starts, num_sequences, len(rare.sequence_ids))
    if (np.diff(rare.sequence_starts) < 1).any():
        raise ValueError("a banned sequence has no ids; each needs at least one")
    for name, least in (("dry_allowed_length", 1), ("ngram_size", 0)):
        array = getattr(rare, name)
        if not ((least <= array) & (array <= rarely.MAX_REPEAT)).all():
            raise ValueError(f"{name} must be from {least} to {rarely.MAX_REPEAT}: {array}")


def _check_ids(name: str, array: Int32s, vocabulary: int) -> None:
    if len(array) and not 0 <= array.min() <= array.max() < vocabulary:
        raise ValueError(
            f"{name} holds ids from {array.min()} to {array.max()}; the vocabulary has "
            f"{vocabulary} tokens"
        )


def _check_starts(name: str, starts: Int32s, rows: int, size: int) -> None:
    if len(starts) != rows + 1 or starts[0] < 0 or starts[-1] > size:
        raise ValueError(f"{name} must be {rows + 1} offsets into an array of {size}")
    if (np.diff(starts) < 0).any():
        raise ValueError(f"{name} must not fall: {starts}")


def _candidate_arrays(rows: list[_Row], batch: SampleBatch) -> Candidates | None:
    if not len(batch.num_candidates):
        return None
    shape = len(rows), int(batch.num_candidates.max(initial=0))
    ids, scores = np.full(shape, -1, np.int32), np.full(shape, np.nan, np.float32)
    logprobs = scores.copy()
    for index, row in enumerate(rows):
        if row.candidates is not None:
            count = len(row.candidates[0])
            ids[index, :count], scores[index, :count], logprobs[index, :count] = row.candidates
    return Candidates(ids=ids, scores=scores, logprobs=logprobs)


def _choose_row(raw: Float32s, batch: SampleBatch, row: int) -> _Row:
    if not (raw < np.inf).all():  # NaN or +inf
        return _Row()
    if len(batch.num_candidates) and batch.num_candidates[row] > 0:
        return _beam_row(raw, batch, row)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        edited = _edit(raw, batch, row)
        token_id, mu = _pick(edited, batch, row)
    if token_id < 0:
        return _Row()
    if batch.num_logprobs[row] < 0:
        return _Row(token_id, mu=mu)
    logprobs = log_probabilities(raw)
    best = _best(raw, batch.num_logprobs[row])
    return _Row(
        token_id,
        float(logprobs[token_id]),
        tuple(best.tolist()),
        tuple(logprobs[best].tolist()),
        mu,
    )


def _beam_row(raw: Float32s, batch: SampleBatch, row: int) -> _Row:
    """Return the candidates of a beam (step 6), and the reported values of the raw logits."""
    if raw.max() == NOTHING:
        return _Row()
    logprobs = log_probabilities(raw)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        edited = _edit(logprobs, batch, row)
    ids = _best(edited, batch.num_candidates[row]).astype(np.int32)
    token_id = int(ids[0]) if len(ids) else 0
    candidates = ids, edited[ids], logprobs[ids]
    if batch.num_logprobs[row] < 0:
        return _Row(token_id, candidates=candidates)
    best = _best(raw, batch.num_logprobs[row])
    return _Row(
        token_id,
        float(logprobs[token_id]),
        tuple(best.tolist()),
        tuple(logprobs[best].tolist()),
        candidates=candidates,
    )


def _best(values: Float32s, most: int) -> NDArray[np.intp]:
    """Return the ids of the largest values above -inf, largest first, ties to the lower id."""
    best = np.argsort(-values, kind="stable")[:most]
    return best[values[best] > NOTHING]


def log_probabilities(raw: Float32s) -> Float32s:
    """Return l - logsumexp(l) of one row [V]."""
    with np.errstate(invalid="ignore"):
        below = raw - raw.max()
    total = mass(below).sum(keepdims=True).astype(np.float32)
    result: Float32s = below + minus_log(total)
    return result


def _edit(raw: Float32s, batch: SampleBatch, row: int) -> Float32s:
    """Apply bias, penalties and bans (steps 2 to 4)."""
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
    if batch.rare is not None and batch.rare.dry_multiplier[row] > 0:
        rarely.penalize_repeats(values, history, batch.rare, row)
    values[batch.banned_ids[batch.banned_starts[row] : batch.banned_starts[row + 1]]] = NOTHING
    if batch.rare is not None:
        rarely.ban(values, history, batch.rare, row)
    if len(batch.mask_rows) and batch.mask_rows[row] >= 0:
        words = batch.masks[batch.mask_rows[row]]
        ids = np.arange(len(values))
        values[(words[ids // 32] >> (ids % 32).astype(np.uint32)) & 1 == 0] = NOTHING
    return values


def _pick(edited: Float32s, batch: SampleBatch, row: int) -> Picked:
    """Return the sampled id (step 5), or -1 if no finite logit is left."""
    temperature = batch.temperature[row]
    greedy = temperature < SMALLEST_TEMPERATURE
    # + 0: no negative zeros
    values = edited if greedy else edited / temperature + np.float32(0.0)
    if not np.isfinite(values.max()):
        return Picked(-1)
    if greedy:
        return Picked(int(np.argmax(values)))
    place = (int(batch.seeds[row]), int(batch.streams[row]), int(batch.positions[row]))
    order = np.argsort(-values, kind="stable").astype(np.int32)  # ties: lower ids first
    rare = batch.rare
    has_mu = rare is not None and rare.mirostat[row] == MIROSTAT
    if rare is not None and has_mu:
        order = rarely.unsurprising(values, order, rare.mirostat_mu[row])
    else:
        order = _filtered(values, order, edited, batch, row)
        if rare is not None and rarely.coin(*place) < rare.xtc_probability[row]:
            order = rarely.exclude_top_choices(values, order, rare.xtc_threshold[row])
    kept = np.sort(order)
    noisy = values[kept] + gumbel(*place, token_ids=kept)
    token_id = int(kept[np.argmax(noisy)])
    if rare is not None and has_mu:
        return Picked(token_id, float(rarely.moved_mu(values, order, token_id, rare, row)))
    return Picked(token_id)


def _filtered(
    values: Float32s, order: Int32s, edited: Float32s, batch: SampleBatch, row: int
) -> Int32s:
    """What the filters before XTC leave of `order`. edited: the values before the temperature."""
    largest, rare = values[order[0]], batch.rare
    min_p, top_k, top_p = batch.min_p[row], batch.top_k[row], batch.top_p[row]
    if rare is not None and rare.top_n_sigma[row] > 0:
        drop = rarely.sigma_drop(edited, rare, row) / batch.temperature[row]
        order = order[values[order] >= largest - drop]
    if min_p >= SMALLEST_MIN_P:
        floor = largest - minus_log(np.array([min_p], np.float32))[0]
        order = order[values[order] >= floor]
    if top_k > 0:
        order = order[:top_k]
    if rare is not None and rare.typical_p[row] < 1.0:
        order = rarely.typical(values, order, rare.typical_p[row])
    if top_p < 1.0:
        reached = np.cumsum(mass(values[order] - values[order[0]]))
        needed = np.float64(top_p) * reached[-1]
        order = order[: np.searchsorted(reached, needed) + 1]
    if rare is not None:
        order = rarely.cutoffs(values, order, rare.epsilon_cutoff[row], rare.eta_cutoff[row])
    return order
