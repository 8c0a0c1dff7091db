"""The measurement of speculation: means of its cells, and its table lines."""

from __future__ import annotations

from typing import Any

import pytest

from bench.measured.speculation_rows import draft_head_rows, speculation_rows
from bench.speculation.cells import Cell, all_cells
from bench.speculation.summary import mean_of, summary_lines


def test_errors_of_cells_with_the_same_engines_do_not_cancel() -> None:
    one = {"speedup_interval": {"low": 0.98, "high": 1.02, "coverage": 0.95}}
    cells = all_cells()[:3]
    assert len({cell.engine for cell in cells}) == 1
    for groups, times in (
        ([[one] * 4], 1.0),
        ([[one]] * 4, 0.5),
        ([[one] * 3, [one]], 10**0.5 / 4),
    ):
        found = mean_of(groups, "speedup_interval")
        assert found.value == pytest.approx(1.0)
        assert found.half_width == pytest.approx(0.02 * times, rel=1e-3)


def test_cells_that_the_end_of_a_run_cut_are_no_part_of_the_mean() -> None:
    first, other = all_cells()[:2]

    def found(speed: float, coverage: float) -> dict[str, Any]:
        interval = {"low": speed, "high": speed, "coverage": coverage}
        ratios = {"speedups": {"auto": speed}, "control_of_best": 1.0}
        return ratios | {"speedup_interval": interval, "control_interval": interval}

    lines = list(
        summary_lines([first, other], {first.name: found(1.1, 0.95), other.name: found(9.0, 0.0)})
    )
    assert lines[0] == "2 of 2 cells measured, 0 refused"
    [mean] = [line for line in lines if line.startswith("mean of small")]
    assert mean.startswith("mean of small: 1.100x (1.100 to 1.100)")


def test_cells_of_a_line_are_together_whatever_their_order() -> None:
    found = {"speedups": {"auto": 1.0}, "acceptance": None, "control_of_best": 1.0, "tokens": 1}
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
            "tokens": 1,
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
    assert "; 1 met, 1 missed, 0 not decided" in lines[2]
    assert f"in 1 of 2 cells; least 90 % ({many.name}); 0 met, 1 missed, 1 not decided" in lines[3]
    assert "(probability 97 %) | half of its width: median 0.4 %, widest 0.5 %" in lines[4]
    assert "not installed" in lines[5]


def test_lines_say_what_was_measured_in_an_earlier_way_and_how_sure_intervals_are() -> None:
    def found(coverage: float, **more: Any) -> dict[str, Any]:
        interval = {"low": 0.9, "high": 1.1, "coverage": coverage}
        speeds = {"speedups": {"auto": 1.0}, "acceptance": None, "control_of_best": 1.0}
        return speeds | {"speedup_interval": interval, "control_interval": interval} | more

    first, other = all_cells()[:2]
    lines = speculation_rows(
        {
            "cells": {
                first.name: found(0.75),
                other.name: found(
                    0.95, tokens=128, off_of_off=[0.99, 1.01], engines={"off": 2, "auto": 2}
                ),
            }
        }
    )
    assert "(probability 75 to 95 %) | half of its width" in lines[-3]
    assert "standard deviation: median 1.4 %, largest 1.4 %" in lines[-2]
    assert "the intervals of 1 cells include it, with 2 engines a side" in lines[-2]
    assert lines[-1].endswith("in one engine | 1 of 2 cells | |")


def test_a_cell_without_fixed_numbers_says_nothing_about_the_best_of_them() -> None:
    interval = {"low": 0.9, "high": 0.96, "coverage": 0.95}
    found = {
        "speedups": {"auto": 0.93},
        "acceptance": None,
        "control_of_best": 0.93,
        "speedup_interval": interval,
        "control_interval": interval,
    }
    [cell] = [cell for cell in all_cells() if cell.predicts]
    assert cell.name == "small/box/prediction/t0/b4"
    rows = speculation_rows({"cells": {cell.name: found}})
    assert "a prediction that matches nothing, built-in model" in rows[0]
    assert rows[0].endswith("| batch 4: 0.93x (no drafts) | 0.98x |")
    assert not any("best fixed" in row for row in rows)
    lines = list(summary_lines([cell], {cell.name: found}))
    assert "at least 0.98x of no speculation: 0 met, 1 missed, 0 not decided" in lines
    assert not any("fixed number" in line for line in lines)


@pytest.mark.parametrize("proposer", ["self", "eagle"])
def test_the_models_own_proposers_are_measured_by_temperature_and_batch(proposer: str) -> None:
    found = {"speedups": {"auto": 1.0}, "acceptance": 0.5, "control_of_best": 1.0, "tokens": 1}
    cells = [cell for cell in all_cells() if cell.proposer == proposer]
    assert {(cell.batch, cell.temperature) for cell in cells} == {
        (batch, temperature) for batch in (1, 4) for temperature in (0.0, 0.6, 1.0)
    }
    rows = speculation_rows({"cells": {cell.name: found for cell in cells}})
    assert sum("batch 1: 1.00x (50 %), batch 4: 1.00x (50 %)" in row for row in rows) == 3


def test_what_heads_guess_right_is_shown_by_temperature_and_position() -> None:
    cell = {"drafted": 200, "acceptance": 0.435, "tokens_per_row": 2.741}
    cell |= {"by_position": [0.65, 0.472], "temperature": 0.6}
    cell |= {"model": "box"}
    cells = [{"proposer": "eagle"} | cell, {"proposer": "draft"} | cell | {"drafted": 0}]
    cells.append(cells[0] | {"temperature": 1.0})
    other = {"proposer": "self", "model": "stories260K"}
    cells += [cell | other | {"layers": layers} for layers in (1, 2)]
    rows = draft_head_rows({"drafts": 2, "cells": cells})
    assert rows[0] == (
        "| EAGLE-3 head, built-in model, 2 drafts in each step, by temperature: accepted (by "
        "position), tokens per step of a request | 0.6: 44 % (65, 47 %), 2.74; "
        "1: 44 % (65, 47 %), 2.74 | |"
    )
    assert [row.split(", stories260K")[0] for row in rows[1:]] == [
        "| the model's first layer",
        "| the model's first 2 layers",
    ]
