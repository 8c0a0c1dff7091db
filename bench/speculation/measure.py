"""Measure one cell: the same requests without drafts, with the control, and with fixed k, in turn.

All sides run in one engine; the order rotates, so that a drift affects them alike. Always holds: a
side with other tokens than without drafts ends the measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from bench.speculation.proposers import COUNTS, SwitchControl
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.engine.library.llm import LLM

OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))
ON = SchedulingParams(speculation=SpeculationParams(is_on=True))
Tokens = list[tuple[int, ...]]
MAX_ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a cell. sampling: of each request. others: in turn with these, other requests of
    as many tokens, so that none is answered twice in a row."""

    prompts: Sequence[Any]
    sampling: Sequence[SamplingParams]
    others: Sequence[Load] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured. fixed: numbers of drafts compared with the control's choice. min_s:
    seconds of rounds, however many: single ones of a small model are too short."""

    num_rounds: int
    fixed: tuple[int, ...]
    min_s: float = 0.0
    has_time: Callable[[], bool] = lambda: True


def measure(llm: LLM, load: Load, extent: Extent) -> dict[str, Any]:
    """Return seconds of all sides in each round, at least one, and what follows from them."""
    sides: list[tuple[str, int | None]] = [("off", None), ("auto", None)]
    sides += [(f"k{num}", num) for num in extent.fixed]
    in_turn = cycle([(one, tokens_of(llm, one, OFF)) for one in (load, *load.others)])  # warms up
    for _, fixed in sides[1:]:
        _run(llm, *next(in_turn), ON, fixed)
    rounds: list[dict[str, float]] = []
    counted: dict[str, list[int]] = {name: [0, 0, 0] for name, _ in sides}
    end_s = time.perf_counter() + extent.min_s
    while len(rounds) < MAX_ROUNDS:
        if rounds and not extent.has_time():
            break
        if len(rounds) >= extent.num_rounds and time.perf_counter() > end_s:
            break
        seconds: dict[str, float] = {}
        first = len(rounds) % len(sides)
        for name, fixed in sides[first:] + sides[:first]:
            COUNTS.clear()
            requests = next(in_turn)
            began_s = time.perf_counter()
            _run(llm, *requests, OFF if name == "off" else ON, fixed)
            seconds[name] = max(round(time.perf_counter() - began_s, 6), 1e-6)
            for place, more in enumerate((COUNTS.rows, COUNTS.drafted, COUNTS.accepted)):
                counted[name][place] += more
        rounds.append(seconds)
    return _summary(rounds, counted)


def tokens_of(llm: LLM, load: Load, terms: SchedulingParams) -> Tokens:
    """Return the tokens of each answer."""
    answers = llm.generate(list(load.prompts), list(load.sampling), terms=terms, progress=False)
    return [answer.outputs[0].token_ids for answer in answers]


def _run(
    llm: LLM, load: Load, expected: Tokens, terms: SchedulingParams, fixed: int | None
) -> None:
    SwitchControl.fixed = fixed
    if tokens_of(llm, load, terms) != expected:
        raise SystemExit("speculation changed the tokens of an answer; nothing is reported")


def _summary(rounds: list[dict[str, float]], counted: dict[str, list[int]]) -> dict[str, Any]:
    """Return the medians of paired ratios: speed over that without drafts, by side."""
    speedups = {
        name: round(statistics.median(one["off"] / one[name] for one in rounds), 3)
        for name in rounds[0]
        if name != "off"
    }
    best = max(
        ["off", *(name for name in speedups if name != "auto")],
        key=lambda name: speedups.get(name, 1.0),
    )
    # Of the same rounds: the control against the k that was best in all.
    control = statistics.median(one[best] / one["auto"] for one in rounds)
    rows, drafted, accepted = counted["auto"]
    fixed = [counted[name] for name in counted if name.startswith("k")]
    tried, right = (sum(one[place] for one in fixed) for place in (1, 2))
    return {
        "rounds": rounds,
        "speedups": speedups,
        "best_fixed": best,
        "control_of_best": round(control, 3),
        "drafted": drafted,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "acceptance_of_fixed": round(right / tried, 4) if tried else None,
        "tokens_per_row_with_drafts": round(1 + accepted / rows, 3) if rows else None,
    }
