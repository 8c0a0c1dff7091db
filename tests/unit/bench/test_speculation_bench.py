"""The measurement of speculation: its cells, its refusal of wrong tokens, and its table lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.measured.speculation_rows import speculation_rows
from bench.speculation.__main__ import Run, _is_done, main
from bench.speculation.cells import Cell, all_cells, quick_cells
from bench.speculation.intervals import interval_of, verdict
from bench.speculation.measure import MAX_WARM_UPS, Extent, Load, measure
from bench.speculation.proposers import COUNTS, SwitchControl
from bench.speculation.texts import word_ids
from quire.base.sampling_params import SamplingParams
from quire.speculative.control import StepCost
from quire.speculative.rests import STEPS_PER_PLAIN


class FakeLLM:
    """Answers with the same tokens; with another one where drafts are on and it `is_wrong`."""

    def __init__(self, *, is_wrong: bool = False) -> None:
        self.sides: list[tuple[bool | None, int | None]] = []
        self.delays_s: dict[int | None, float] = {}  # by fixed number; -1: without drafts
        self._is_wrong = is_wrong

    def generate(self, prompts: list[Any], sampling: Any, *, terms: Any, progress: bool) -> Any:
        is_on = terms.speculation.is_on
        self.sides.append((is_on, SwitchControl.fixed))
        if is_on:
            COUNTS.add(np.array([4], np.int32), np.array([3], np.int32))
        time.sleep(self.delays_s.get(SwitchControl.fixed if is_on else -1, 0.0))
        token = 6 if is_on and self._is_wrong else 5
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(token,))]) for _ in prompts]


LOAD = Load(prompts=["a"], sampling=[SamplingParams()])


def test_the_sides_of_a_cell_take_turns_and_drafts_are_counted() -> None:
    llm: Any = FakeLLM()
    llm.delays_s = {-1: 0.01, None: 0.01, 2: 0.01, 8: 0.01}
    found = measure(llm, LOAD, Extent(max_rounds=3, fixed=(2, 8)))
    assert llm.sides[: 1 + MAX_WARM_UPS] == [(False, None)] + MAX_WARM_UPS * [(True, None)]
    assert llm.sides[1 + MAX_WARM_UPS] == (False, None)
    assert llm.sides[5 + MAX_WARM_UPS] == (True, None)  # another one begins the next round
    assert all(set(one) >= {"off", "auto"} for one in found["rounds"])
    assert len(found["rounds"][0]) == 4
    assert set(found["speedups"]) == {"auto", "k2", "k8"}
    assert found["drafted"] == 12
    assert found["acceptance"] == 0.75
    assert found["speedup_interval"]["low"] <= found["speedups"]["auto"]
    assert found["control_interval"]["coverage"] == 0.75
    assert SwitchControl.fixed in (None, 2, 8)


def test_a_number_of_drafts_that_is_clearly_slower_is_left_out_of_later_rounds() -> None:
    llm: Any = FakeLLM()
    llm.delays_s = {8: 0.3}
    found = measure(llm, LOAD, Extent(max_rounds=4, fixed=(8,)))
    assert ["k8" in one for one in found["rounds"]] == [True, False, False, False]
    assert "k8" in found["speedups"]
    assert found["best_fixed"] == "off"


def test_known_answers_are_not_computed_again() -> None:
    llm: Any = FakeLLM()
    measure(llm, replace(LOAD, expected=[(5,)]), Extent(max_rounds=1, fixed=()))
    assert llm.sides[0] == (True, None)


@pytest.mark.parametrize(
    ("num", "left_out", "coverage"), [(1, 0, 0.0), (3, 0, 0.75), (6, 0, 0.97), (9, 1, 0.96)]
)
def test_an_interval_leaves_out_as_many_values_as_its_coverage_allows(
    num: int, left_out: int, coverage: float
) -> None:
    values = [1.0 + 0.1 * at for at in range(num)]
    found = interval_of(values[::-1])
    assert (found.low, found.high) == (values[left_out], values[num - 1 - left_out])
    assert found.coverage == pytest.approx(coverage, abs=0.01)
    assert (num >= 6) == (found.coverage >= 0.95)


def test_a_verdict_needs_a_narrow_interval_and_some_values() -> None:
    def of(median: float, low: float, high: float, coverage: float = 0.97) -> str:
        return verdict(0.98, median, {"low": low, "high": high, "coverage": coverage})

    assert of(1.0, 0.985, 1.1) == "met"
    assert of(1.0, 0.97, 1.1) == "met within the interval"
    assert of(0.97, 0.96, 0.99) == "missed within the interval"
    assert of(0.96, 0.95, 0.97) == "missed"
    assert of(0.9, 0.9, 0.9, 0.0) == "missed within the interval"


def test_wrong_tokens_are_not_reported() -> None:
    llm: Any = FakeLLM(is_wrong=True)
    with pytest.raises(SystemExit, match="changed the tokens"):
        measure(llm, LOAD, Extent(max_rounds=1, fixed=()))


def test_without_time_a_cell_has_few_rounds() -> None:
    llm: Any = FakeLLM()
    for more, num_rounds in (
        ({"min_rounds": 3, "has_time": lambda: False}, 3),
        ({"min_rounds": 3, "is_over": lambda: True}, 1),
        ({"min_rounds": 1, "has_time": lambda: False}, 1),
    ):
        found = measure(llm, LOAD, Extent(fixed=(), **more))
        assert len(found["rounds"]) == num_rounds


def test_cells_have_names_of_their_own_and_those_of_an_engine_are_together() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    engines = [cell.engine for cell in cells]
    changes = sum(one != other for one, other in pairwise(engines))
    assert changes == len(set(engines)) - 1
    assert {cell.name for cell in quick_cells()} <= {cell.name for cell in cells}
    assert {cell.goal for cell in quick_cells()} == {0.98, 2.0, 2.5}


def test_a_quick_result_is_measured_again_by_a_whole_run_only() -> None:
    cell = all_cells()[0]
    assert not _is_done({}, cell, quick=True)
    found = {"speedup_interval": {"coverage": 0.75}, "quick": True}
    assert _is_done({cell.name: found}, cell, quick=True)
    assert not _is_done({cell.name: found}, cell, quick=False)
    assert _is_done({cell.name: found | {"quick": False}}, cell, quick=False)
    cut = {"speedup_interval": {"coverage": 0.5}, "quick": False}  # two rounds: the run ended
    assert not _is_done({cell.name: cut}, cell, quick=False)
    assert not _is_done({cell.name: {"quick": False}}, cell, quick=False)  # no interval
    assert not _is_done({cell.name: {"refused": "not installed"}}, cell, quick=True)


def test_a_run_keeps_earlier_cells_and_the_load_that_they_were_measured_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(found: dict[str, dict[str, Any]], load: float) -> dict[str, Any]:
        def measured(_: Run, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
            yield from ((cell, found[cell.name]) for cell in cells if cell.name in found)

        card = {"cpu": "C", "load_at_start": load}
        monkeypatch.setattr(f"{main.__module__}.machine_card", lambda: card)
        monkeypatch.setattr(Run, "measured", measured)
        monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path / "out.json"), "--again"])
        main()
        written: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return written

    interval = {"low": 1.0, "high": 1.0, "coverage": 0.97}
    one = {"speedups": {"auto": 1.0}, "speedup_interval": interval, "rounds": []}
    one |= {"control_of_best": 1.0, "control_interval": interval}
    first, second = (cell.name for cell in all_cells()[:2])
    run({first: one, second: {"refused": "why"}}, 9.0)
    found = run({first: {"refused": "why"}, second: one}, 1.0)
    assert found["cells"] == {
        first: one | {"quick": False, "load_at_start": 9.0},
        second: one | {"quick": False, "load_at_start": 1.0},
    }
    assert found["machine"]["load_at_start"] == 9.0  # of a cell that was kept
    assert run({first: one}, 2.0)["machine"]["load_at_start"] == 2.0


def test_a_fixed_side_leaves_no_experience_behind() -> None:
    control, cost = SwitchControl(1, 4), StepCost(10.0, 1, np.full(1, 3.0))
    slots, limits = np.array([0]), np.array([4], np.int32)
    before, balance, rests = control.limits(slots, limits, cost), control.balance, control.rests
    SwitchControl.switch(2)
    assert control.limits(slots, limits, cost).tolist() == [2]
    assert control.balance is None
    control.rests.note_choice(pays=False, step_ms=1.0)
    for _ in range(40):
        control.verified(slots, limits, np.array([0], np.int32))
    SwitchControl.switch(None)
    assert control.limits(slots, limits, cost).tolist() == before.tolist()
    assert (control.balance, control.rests, rests.left) == (balance, rests, 0)


def test_runs_of_fixed_sides_have_no_more_steps_without_drafts_than_others() -> None:
    control, num_plain = SwitchControl(1, 4), 0
    for number in range(64):
        SwitchControl.switch(number % 3 or None)
        for _ in range(8):
            control.rests.note_choice(pays=True, step_ms=1.0)
            num_plain += SwitchControl.fixed is not None and control.rests.takes_plain_step()
    assert num_plain <= 2 + 64 * 8 // STEPS_PER_PLAIN


def test_words_of_a_text_keep_their_ids() -> None:
    ids = word_ids("the boat and the sea", 1000).tolist()
    assert ids[0] == ids[3]
    assert len(set(ids)) == 4
    assert all(256 <= token_id < 1000 for token_id in ids)


def test_cells_of_a_line_are_together_whatever_their_order() -> None:
    found = {"speedups": {"auto": 1.0}, "acceptance": None, "control_of_best": 1.0}
    cells = [
        cell for cell in all_cells() if cell.part in ("small", "history") and cell.model != "box"
    ]
    lines = speculation_rows({"cells": {cell.name: found for cell in cells}})
    assert len(lines) == 2 * 3 + 2 + 2  # proposers, temperatures; shapes; the control
    assert all(line.count("batch") == 4 for line in lines[:6])
    assert "earlier answers" in lines[-3]


def test_lines_show_speeds_goals_and_what_was_refused() -> None:
    def found(speedup: float, control: float) -> dict[str, Any]:
        speedups = {"auto": speedup, "k4": 1.0}
        interval = {"low": speedup - 0.005, "high": speedup + 0.005, "coverage": 0.97}
        of_control = {"low": control - 0.03, "high": control + 0.03, "coverage": 0.97}
        return {
            "speedups": speedups,
            "speedup_interval": interval,
            "acceptance": 0.7,
            "control_of_best": control,
            "control_interval": of_control,
        }

    one = Cell(part="shapes", model="qwen3-0.6b", proposer="synthetic", batch=1, acceptance=0.7)
    many = Cell(part="shapes", model="qwen3-0.6b", proposer="synthetic", batch=64, acceptance=0.7)
    peer = Cell(part="llama.cpp", model="qwen3-0.6b", proposer="ngram", batch=1)
    lookup = Cell(part="small", model="box", proposer="ngram", batch=4, temperature=1.0)
    lines = speculation_rows(
        {
            "cells": {
                one.name: found(1.5, 0.99),
                many.name: found(0.97, 0.9),
                lookup.name: {"refused": "no such file"},
                peer.name: {"refused": "llama.cpp is not installed"},
            }
        }
    )
    assert len(lines) == 6
    assert "no such file" in lines[0]
    assert lines[1].endswith("| batch 1: 1.50x (70 %), batch 64: 0.97x (70 %) | 2x, 0.98x |")
    assert "synthetic" in lines[1]
    assert "1 met, 0 met within the interval, 0 missed within the interval, 1 missed" in lines[2]
    assert f"in 1 of 2 cells; least 90 % ({many.name}); 0 met, 1 met within" in lines[3]
    assert "half of its width: median 0.4 %, widest 0.5 %" in lines[4]
    assert "not installed" in lines[5]
