"""StepReader: the steps of requests, each with its own row and the sums of the others.

Reads packs of a StepHistory for the streams of one timeline query. Always holds: of each stream the
last MAX_REPORTED_STEPS steps are read at most, and what depends on no stream is computed once for
each pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.timeline import MAX_REPORTED_STEPS, StepRows
from quire.scheduler.step_budget import CostModel
from quire.scheduler.step_history import StepHistory, StepPack

Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]
# First step, last step, slot.
Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _PackCosts:
    """Predicted milliseconds of a pack: of each long row, and of each step."""

    long_ms: Float64s
    total_ms: Float64s


class StepReader:
    """num_packs_weighed: how often the costs of a pack were predicted."""

    def __init__(self, history: StepHistory, cost: CostModel) -> None:
        self._history, self._cost = history, cost
        self._costs: dict[StepPack, _PackCosts] = {}
        self.num_packs_weighed = 0

    def rows_of(self, spans: Sequence[Span]) -> StepRows:
        """Return the last steps of a request that had `slot` from step `first` to step `last`.

        spans: (first, last, slot), in order; steps between them are reported too, without a row.
        """
        if not spans:
            return _joined([])
        last = min(spans[-1][1], self._history.last_step)
        first = max(spans[0][0], last - MAX_REPORTED_STEPS + 1)
        packs = self._history.packs_between(first, last)
        return _joined([_rows_in(pack, self._costs_of(pack), spans, first, last) for pack in packs])

    def _costs_of(self, pack: StepPack) -> _PackCosts:
        found = self._costs.get(pack)
        if found is None:
            found = self._costs[pack] = _costs(pack, self._cost)
            self.num_packs_weighed += 1
        return found


def _costs(pack: StepPack, cost: CostModel) -> _PackCosts:
    num = len(pack.steps)
    long_ms = cost.rows_ms(pack.long_starts, pack.long_counts) * pack.long_shares
    plain = np.maximum(pack.rows - np.bincount(pack.long_at, minlength=num), 0)
    each_ms = float(cost.rows_ms(np.zeros(1, np.int32), np.ones(1, np.int32))[0])
    total_ms = cost.fixed_ms + plain * each_ms + np.bincount(pack.long_at, long_ms, num)
    return _PackCosts(long_ms, np.maximum(total_ms, 1e-9))


def _rows_in(
    pack: StepPack, costs: _PackCosts, spans: Sequence[Span], first: int, last: int
) -> StepRows:
    """Return the steps `first` .. `last` of one pack, as of rows_of."""
    num, shares = len(pack.steps), pack.long_shares
    oldest, newest = int(pack.steps[0]), int(pack.steps[-1])
    own_slots, own = np.full(num, -1, np.int32), np.zeros(num, np.int32)
    for begin, end, slot in spans:
        if begin <= newest and end >= oldest:
            inside = (pack.steps >= begin) & (pack.steps <= end)
            own_slots[inside] = slot
            own[inside] = pack.has_row(slot)[inside]
    own_samples = own.copy()
    is_own = pack.long_slots == own_slots[pack.long_at]
    at, mine = pack.long_at, is_own.nonzero()[0]
    own[at[mine]] = np.where(shares[mine] < 1.0, 0, pack.long_counts[mine])
    own_samples[at[mine]] = pack.long_samples[mine]
    # Layers of a part: computed in several steps, counted in the last.
    for place in mine[shares[mine] < 1.0].tolist():
        own[at[place]] = max(int(pack.long_counts[place] * shares[place]), 1)
    others = ~is_own & (pack.long_counts > 1)
    shown_tokens = pack.long_counts * shares
    others_tokens = np.bincount(at[others], shown_tokens[others], num)
    others_ms = np.bincount(at[others], costs.long_ms[others], num)
    keep = (pack.steps >= first) & (pack.steps <= last)
    return StepRows(
        steps=pack.steps[keep],
        began_ms=pack.began_ms[keep],
        ended_ms=pack.ended_ms[keep],
        rows=pack.rows[keep],
        tokens=pack.tokens[keep],
        own_tokens=own[keep],
        own_samples=own_samples[keep],
        prefill_tokens=others_tokens.astype(np.int32)[keep],
        prefill_share=(others_ms / costs.total_ms)[keep],
    )


def _joined(parts: list[StepRows]) -> StepRows:
    """Return the steps of all parts."""

    def joined(name: str, dtype: type[np.generic]) -> NDArray[np.generic]:
        empty = [np.empty(0, dtype)]
        return np.concatenate(empty + [getattr(part, name) for part in parts])

    ints = ("rows", "tokens", "own_tokens", "own_samples", "prefill_tokens")
    floats = ("began_ms", "ended_ms", "prefill_share")
    return StepRows(
        steps=joined("steps", np.int64),  # type: ignore[arg-type]
        **{name: joined(name, np.int32) for name in ints},  # type: ignore[arg-type]
        **{name: joined(name, np.float64) for name in floats},  # type: ignore[arg-type]
    )
