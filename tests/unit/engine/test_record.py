"""RecordingRunner: failures of the record never affect the steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from quire.base.records import NO_INTS, StepPlan, StepResult
from quire.engine.record import RecordingRunner, open_record, read_records


class EmptyRunner:
    def submit(self, plan: StepPlan) -> Any:
        return plan

    def collect(self, handle: Any) -> StepResult:
        return StepResult(step=handle.step, token_counts=NO_INTS, token_ids=NO_INTS)

    def close(self) -> None:
        pass


class FullDisk(io.BytesIO):
    """A file with room for one step."""

    num_writes = 0

    def write(self, frame: Any) -> int:
        self.num_writes += 1
        if self.num_writes > 1:
            raise OSError(28, "No space left on device")
        return len(frame)


def test_a_full_disk_ends_the_record_with_one_report_and_no_step() -> None:
    reports: list[tuple[str, object]] = []

    def report(what: str, **fields: object) -> None:
        reports.append((what, fields["error"]))

    runner = RecordingRunner(EmptyRunner(), FullDisk(), report=report)
    for step in range(1, 5):
        assert runner.collect(runner.submit(StepPlan(step=step))).step == step
    runner.close()
    assert reports == [("the record of plans ends", "[Errno 28] No space left on device")]


def test_steps_are_in_the_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans"
    runner = RecordingRunner(EmptyRunner(), open_record(path), report=print)
    runner.collect(runner.submit(StepPlan(step=7)))
    assert [record.plan.step for record in read_records(path)] == [7]
    runner.close()
    assert capsys.readouterr().out == ""


def test_the_record_of_an_earlier_start_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        open_record(tmp_path / "plans").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plans", "plans-1"]
