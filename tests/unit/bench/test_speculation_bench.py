"""The measurement of speculation: its cells, its refusal of wrong tokens, and its table lines."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.measured.speculation_rows import speculation_rows
from bench.speculation.__main__ import _is_done
from bench.speculation.cells import Cell, all_cells, quick_cells
from bench.speculation.measure import Extent, Load, measure
from bench.speculation.proposers import COUNTS, SwitchControl
from bench.speculation.texts import word_ids
from quire.base.sampling_params import SamplingParams
from quire.speculative.control import StepCost


class FakeLLM:
    """Answers with the same tokens; with another one where drafts are on and it `is_wrong`."""

    def __init__(self, *, is_wrong: bool = False) -> None:
        self.sides: list[tuple[bool | None, int | None]] = []
        self._is_wrong = is_wrong

    def generate(self, prompts: list[Any], sampling: Any, *, terms: Any, progress: bool) -> Any:
        is_on = terms.speculation.is_on
        self.sides.append((is_on, SwitchControl.fixed))
        if is_on:
            COUNTS.add(np.array([4], np.int32), np.array([3], np.int32))
        token = 6 if is_on and self._is_wrong else 5
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(token,))]) for _ in prompts]


LOAD = Load(prompts=["a"], sampling=[SamplingParams()])


def test_the_sides_of_a_cell_take_turns_and_drafts_are_counted() -> None:
    llm: Any = FakeLLM()
    found = measure(llm, LOAD, Extent(num_rounds=3, fixed=(2, 8)))
    assert llm.sides[:4] == [(False, None), (True, None), (True, 2), (True, 8)]  # warms up
    assert [side[0] for side in llm.sides[4::4]] == [False, True, True]  # the first of each round
    assert [len(one) for one in found["rounds"]] == [4, 4, 4]
    assert set(found["speedups"]) == {"auto", "k2", "k8"}
    assert found["drafted"] == 12
    assert found["acceptance"] == 0.75
    assert found["control_of_best"] > 0


def test_wrong_tokens_are_not_reported() -> None:
    llm: Any = FakeLLM(is_wrong=True)
    with pytest.raises(SystemExit, match="changed the tokens"):
        measure(llm, LOAD, Extent(num_rounds=1, fixed=()))


def test_without_time_a_cell_has_one_round() -> None:
    llm: Any = FakeLLM()
    found = measure(llm, LOAD, Extent(num_rounds=9, fixed=(), has_time=lambda: False))
    assert len(found["rounds"]) == 1


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
    assert _is_done({cell.name: {"quick": True}}, cell, quick=True)
    assert not _is_done({cell.name: {"quick": True}}, cell, quick=False)
    assert _is_done({cell.name: {"quick": False}}, cell, quick=False)


def test_a_fixed_side_leaves_no_experience_behind() -> None:
    control, cost = SwitchControl(1, 4), StepCost(10.0, 1, np.full(1, 3.0))
    slots, limits = np.array([0]), np.array([4], np.int32)
    before = control.limits(slots, limits, cost).tolist()
    control.fixed = 2
    assert control.limits(slots, limits, cost).tolist() == [2]
    for _ in range(40):
        control.verified(slots, limits, np.array([0], np.int32))
    control.fixed = None
    assert control.limits(slots, limits, cost).tolist() == before


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
    assert len(lines) == 2 * 3 + 2 + 1  # proposers, temperatures; shapes; the control
    assert all(line.count("batch") == 4 for line in lines[:6])
    assert "earlier answers" in lines[-2]


def test_lines_show_speeds_goals_and_what_was_refused() -> None:
    def found(speedup: float, control: float) -> dict[str, Any]:
        speedups = {"auto": speedup, "k4": 1.0}
        return {"speedups": speedups, "acceptance": 0.7, "control_of_best": control}

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
    assert len(lines) == 4
    assert "no such file" in lines[0]
    assert lines[1].endswith("| batch 1: 1.50x (70 %), batch 64: 0.97x (70 %) | 2x, 0.98x |")
    assert "synthetic" in lines[1]
    assert f"in 1 of 2 cells; least 90 % ({many.name})" in lines[2]
    assert "not installed" in lines[3]
