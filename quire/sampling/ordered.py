"""The temperature and the filters in a row's own order, in NumPy.

An order is a number: four bits a step, the first step lowest, with the step's place in SAMPLERS,
from 1. Each step sees what the steps before it left, divided by the temperature if that was before;
steps that an order lacks are off. The steps are those of sampling/batch.py, but top_n_sigma takes
the spread of what is left. A temperature of 0 leaves the largest. Reference of Row::ordered in
native/src/sampling.cc, bit for bit. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.base.sampling_checks import SAMPLERS, SMALLEST_TEMPERATURE
from quire.sampling import rare as rarely
from quire.sampling.batch import SampleBatch
from quire.sampling.noise import gumbel, mass, minus_log
from quire.sampling.parts import Float32s, Int32s

STEP_BITS = 4
CODES: Mapping[str, int] = {name: code for code, name in enumerate(SAMPLERS, start=1)}
_NAMES = ("", *SAMPLERS)
_OFF = np.float32(0.0)


def order_of(names: Sequence[str]) -> int:
    """Return the number of an order; 0 for no names."""
    return sum(CODES[name] << STEP_BITS * at for at, name in enumerate(names))


def in_order(edited: Float32s, batch: SampleBatch, row: int) -> int:
    """Return the sampled id of a row with an order, or -1 if no finite logit is left."""
    values = edited + np.float32(0.0)  # no negative zeros
    if batch.rare is None or batch.rare.order is None or not np.isfinite(values.max()):
        return -1
    order = _sorted(values, np.arange(len(values), dtype=np.int32))
    steps, temperature = int(batch.rare.order[row]), batch.temperature[row]
    while steps:
        name = _NAMES[steps & (1 << STEP_BITS) - 1]
        steps >>= STEP_BITS
        if name != "temperature":
            order = _filtered(name, values, order, batch, row)
        elif temperature < np.float32(SMALLEST_TEMPERATURE):
            order = order[:1]
        else:
            values = values / temperature + np.float32(0.0)
            if not np.isfinite(values[order].max()):
                return -1
            order = _sorted(values, order)  # what differed may be equal now
    kept = np.sort(order)
    noisy = values[kept] + gumbel(*_place(batch, row), token_ids=kept)
    return int(kept[np.argmax(noisy)])


def with_min_p(values: Float32s, order: Int32s, min_p: np.float32) -> Int32s:
    """Keep ids of at least this fraction of the largest probability."""
    if min_p < rarely.SMALLEST_SHARE:
        return order
    floor = values[order[0]] - minus_log(np.array([min_p], np.float32))[0]
    kept: Int32s = order[values[order] >= floor]
    return kept


def with_top_p(values: Float32s, order: Int32s, top_p: np.float32) -> Int32s:
    """Keep the shortest prefix with at least this share of the remaining mass."""
    if top_p >= 1.0:
        return order
    reached = np.cumsum(mass(values[order] - values[order[0]]))
    needed = np.float64(top_p) * reached[-1]
    return order[: np.searchsorted(reached, needed) + 1]


def _filtered(name: str, values: Float32s, order: Int32s, batch: SampleBatch, row: int) -> Int32s:
    """Return what one filter leaves; all where it is off."""
    usual, few = batch.truncation, None if batch.rare is None else batch.rare.truncation
    match name:
        case "min_p" if usual is not None:
            return with_min_p(values, order, usual.min_p[row])
        case "top_k" if usual is not None and usual.top_k[row] > 0:
            return order[: usual.top_k[row]]
        case "top_p" if usual is not None:
            return with_top_p(values, order, usual.top_p[row])
        case "top_n_sigma" if few is not None and few.top_n_sigma[row] > 0:
            drop = rarely.sigma_drop(values[order], few.top_n_sigma[row])
            kept: Int32s = order[values[order] >= values[order[0]] - drop]
            return kept
        case "typical_p" if few is not None and few.typical_p[row] < 1.0:
            return rarely.typical(values, order, few.typical_p[row])
        case "epsilon_cutoff" if few is not None:
            return rarely.cutoffs(values, order, few.epsilon_cutoff[row], _OFF)
        case "eta_cutoff" if few is not None:
            return rarely.cutoffs(values, order, _OFF, few.eta_cutoff[row])
        case "xtc" if (
            few is not None and rarely.coin(*_place(batch, row)) < few.xtc_probability[row]
        ):
            return rarely.exclude_top_choices(values, order, few.xtc_threshold[row])
    return order


def _sorted(values: Float32s, ids: Int32s) -> Int32s:
    """Return ids by (value down, id up)."""
    ids = np.sort(ids)
    return ids[np.argsort(-values[ids], kind="stable")]


def _place(batch: SampleBatch, row: int) -> tuple[int, int, int]:
    """Return what the noise of a row depends on."""
    return int(batch.noise.seeds[row]), int(batch.noise.streams[row]), int(batch.positions[row])
