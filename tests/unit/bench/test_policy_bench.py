"""Partial results of bench.policies, and comparisons of predictions with outcomes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.policies.forecast import held_against, held_text
from bench.policies.part import Part


def test_runs_of_the_same_settings_are_reused_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "table.part.json"
    first = Part(path, {"speeds": (1, 2)})
    keep = first.keeper("with goals")
    keep({"policy": "fcfs", "speed": 1.0})
    keep({"policy": "fcfs", "speed": 2.0})
    again = Part(path, {"speeds": (1, 2)})
    assert [run["speed"] for run in again.known("with goals")] == [1.0, 2.0]
    assert again.known("open-ended") == ()
    assert Part(path, {"speeds": (1, 3)}).known("with goals") == ()
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_prediction_is_compared_with_the_outcome() -> None:
    found = held_against(np.array([1.0, 4.0, 6.0, 9.0]), np.array([2.0, 4.0, 4.0, 18.0]), 5.0)
    assert found["relative_error_p50"] == pytest.approx(0.5)
    assert found["refused_share"] == pytest.approx(0.5)
    assert found["refused_wrongly_share"] == pytest.approx(0.25)
    assert found["taken_wrongly_share"] == 0.0
    assert found["missed_share"] == pytest.approx(0.25)


def test_a_prediction_under_fair_share_lists_the_light_tenant_separately() -> None:
    all_of_them = held_against(np.array([1.0, 4.0]), np.array([2.0, 4.0]), 5.0)
    light = held_against(np.array([1.0]), np.array([2.0]), 5.0)
    text = held_text({"policy": "fair", "speed": 2.0, **all_of_them, "light": light})
    assert text.startswith("fair at speed 2: first token after 3.00 s")
    assert "\n  its light tenant: first token after 2.00 s (p50); predicted is 0.50" in text
    assert "\n" not in held_text({"policy": "fcfs", "speed": 2.0, **all_of_them})
