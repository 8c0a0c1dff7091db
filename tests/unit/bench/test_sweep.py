"""A sweep of settings: each candidate once, the best one kept, a second call continues; no
times.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bench import sweep
from bench.peers import child, settings
from bench.sweep import Plan, Sweep
from quire.models.model_folder import box_path

TAKES = (0.3, 0.15, 0.6)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return the plan of a peer that reports the times in its settings."""
    scripts = {"transformers": ("tests.unit.bench.fake_peer", "")}
    monkeypatch.setattr(child, "SCRIPTS", MappingProxyType({**child.SCRIPTS, **scripts}))
    monkeypatch.setattr(child, "is_installed", lambda name: True)
    grid: dict[str, Any] = {"one": {"takes_s": [*TAKES]}, "many": {"short": [True]}}
    monkeypatch.setattr(settings, "GRID", {"transformers": grid})
    return Plan(
        checkpoint=box_path(),
        precision="bf16",
        engines=["transformers"],
        workloads=["w1"],
        repeats=2,
        minutes=10,
        limit_s=60,
        threads=1,
    )


def tried(made: Sweep) -> list[float]:
    return [entry["settings"]["takes_s"] for entry in made.content["tried"]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"transformers": {"*": {"*": {"a": 1}, "w1": {"takes_s": 0.2}}}}))
    return path


def chosen(file: Path) -> dict[str, Any]:
    return settings.settings_for("transformers", precision="bf16", workload="w1", file=file)


def test_the_fastest_candidate_is_committed(plan: Plan, file: Path, tmp_path: Path) -> None:
    sweep.run(plan, Sweep(tmp_path / "tried.json"), file=file)
    kept = Sweep(tmp_path / "tried.json")
    assert tried(kept) == [0.2, *TAKES]  # the committed one first
    assert all(len(entry["rates"]) == 2 for entry in kept.content["tried"])
    assert chosen(file) == {"a": 1, "takes_s": 0.15}


def test_the_committed_settings_stay_if_nothing_is_faster(
    plan: Plan, file: Path, tmp_path: Path
) -> None:
    known = json.loads(file.read_text())
    known["transformers"]["*"]["w1"] = {"takes_s": 0.11}
    file.write_text(json.dumps(known))
    sweep.run(plan, Sweep(tmp_path / "tried.json"), file=file)
    assert chosen(file) == {"a": 1, "takes_s": 0.11}


@pytest.mark.parametrize(("fastest", "takes_s"), [(101.0, 0.2), (103.0, 0.15)])
def test_a_small_gain_changes_nothing(
    plan: Plan,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fastest: float,
    takes_s: float,
) -> None:
    rates = {0.2: [90.0, 100.0], 0.15: [fastest, 80.0]}
    monkeypatch.setattr(
        sweep, "measured", lambda *told: rates.get(told[-1]["takes_s"], [50.0, 50.0])
    )
    sweep.run(plan, Sweep(tmp_path / "tried.json"), file=file)
    assert chosen(file) == {"a": 1, "takes_s": takes_s}


def test_without_time_nothing_is_chosen_and_a_second_call_continues(
    plan: Plan, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, left = sweep.measured, [2]

    def two_of_them(*args: Any) -> list[float]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return measured(*args)

    monkeypatch.setattr(sweep, "measured", two_of_them)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(plan, Sweep(tmp_path / "tried.json"), file=file)
    sweep.run(replace(plan, minutes=-1), Sweep(tmp_path / "tried.json"), file=file)
    assert chosen(file) == {"a": 1, "takes_s": 0.2}
    left[0] = 2
    sweep.run(plan, Sweep(tmp_path / "tried.json"), file=file)
    assert tried(Sweep(tmp_path / "tried.json")) == [0.2, *TAKES]
    assert chosen(file) == {"a": 1, "takes_s": 0.15}


def test_wrong_answers_are_never_the_fastest(
    plan: Plan, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = json.loads(file.read_text())
    known["transformers"]["*"]["w3"] = {"takes_s": 0.2}
    file.write_text(json.dumps(known))
    sweep.run(replace(plan, workloads=["w3"]), Sweep(tmp_path / "tried.json"), file=file)
    assert "tokens where" in capsys.readouterr().out
    told = settings.settings_for("transformers", precision="bf16", workload="w3", file=file)
    assert told == {"a": 1, "takes_s": 0.2}
