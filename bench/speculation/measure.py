"""Measure one cell: the same requests without drafts, with the control, and with fixed k, in turn.

All sides run in one engine; the order rotates, so that a drift affects them alike. Rounds go on
until the intervals of both ratios are narrow, or until the cell's time is over. Fixed numbers of
drafts that are clearly slower than the best one are left out of later rounds. Always holds: a side
with other tokens than without drafts ends the measurement; every side has one round at least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from bench.speculation.intervals import COVERAGE, Interval, interval_of
from bench.speculation.proposers import COUNTS, SwitchControl
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.engine.library.llm import LLM

OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))
ON = SchedulingParams(speculation=SpeculationParams(is_on=True))
Tokens = list[tuple[int, ...]]
Round = dict[str, float]  # seconds by side
MAX_ROUNDS = 60
# Half of the width of both intervals at which rounds end.
NARROW = 0.006
# A fixed k is left out after so many rounds if it has less than such a share of the best one's
# speed.
FULL_ROUNDS, POOR_SHARE = 1, 0.93
# The control runs for so long before it is measured: it has met such requests before.
WARM_UP_S, MAX_WARM_UPS = 1.0, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a cell. sampling: of each request. expected: their answers without drafts; None:
    not known yet. others: in turn with these, other requests of as many tokens, so that none is
    answered twice in a row."""

    prompts: Sequence[Any]
    sampling: Sequence[SamplingParams]
    expected: Tokens | None = None
    others: Sequence[Load] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured. fixed: numbers of drafts compared with the control's choice.

    min_rounds: however long they take, unless the whole run is_over. max_rounds: however wide the
    intervals are. has_time: whether the cell has time for more."""

    fixed: tuple[int, ...]
    min_rounds: int = 3
    max_rounds: int = MAX_ROUNDS
    has_time: Callable[[], bool] = lambda: True
    is_over: Callable[[], bool] = lambda: False

    def goes_on(self, num_rounds: int) -> bool:
        """Return whether a round follows so many."""
        if not num_rounds:
            return True
        if num_rounds >= self.max_rounds or self.is_over():
            return False
        return num_rounds < self.min_rounds or self.has_time()


def measure(llm: LLM, load: Load, extent: Extent) -> dict[str, Any]:
    """Return seconds of the sides in each round, at least one, and what follows from them."""
    sides: dict[str, int | None] = {"off": None, "auto": None}
    sides |= {f"k{num}": num for num in extent.fixed}
    loads = [(one, one.expected or tokens_of(llm, one, OFF)) for one in (load, *load.others)]
    in_turn = cycle(loads)
    _warm_up(llm, in_turn, extent)
    rounds: list[Round] = []
    counted: dict[str, list[int]] = {name: [0, 0, 0] for name in sides}
    while extent.goes_on(len(rounds)):
        names = _sides_left(list(sides), rounds)
        seconds: Round = {}
        first = len(rounds) % len(names)
        for name in names[first:] + names[:first]:
            COUNTS.clear()
            requests = next(in_turn)
            began_s = time.perf_counter()
            _run(llm, *requests, OFF if name == "off" else ON, sides[name])
            seconds[name] = max(round(time.perf_counter() - began_s, 6), 1e-6)
            for place, more in enumerate((COUNTS.rows, COUNTS.drafted, COUNTS.accepted)):
                counted[name][place] += more
        rounds.append(seconds)
        if _is_narrow(rounds):
            break
    return _summary(rounds, counted)


def tokens_of(llm: LLM, load: Load, terms: SchedulingParams) -> Tokens:
    """Return the tokens of each answer."""
    answers = llm.generate(list(load.prompts), list(load.sampling), terms=terms, progress=False)
    return [answer.outputs[0].token_ids for answer in answers]


def ratios(rounds: Sequence[Round], over: str, under: str) -> list[float]:
    """Return the seconds of side `over` by those of `under`, in the rounds that have both."""
    return [one[over] / one[under] for one in rounds if over in one and under in one]


def best_fixed(rounds: Sequence[Round]) -> str:
    """Return the side with a fixed number of drafts, or none, that is fastest."""
    names = [name for name in rounds[0] if name != "auto"]
    return max(names, key=lambda name: statistics.median(ratios(rounds, "off", name)))


def _warm_up(llm: LLM, in_turn: Any, extent: Extent) -> None:
    began_s = time.perf_counter()
    for _ in range(MAX_WARM_UPS):
        _run(llm, *next(in_turn), ON, None)
        if time.perf_counter() - began_s > WARM_UP_S or not extent.has_time():
            return


def _run(
    llm: LLM, load: Load, expected: Tokens, terms: SchedulingParams, fixed: int | None
) -> None:
    SwitchControl.switch(fixed)
    if tokens_of(llm, load, terms) != expected:
        raise SystemExit("speculation changed the tokens of an answer; nothing is reported")


def _sides_left(names: list[str], rounds: Sequence[Round]) -> list[str]:
    """Return the sides of the next round."""
    if len(rounds) < FULL_ROUNDS:
        return names
    best = best_fixed(rounds)
    return [
        name
        for name in names
        if name in ("off", "auto", best)
        or statistics.median(ratios(rounds, best, name)) >= POOR_SHARE
    ]


def _is_narrow(rounds: Sequence[Round]) -> bool:
    """Return whether the intervals are narrow. A side that was left out may have few rounds."""
    intervals = [interval_of(ratios(rounds, one, "auto")) for one in ("off", best_fixed(rounds))]
    return all(one.coverage >= COVERAGE and one.half_width <= NARROW for one in intervals)


def _summary(rounds: list[Round], counted: dict[str, list[int]]) -> dict[str, Any]:
    """Return the medians of paired ratios: speed over that without drafts, by side; and the
    intervals of those of the control."""
    best = best_fixed(rounds)
    of_auto, of_best = (interval_of(ratios(rounds, over, "auto")) for over in ("off", best))
    rows, drafted, accepted = counted["auto"]
    fixed = [counted[name] for name in counted if name.startswith("k")]
    tried, right = (sum(one[place] for one in fixed) for place in (1, 2))
    return {
        "rounds": rounds,
        "speedups": {
            name: round(statistics.median(ratios(rounds, "off", name)), 3)
            for name in rounds[0]
            if name != "off"
        },
        "speedup_interval": _shown(of_auto),
        "best_fixed": best,
        "control_of_best": round(of_best.median, 3),
        "control_interval": _shown(of_best),
        "drafted": drafted,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "acceptance_of_fixed": round(right / tried, 4) if tried else None,
        "tokens_per_row_with_drafts": round(1 + accepted / rows, 3) if rows else None,
    }


def _shown(interval: Interval) -> dict[str, float]:
    return {
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "coverage": round(interval.coverage, 3),
    }
