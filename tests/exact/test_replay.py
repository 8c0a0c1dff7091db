"""Recorded plans are self-contained: a fresh runner reproduces the recorded results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import WorkerError
from quire.base.log import Log
from quire.engine.record import RecordingRunner, StepRecord, open_record, read_records, replay
from tests.exact.conftest import VOCAB_SIZE
from tests.exact.rig import Model, make_runner, run_case
from tests.exact.workload import Case, draw_case


def test_replayed_plans_reproduce_the_recorded_results(models: list[Model], tmp_path: Path) -> None:
    num_drafts = 0
    for number in range(8):
        case, model = _case(models, number)
        records = _recorded(model, case, tmp_path / f"{number}.plans")
        fresh = make_runner(model.executor(1), replace(case.settings, num_threads=1))
        assert replay(records, fresh) == []
        fresh.end_thread()
        assert len(records) > 1
        num_drafts += sum(record.plan.draft_ids.size for record in records)
    assert num_drafts > 100


def test_a_replay_reports_the_step_that_differs(models: list[Model], tmp_path: Path) -> None:
    case, model = _case(models, 0)
    records = _recorded(model, case, tmp_path / "plans")
    index = next(
        index
        for index, record in enumerate(records)
        if record.result is not None and len(record.result.token_ids)
    )
    record = records[index]
    assert record.result is not None
    changed_ids = (record.result.token_ids + np.int32(1)).astype(np.int32)
    records[index] = replace(record, result=replace(record.result, token_ids=changed_ids))
    fresh = make_runner(model.executor(1), case.settings)
    lines = replay(records, fresh)
    fresh.end_thread()
    assert len(lines) == 1
    assert lines[0].startswith(f"step {record.plan.step}: token_ids")


def test_a_truncated_record_is_rejected(models: list[Model], tmp_path: Path) -> None:
    case, model = _case(models, 0)
    path = tmp_path / "plans"
    _recorded(model, case, path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WorkerError, match="ends within a step"):
        list(read_records(path))


def _case(models: list[Model], number: int) -> tuple[Case, Model]:
    case = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
    return case, models[case.model]


def _recorded(model: Model, case: Case, path: Path) -> list[StepRecord]:
    """Run the case through a recorder and return the recorded plans."""
    outcome = run_case(model, case)
    runner = make_runner(model.executor(case.settings.num_threads), case.settings)
    recorder = RecordingRunner(runner, open_record(path), report=Log("test").error)
    for plan, _ in outcome.plans:
        recorder.collect(recorder.submit(plan))
    recorder.close_file()
    runner.end_thread()
    return list(read_records(path))
