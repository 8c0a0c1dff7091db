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
from bench.speculation.engines import Engines, predicting
from bench.speculation.sides import PausedClock, Side, Stream, Task, answers_of
from quire.base.sampling_params import SamplingParams

NGRAM = Cell(part="small", model="box", proposer="ngram", batch=4)
COMPUTED = [
    Cell(part="small", model="box", proposer=proposer, batch=4)
    for proposer in ("draft", "self", "eagle")
]
PREDICTION = Cell(part="small", model="box", proposer="prediction", batch=4)
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
    """Goes on by 1/128 ms each time that it is read, so that times do not differ between engines,
    in no bit."""

    _counted_ms = 2.0**30

    def now_ms(self) -> float:
        self._counted_ms += 2.0**-7
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


def calls_and_plans(side: Side, asked: list[Task]) -> tuple[Counter[str], list[list[list[int]]]]:
    """Return the calls of Quire's functions in a turn, and the rows of its plans with their drafts.
    Which slots they have depends on which were given back last."""
    calls: Counter[str] = Counter()
    plans: list[list[list[int]]] = []
    core: Any = side.core
    side.attach()
    submit = core.runner.submit

    def noted(plan: Any) -> Any:
        drafts = plan.draft_ids.tolist()
        nums = plan.draft_counts.tolist() or [0] * len(plan.slots)
        rows = zip(plan.starts, plan.counts, plan.sample_counts, nums, strict=True)
        plans.append(
            sorted([*map(int, row), *(drafts.pop(0) for _ in range(row[-1]))] for row in rows)
        )
        return submit(plan)

    def count(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/quire/" in name:
            calls[f"quire/{name.split('/quire/')[-1]}: {frame.f_code.co_qualname}"] += 1

    core.runner.submit = noted
    sys.setprofile(count)
    try:
        turn(side, asked)
    finally:
        sys.setprofile(None)
        core.runner.submit = submit
    return calls, plans


@pytest.mark.parametrize("cell", [NGRAM, *COMPUTED], ids=lambda cell: cell.proposer)
def test_a_side_without_drafts_is_an_engine_that_was_made_without(
    ending: ExitStack, cell: Cell
) -> None:
    shared = Engines(cell, ending, 1)
    [off] = shared.ready(asked := tasks(), "off")
    plain = Engines(cell, ending)._start("off")
    answers_of(plain, asked, 64)
    for one in (off, plain):
        turn(one, asked)
    for name in ("k2", "k4"):
        [side] = shared.ready(asked, name)
        assert turn(side, asked)[1] > 0
    assert off.card.speculates == plain.card.speculates
    assert off.card.max_draft_tokens == plain.card.max_draft_tokens
    counted = (replace(side, clock=CountedClock()) for side in (off, plain))
    found, expected = (calls_and_plans(side, asked) for side in counted)
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


@pytest.mark.parametrize("name", ["auto", "k4"])
@pytest.mark.parametrize("cell", [NGRAM, *COMPUTED], ids=lambda cell: cell.proposer)
def test_a_side_with_drafts_is_an_engine_of_its_own(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch, cell: Cell, name: str
) -> None:
    monkeypatch.setattr(engines, "PausedClock", CountedClock)
    own = Engines(cell, ending)._start(name)
    shared = Engines(cell, ending, 1)
    for other in ("off", "k2", name):
        [side] = shared.ready(tasks(), other)
        turn(side, tasks())
    [side] = shared._new_sides(name)
    side.core.scheduler.flush_cache()  # type: ignore[attr-defined]
    (calls, plans), (own_calls, own_plans) = (calls_and_plans(one, tasks()) for one in (side, own))
    assert plans == own_plans
    assert name == "auto" or any(row[3] for rows in plans for row in rows)
    assert of_drafts(calls) == of_drafts(own_calls)


def of_drafts(calls: Counter[str]) -> dict[str, int]:
    """Return the calls of what drafts. Others are fewer in an engine that has run before."""
    return {name: num for name, num in calls.items() if name.startswith(OF_DRAFTS)}


@pytest.mark.parametrize("cell", COMPUTED, ids=lambda cell: cell.proposer)
def test_drafts_of_all_sides_are_computed_by_the_same_executors(
    ending: ExitStack, cell: Cell
) -> None:
    shared = Engines(cell, ending, 1)
    [off] = shared.ready(asked := tasks(), "off")
    known = answers_of(off, asked, BATCH)
    sides = [shared.ready(known, name)[0] for name in ("k1", "k4", "auto")]
    accepted = []
    for side in (*sides, *sides):  # other tokens than without drafts end the test
        turn(off, known)
        _, num_drafts, num_accepted = turn(side, known)
        accepted.append(num_accepted / num_drafts if num_drafts else 0.0)
    assert accepted[0] == pytest.approx(accepted[3], rel=0.2)
    assert accepted[0] > 0.0
    proposers = []
    for side in sides:
        side.attach()
        proposers.append(side.core.scheduler._drafts._source.proposer)  # type: ignore[attr-defined]
    assert len({id(executor_of(one)) for one in proposers}) == 1
    assert len({id(one._model) for one in proposers}) == 3
    assert len({id(one._model.tokens) for one in proposers}) == 3


def executor_of(proposer: Any) -> Any:
    """Return what computes the drafts of a proposer."""
    model = proposer._model
    return model._executors[0] if hasattr(model, "_executors") else model._resources.executor


def test_hidden_states_are_kept_for_sides_with_drafts_only(ending: ExitStack) -> None:
    shared = Engines(COMPUTED[-1], ending, 1)
    off, k2 = (shared.ready(asked := tasks(), name)[0] for name in ("off", "k2"))
    k2.attach()
    core: Any = k2.core
    ring = core.runner._taps.ring
    num_put = ring._num_put
    turn(off, asked)
    assert ring._num_put == num_put
    assert "taps" not in core.runner.executor.program.outputs
    turn(k2, asked)
    assert ring._num_put > num_put
    assert core.runner.executor.program.outputs["taps"]


def test_a_prediction_that_matches_nothing_is_asked_for_and_alone(ending: ExitStack) -> None:
    shared = Engines(PREDICTION, ending, 1)
    [off] = shared.ready(asked := tasks(), "off")
    known = [predicting(task, off.card.vocab_size) for task in answers_of(off, asked, BATCH)]
    for task in known:
        assert len(task.prediction) == len(task.expected)
        assert not set(task.prediction) & set(task.expected)
    [auto] = shared.ready(known, "auto")
    assert turn(off, known) == (0, 0, 0)
    calls, _ = calls_and_plans(auto, known)
    asked_at = "quire/speculative/{}: {}.propose"
    assert calls[asked_at.format("prediction.py", "PredictionProposer")] > 0
    assert calls[asked_at.format("ngram.py", "NgramProposer")] == 0
    assert turn(auto, known)[2] == 0
