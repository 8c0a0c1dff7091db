"""Sides of the measurement of speculation that share an engine: what is of each, and of all."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.speculation import engines
from bench.speculation.cells import Cell
from bench.speculation.engines import Engines
from bench.speculation.sides import PausedClock, Side, Stream, Task, answers_of
from quire.base.sampling_params import SamplingParams

NGRAM = Cell(part="small", model="box", proposer="ngram", batch=4)
DRAFT = Cell(part="small", model="box", proposer="draft", batch=4)
BATCH, NUM_STEPS = 4, 150
OF_DRAFTS = ("quire/speculative/", "quire/scheduler/speculation/")


@pytest.fixture(autouse=True)
def small_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "cache_folder", lambda: tmp_path)
    monkeypatch.setitem(engines.KV_BYTES, "small", 8 << 20)


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class CountedClock(PausedClock):
    """Goes on by 0.01 ms each time that it is read, so that times do not differ between engines."""

    def __init__(self) -> None:
        super().__init__()
        self._counted_ms = 1e9

    def now_ms(self) -> float:
        self._counted_ms += 0.01
        return self._counted_ms


def tasks() -> list[Task]:
    drawn = np.random.default_rng(1).integers(5, 500, (8, 17))
    sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, seed=3)
    return [Task(prompt=prompt, sampling=sampling) for prompt in drawn.tolist()]


def turn(side: Side, asked: list[Task], num_steps: int = NUM_STEPS) -> tuple[int, int, int]:
    stream = Stream(side, asked, BATCH)
    stream.for_steps(num_steps)
    drafted = stream.drafted()
    stream.end()
    return drafted


def calls_and_plans(side: Side, asked: list[Task]) -> tuple[Counter[str], list[list[Any]]]:
    """Return the calls of Quire's functions in a turn, and its plans."""
    calls: Counter[str] = Counter()
    plans: list[list[Any]] = []
    core: Any = side.core
    submit = core.runner.submit

    def noted(plan: Any) -> Any:
        arrays = (plan.slots, plan.starts, plan.counts, plan.sample_counts, plan.draft_ids)
        plans.append([plan.step, *(one.tolist() for one in arrays)])
        return submit(plan)

    def count(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/quire/" in name:
            calls[f"quire/{name.split('/quire/')[-1]}: {frame.f_code.co_qualname}"] += 1

    core.runner.submit = noted
    side = replace(side, clock=CountedClock())
    side.attach()
    sys.setprofile(count)
    try:
        turn(side, asked)
    finally:
        sys.setprofile(None)
        core.runner.submit = submit
    return calls, plans


def test_a_side_without_drafts_is_an_engine_that_was_made_without(ending: ExitStack) -> None:
    shared = Engines(NGRAM, ending, 1)
    [off] = shared.ready(asked := tasks(), "off")
    plain = Engines(NGRAM, ending)._start("off")
    answers_of(plain, asked, 64)
    for one in (off, plain):
        turn(one, asked)
    for name in ("auto", "k4"):
        [side] = shared.ready(asked, name)
        assert turn(side, asked)[1] > 0
    assert off.card.speculates == plain.card.speculates
    assert off.card.max_draft_tokens == plain.card.max_draft_tokens
    found, expected = (calls_and_plans(side, asked) for side in (off, plain))
    assert found[1] == expected[1]
    assert found[0] == expected[0]
    assert not [name for name in found[0] if name.startswith(OF_DRAFTS)]
    assert off.core.stats().proposer == plain.core.stats().proposer == ""
    parts = []
    for one in (off, plain):
        scheduler: Any = one.core.scheduler  # type: ignore[attr-defined]
        assert scheduler._drafts is scheduler._outcomes._drafts is None
        parts.append([type(extension) for extension in scheduler._extensions])
    assert parts[0] == parts[1]


def test_a_side_learns_from_its_own_steps_only(ending: ExitStack) -> None:
    shared = Engines(NGRAM, ending, 1)
    sides = {name: shared.ready(asked := tasks(), name)[0] for name in ("off", "auto", "k2")}
    scheduler: Any = sides["off"].core.scheduler  # type: ignore[attr-defined]
    for side in sides.values():
        side.attach()
    before = scheduler.speed.num_steps, scheduler._requests.in_flight.step
    assert before == (0, 0)  # of k2, which has had none
    drafted = {name: turn(side, asked) for name, side in sides.items()}
    assert drafted["off"] == (0, 0, 0)
    assert drafted["k2"][0] < drafted["k2"][1] <= 2 * drafted["k2"][0]
    rows = {}
    for name, num in (("k2", 100), ("auto", 50)):
        sides[name].attach()
        rows[name] = scheduler._drafts
        step = scheduler._requests.in_flight.step
        assert step == NUM_STEPS
        num_learned = scheduler.speed.num_steps
        stats = sides[name].core.stats()
        turn(sides["off"], asked, num)
        sides[name].attach()
        assert scheduler._drafts is rows[name]
        assert scheduler._outcomes._drafts is rows[name]
        assert [one for one in scheduler._extensions if one is rows[name]]
        assert (scheduler.speed.num_steps, scheduler._requests.in_flight.step) == (
            num_learned,
            step,
        )
        assert sides[name].core.stats().draft_rows_total == stats.draft_rows_total
    assert rows["k2"] is not rows["auto"]
    assert rows["k2"]._plain.prices is not rows["auto"]._plain.prices
    fresh = shared.ready(asked, "auto")[0]
    fresh.attach()
    assert scheduler.speed.num_steps == 0  # a cell does not know what others learned


def test_sides_are_swapped_while_nothing_runs_only(ending: ExitStack) -> None:
    shared = Engines(NGRAM, ending, 1)
    off, k2 = (shared.ready(asked := tasks(), name)[0] for name in ("off", "k2"))
    stream = Stream(off, asked, BATCH)
    stream.for_steps(1)
    with pytest.raises(AssertionError, match="live"):
        k2.attach()
    stream.end()
    k2.attach()


def test_drafts_of_all_sides_are_computed_by_one_draft_model(ending: ExitStack) -> None:
    shared = Engines(DRAFT, ending, 1)
    [off] = shared.ready(asked := tasks(), "off")
    known = answers_of(off, asked, BATCH)
    sides = [shared.ready(known, name)[0] for name in ("k1", "k4", "auto")]
    accepted = []
    for side in (*sides, *sides):  # other tokens than without drafts end the test
        _, num_drafts, num_accepted = turn(side, known)
        accepted.append(num_accepted / num_drafts if num_drafts else 0.0)
    assert accepted[0] == pytest.approx(accepted[3], rel=0.2)
    assert accepted[0] > 0.0
    proposers = []
    for side in sides:
        side.attach()
        proposers.append(side.core.scheduler._drafts._source._proposer)  # type: ignore[attr-defined]
    executors = {id(one._model._resources.executor) for one in proposers}
    assert len(executors) == 1
    assert len({id(one._model) for one in proposers}) == 3
