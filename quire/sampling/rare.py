"""Rarely used sampling parameters, in NumPy: one function per definition, for one row.

Reference of native/src/sampling_rare.cc, bit for bit. Filters take the remaining ids, sorted by
(value descending, id ascending), and return some of them; each sees the distribution over the
remaining ids. Sums are of multiples of a unit, so no order changes them (sampling/noise.py):
probabilities and probability times surprise of 2^-34, distances from the largest logit of 2^-11. A
probability is compared through its logarithm, a bound on values, so that a filter keeps the larger
ones.

Sources, and differences from them: typical_p: Meister et al., arXiv 2202.00666, as transformers
computes it (ties at the last distance are all kept). epsilon_cutoff, eta_cutoff: Hewitt et al.,
arXiv 2210.15191, as transformers. top_n_sigma: Tang et al., arXiv 2411.07641, as llama.cpp, but a
logit further than 2048 below the largest counts as 2048 below (models write -1e9 for "never"). XTC:
as llama.cpp (no token is exempt); the random draw is the row's noise for an id that no token has.
DRY: as text-generation-webui (repeats of up to 50 tokens; breakers are tokens), but a penalty is at
most 10^6, so that it never bans. no_repeat_ngram_size, banned sequences: as transformers; vLLM uses
the output only. Mirostat: Basu et al., arXiv 2007.14966, both versions as llama.cpp (surprise is
that of the renormalized probability); version 1 has logarithms of f32, and the limit of its formula
at an exponent of nearly 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_INTS
from quire.sampling.noise import LN2, LOG2_E, mass, mass_multiple, minus_log, uniform
from quire.sampling.parts import BannedSequences, Dry, Float32s, Int32s, Mirostat, RareParameters

Bools = NDArray[np.bool_]

MAX_REPEAT = 50  # maximum length of a repeat
MAX_PENALTY = 1e6
COIN_ID = 2**32 - 1
SPREAD_REACH = np.float32(2048.0)
SPREAD_STEPS = np.float32(2048.0)  # a unit
SMALLEST_SHARE = np.float32(2.0**-126)
ZIPF_IDS = 100
SMALLEST_REACH = 2.0**-10  # below, the difference of an exponent from 1 has few digits
NOTHING = np.float32(-np.inf)


def penalize_repeats(values: Float32s, history: Int32s, dry: Dry, row: int) -> None:
    """Apply DRY in place: penalize tokens that continue a repetition of the history's end."""
    last_n = int(dry.last_n[row])
    if last_n >= 0:
        history = history[max(0, len(history) - last_n) :]
    breakers = dry.breakers[row]
    lengths = repeat_lengths(history, breakers)
    following = history[1:]
    lengths[np.isin(following, breakers)] = 0
    best = np.zeros(len(values), np.int32)
    np.maximum.at(best, following, lengths)
    allowed = int(dry.allowed_length[row])
    base, penalty = float(dry.base[row]), float(dry.multiplier[row])
    penalties = np.zeros(MAX_REPEAT + 1, np.float32)
    for length in range(allowed, MAX_REPEAT + 1):
        penalties[length] = np.float32(min(penalty, MAX_PENALTY))
        penalty *= base
    repeated = np.flatnonzero(best >= allowed)
    values[repeated] -= penalties[best[repeated]]


def repeat_lengths(history: Int32s, breakers: Int32s) -> Int32s:
    """Return for each token but the last how many tokens up to it equal the history's end.

    Lengths [n - 1] for a history [n], at most MAX_REPEAT, and not across a breaker.
    """
    lengths = np.zeros(max(len(history) - 1, 0), np.int32)
    tail = history[: -MAX_REPEAT - 1 : -1]  # last token first
    broken = np.flatnonzero(np.isin(tail, breakers))
    places = np.arange(len(lengths))
    for back in range(broken[0] if len(broken) else len(tail)):
        places = places[places >= back]
        places = places[history[places - back] == tail[back]]
        lengths[places] += 1
    return lengths


def ban(values: Float32s, history: Int32s, rare: RareParameters, row: int) -> None:
    """Ban sequences, n-grams and everything outside the allowed ids, in place."""
    if rare.banned_sequences is not None:
        _ban_sequences(values, history, rare.banned_sequences, row)
    size = 0 if rare.ngram_size is None else int(rare.ngram_size[row])
    if size == 1:
        values[history] = NOTHING
    elif size > 1:
        lengths = repeat_lengths(history, np.empty(0, np.int32))
        values[history[1:][lengths >= size - 1]] = NOTHING
    allowed = NO_INTS if rare.allowed is None else rare.allowed[row]
    if len(allowed):
        kept = values[allowed].copy()
        values[:] = NOTHING
        values[allowed] = kept


def _ban_sequences(values: Float32s, history: Int32s, banned: BannedSequences, row: int) -> None:
    for index in range(banned.rows[row], banned.rows[row + 1]):
        ids = banned.tokens[index]
        num_before = len(ids) - 1
        if num_before <= len(history) and (history[len(history) - num_before :] == ids[:-1]).all():
            values[ids[-1]] = NOTHING


def sigma_drop(values: Float32s, num_sigmas: np.float32) -> np.float32:
    """Return how far below the largest value, before the temperature, top_n_sigma keeps values."""
    finite = values[values > NOTHING]
    below = np.minimum(finite.max() - finite, SPREAD_REACH)
    steps = (below * SPREAD_STEPS + np.float32(0.5)).astype(np.int64)
    count = float(len(steps))
    mean = float(steps.sum()) / count
    variance = float((steps * steps).sum()) / count - mean * mean
    sigma = np.sqrt(max(variance, 0.0)) / float(SPREAD_STEPS)
    return np.float32(float(num_sigmas) * sigma)


def typical(values: Float32s, order: Int32s, share: np.float32) -> Int32s:
    """Keep the ids with a surprise closest to the expected one, up to total probability `share`."""
    below, masses, mean = _expected(values, order)
    distance = np.abs(below - mean)
    nearest = np.argsort(distance, kind="stable")
    reached = np.cumsum(masses[nearest])
    last = nearest[np.searchsorted(reached, np.float64(share) * reached[-1])]
    kept: Int32s = order[distance <= distance[last]]
    return kept


def cutoffs(values: Float32s, order: Int32s, epsilon: np.float32, eta: np.float32) -> Int32s:
    """Keep ids of probability >= epsilon, then >= min(eta, sqrt(eta) * exp(-entropy))."""
    if epsilon >= SMALLEST_SHARE:
        order = _within(values, order, _minus_log(epsilon))
    if eta >= SMALLEST_SHARE:
        _, masses, mean = _expected(values, order)
        entropy = mean - _minus_log(masses.sum())
        limit = _minus_log(eta)
        order = _within(values, order, max(limit, limit * np.float32(0.5) + entropy))
    return order


def exclude_top_choices(values: Float32s, order: Int32s, threshold: np.float32) -> Int32s:
    """Drop all but the last of the ids with a probability of at least `threshold`."""
    order = order[values[order] > NOTHING]
    reach = _minus_log(threshold) if threshold >= SMALLEST_SHARE else np.float32(np.inf)
    floor = values[order[0]] - (reach + _minus_log(_mass_of(values, order)))
    num_above = int((values[order] >= floor).sum())
    return order[max(num_above - 1, 0) :]


def coin(seed: int, stream: int, position: int) -> np.float32:
    """Return a number in (0, 1) that is independent of all tokens' noise."""
    drawn: np.float32 = uniform(seed, stream, position, token_ids=np.array([COIN_ID]))[0]
    return drawn


def unsurprising(values: Float32s, order: Int32s, mu: np.float32) -> Int32s:
    """Apply mirostat's filter: ids of at most mu bits of surprise, always the most probable."""
    return _within(values, order, mu * LN2)


def zipf_top(values: Float32s, order: Int32s, mu: np.float32) -> Int32s:
    """Apply the filter of mirostat's version 1: as many of the most probable ids as have, by Zipf's
    law with the exponent of the first ZIPF_IDS of them, mu bits of surprise; at least one."""
    best = values[order[:ZIPF_IDS]]
    best = best[best > NOTHING]
    rises = squares = 0.0
    for rank in range(1, len(best)):
        step = -float(_minus_log(np.float32(rank + 1) / np.float32(rank)))
        rises += step * float(best[rank - 1] - best[rank])
        squares += step * step
    if squares == 0.0:
        return order[:1]
    exponent = rises / squares
    limit = _zipf_limit(exponent, float(mu), len(values))
    low, high = 1, len(values)
    while low < high:  # the largest rank with exponent * log(rank) <= limit
        middle = (low + high + 1) // 2
        if exponent * -float(_minus_log(np.float32(middle))) <= limit:
            low = middle
        else:
            high = middle - 1
    return order[:low]


def _zipf_limit(exponent: float, mu: float, num_ids: int) -> float:
    """Return exponent * log(number of kept ids), of an alphabet of num_ids."""
    above = exponent - 1.0
    log_ids = -float(_minus_log(np.float32(num_ids)))
    bits = mu * float(LN2)
    reach = abs(above) * log_ids
    if reach < SMALLEST_REACH:  # the limit of above / (1 - num_ids ** -above)
        return bits + float(_minus_log(np.float32(log_ids)))
    rest = 1.0 - float(mass(np.array([-reach], np.float32))[0])
    limit = bits - float(_minus_log(np.float32(abs(above)))) + float(_minus_log(np.float32(rest)))
    return limit if above > 0.0 else limit - reach


def moved_mu(
    values: Float32s, order: Int32s, token_id: int, mirostat: Mirostat, row: int
) -> np.float32:
    """Return mu after token_id was chosen among `order`."""
    below = values[order[0]] - values[token_id]
    bits = (below - _minus_log(_mass_of(values, order))) * LOG2_E
    error = bits - mirostat.tau[row]
    moved: np.float32 = mirostat.mu[row] - mirostat.eta[row] * error
    return moved


def _within(values: Float32s, order: Int32s, surprise: np.float32) -> Int32s:
    """Keep ids of at most `surprise` nats, and the largest values regardless of their surprise."""
    reach = surprise + _minus_log(_mass_of(values, order))
    floor = values[order[0]] - max(reach, np.float32(0.0))
    kept: Int32s = order[values[order] >= floor]
    return kept


def _expected(values: Float32s, order: Int32s) -> tuple[Float32s, NDArray[np.float64], np.float32]:
    """Return each id's distance below the largest, its mass, and the weighted mean distance."""
    below = values[order[0]] - values[order]
    masses = mass(-below)
    shares = mass_multiple(masses * np.where(masses > 0, below, np.float32(0)).astype(np.float64))
    return below, masses, np.float32(shares.sum() / masses.sum())


def _mass_of(values: Float32s, order: Int32s) -> np.float64:
    total: np.float64 = mass(values[order] - values[order[0]]).sum()
    return total


def _minus_log(x: np.float32 | np.float64) -> np.float32:
    result: np.float32 = minus_log(np.array([x], np.float32))[0]
    return result
