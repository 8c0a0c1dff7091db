"""Sample tokens in NumPy: the reference for the native kernels, same tokens bit for bit.

It sorts where the native code selects, works row by row, and otherwise implements the semantics of
sampling/batch.py directly; the rare steps are in sampling/rare.py. Knows no threads and no
requests. Invariant: a row's result depends on its own logits and parameters only.

Like NaN, +inf is a row error (a model that overflowed has no distribution), whether in the logits
or after penalties and temperature. Temperatures below 2^-40 are greedy: no noise could outweigh a
difference representable in f32. A min_p below the smallest normal f32 is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_INTS, Candidates
from quire.sampling import rare as rarely
from quire.sampling.batch import (
    SampleBatch,
    TokenChoice,
    check_known,
    check_shapes,
    has_mirostat,
    max_top,
)
from quire.sampling.noise import gumbel, mass, minus_log
from quire.sampling.ordered import in_order, with_min_p, with_top_p
from quire.sampling.parts import WHOLE, Float32s, Int32s, Penalties, RareParameters

SMALLEST_TEMPERATURE = np.float32(2.0**-40)
NOTHING = rarely.NOTHING


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
    rows = [_choose_row(logits[index], batch, index) for index in range(len(logits))]
    token_ids = np.array([row.token_id for row in rows], np.int32)
    mus = np.array([row.mu for row in rows] if has_mirostat(batch) else [], np.float32)
    candidates = _candidate_arrays(rows, batch)
    if batch.num_logprobs is None:
        return TokenChoice(token_ids=token_ids, mus=mus, candidates=candidates)
    num_top = max_top(batch.num_logprobs)
    top_ids = np.full((len(rows), num_top), -1, np.int32)
    top_logprobs = np.full((len(rows), num_top), np.nan, np.float32)
    for index, row in enumerate(rows):
        top_ids[index, : len(row.top_ids)] = row.top_ids
        top_logprobs[index, : len(row.top_ids)] = row.top_logprobs
    return TokenChoice(
        token_ids=token_ids,
        logprobs=np.array([row.logprob for row in rows], np.float32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        mus=mus,
        candidates=candidates,
    )


def _candidate_arrays(rows: list[_Row], batch: SampleBatch) -> Candidates | None:
    if batch.num_candidates is None:
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
    if batch.num_candidates is not None and batch.num_candidates[row] > 0:
        return _beam_row(raw, batch, row, int(batch.num_candidates[row]))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        edited = _edit(raw, batch, row)
        token_id, mu = _pick(edited, batch, row)
    if token_id < 0:
        return _Row()
    return _with_logprobs(_Row(token_id, mu=mu), raw, batch, row)


def _beam_row(raw: Float32s, batch: SampleBatch, row: int, num_candidates: int) -> _Row:
    """Return the candidates of a beam (step 6), and the reported values of the raw logits."""
    if raw.max() == NOTHING:
        return _Row()
    logprobs = log_probabilities(raw)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        edited = _edit(logprobs, batch, row)
    ids = _best(edited, num_candidates).astype(np.int32)
    token_id = int(ids[0]) if len(ids) else 0
    chosen = _Row(token_id, candidates=(ids, edited[ids], logprobs[ids]))
    return _with_logprobs(chosen, raw, batch, row)


def _with_logprobs(chosen: _Row, raw: Float32s, batch: SampleBatch, row: int) -> _Row:
    """Return a row with the log-probabilities of the raw logits, if it asks for them."""
    if batch.num_logprobs is None or batch.num_logprobs[row] < 0:
        return chosen
    logprobs = log_probabilities(raw)
    best = _best(raw, batch.num_logprobs[row])
    return replace(
        chosen,
        logprob=float(logprobs[chosen.token_id]),
        top_ids=tuple(best.tolist()),
        top_logprobs=tuple(logprobs[best].tolist()),
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
    values, rare = raw.copy(), batch.rare
    if batch.logit_bias is not None:
        starts = batch.logit_bias.tokens.starts
        biases = batch.logit_bias.values[starts[row] : starts[row + 1]]
        for token_id, value in zip(batch.logit_bias.tokens[row], biases, strict=True):
            values[token_id] += value
    history = NO_INTS if batch.history is None else batch.history.tokens[row]
    if batch.penalties is not None and batch.history is not None:
        _penalize(values, history, batch.penalties, batch.history.num_prompt_tokens[row], row)
    if rare is not None and rare.dry is not None and rare.dry.multiplier[row] > 0:
        rarely.penalize_repeats(values, history, rare.dry, row)
    if batch.banned is not None:
        values[batch.banned[row]] = NOTHING
    if rare is not None:
        rarely.ban(values, history, rare, row)
    if batch.masks is not None and batch.masks.rows[row] >= 0:
        words = batch.masks.words[batch.masks.rows[row]]
        ids = np.arange(len(values))
        values[(words[ids // 32] >> (ids % 32).astype(np.uint32)) & 1 == 0] = NOTHING
    return values


def _penalize(
    values: Float32s, history: Int32s, penalties: Penalties, num_prompt_tokens: int, row: int
) -> None:
    """Apply repetition, frequency and presence penalties, in place."""
    last_n = WHOLE if penalties.last_n is None else int(penalties.last_n[row])
    output = history[num_prompt_tokens:]
    if last_n != WHOLE:
        output = history = history if last_n < 0 else history[max(0, len(history) - last_n) :]
    repetition = penalties.repetition[row]
    if repetition != 1.0:
        seen = np.unique(history)
        some = values[seen]
        values[seen] = np.where(some > 0, some / repetition, some * repetition)
    frequency, presence = penalties.frequency[row], penalties.presence[row]
    if frequency != 0.0 or presence != 0.0:
        named, counts = np.unique(output, return_counts=True)
        values[named] -= frequency * counts.astype(np.float32) + presence


def _pick(edited: Float32s, batch: SampleBatch, row: int) -> Picked:
    """Return the sampled id (step 5), or -1 if no finite logit is left."""
    rare = RareParameters() if batch.rare is None else batch.rare
    if rare.order is not None and rare.order[row] != 0:
        return Picked(in_order(edited, batch, row))
    temperature = batch.temperature[row]
    greedy = temperature < SMALLEST_TEMPERATURE
    # + 0: no negative zeros
    values = edited if greedy else edited / temperature + np.float32(0.0)
    if not np.isfinite(values.max()):
        return Picked(-1)
    if greedy:
        return Picked(int(np.argmax(values)))
    place = (int(batch.noise.seeds[row]), int(batch.noise.streams[row]), int(batch.positions[row]))
    order = np.argsort(-values, kind="stable").astype(np.int32)  # ties: lower ids first
    mirostat = rare.mirostat
    if mirostat is not None and mirostat.mode[row] == 0:
        mirostat = None
    if mirostat is not None and mirostat.mode[row] == 1:
        order = rarely.zipf_top(values, order, mirostat.mu[row])
    elif mirostat is not None:
        order = rarely.unsurprising(values, order, mirostat.mu[row])
    else:
        order = _filtered(values, order, edited, batch, row)
        few = rare.truncation
        if few is not None and rarely.coin(*place) < few.xtc_probability[row]:
            order = rarely.exclude_top_choices(values, order, few.xtc_threshold[row])
    kept = np.sort(order)
    noisy = values[kept] + gumbel(*place, token_ids=kept)
    token_id = int(kept[np.argmax(noisy)])
    if mirostat is not None:
        return Picked(token_id, float(rarely.moved_mu(values, order, token_id, mirostat, row)))
    return Picked(token_id)


def _filtered(
    values: Float32s, order: Int32s, edited: Float32s, batch: SampleBatch, row: int
) -> Int32s:
    """Return what the filters before XTC leave of `order`. edited: the values before the
    temperature."""
    largest, truncation = values[order[0]], batch.truncation
    few = None if batch.rare is None else batch.rare.truncation
    if few is not None and few.top_n_sigma[row] > 0:
        drop = rarely.sigma_drop(edited, few.top_n_sigma[row]) / batch.temperature[row]
        order = order[values[order] >= largest - drop]
    if truncation is not None:
        order = with_min_p(values, order, truncation.min_p[row])
    if truncation is not None and truncation.top_k[row] > 0:
        order = order[: truncation.top_k[row]]
    if few is not None and few.typical_p[row] < 1.0:
        order = rarely.typical(values, order, few.typical_p[row])
    if truncation is not None:
        order = with_top_p(values, order, truncation.top_p[row])
    if few is not None:
        order = rarely.cutoffs(values, order, few.epsilon_cutoff[row], few.eta_cutoff[row])
    return order
