"""Record of plans and results, and their replay.

A file of frames: one StepRecord a step, in the order of steps, each preceded by its length in 4
bytes (little end first). A plan is self-contained, so a fresh runner that is given the recorded
plans must give the recorded results, bit for bit: that is what `replay` holds.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quire.base.rare_records import PooledSums
from quire.base.records import Candidates, PromptScores, StepPlan, StepResult
from quire.base.report import Report
from quire.base.wire import Wire, WireError
from quire.engine.core import Runner
from quire.engine.new_file import open_new
from quire.runner.handle import Handle

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: what was planned and what came of it (None: computing it failed)."""

    plan: StepPlan
    result: StepResult | None


class RecordingRunner:
    """A Runner that writes down each plan and result, and changes nothing else.

    Where the file can no longer be written (a full disk), the record ends, `report` is
    called, and the steps go on.
    """

    def __init__(self, runner: Runner, file: BinaryIO, *, report: Report) -> None:
        self._runner = runner
        self._wire = Wire(StepRecord)
        self._file = file
        self._report = report
        self._plans: dict[int, StepPlan] = {}

    def submit(self, plan: StepPlan) -> Handle:
        """As the runner's."""
        handle = self._runner.submit(plan)
        self._plans[id(handle)] = plan
        return handle

    def collect(self, handle: Handle) -> StepResult:
        """As the runner's; the step is in the file when this returns or raises, if any can be."""
        plan, result = self._plans.pop(id(handle)), None
        try:
            result = self._runner.collect(handle)
        finally:
            self._write(StepRecord(plan=plan, result=result))
        return result

    def close_file(self) -> None:
        """End the record; the runner stays open."""
        with contextlib.suppress(OSError):  # what could not be written was reported then
            self._file.close()

    def close(self) -> None:
        """End the record and close the runner."""
        self.close_file()
        self._runner.close()

    def _write(self, record: StepRecord) -> None:
        if self._file.closed:
            return
        frame = self._wire.encode(record)
        try:
            self._file.write(_LENGTH.pack(len(frame)) + frame)
            self._file.flush()  # what was recorded survives a crash
        except OSError as error:
            self._report("the record of plans ends", step=record.plan.step, error=str(error))
            self.close_file()


def open_record(path: Path) -> BinaryIO:
    """Return a new file for a RecordingRunner. Raises SettingError where it cannot be made."""
    return os.fdopen(open_new(path, "--record-plans")[0], "wb")


def read_records(path: Path) -> Iterator[StepRecord]:
    """Yield the steps of a file, in order. Raises WireError where the file is cut short or not
    one."""
    wire = Wire(StepRecord)
    with path.open("rb") as file:
        while head := file.read(_LENGTH.size):
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            frame = file.read(length)
            if len(head) < _LENGTH.size or len(frame) < length:
                raise WireError(
                    f"{path} ends within a step: {length} bytes announced, {len(frame)} there; "
                    "it was cut short or is not a record of plans"
                )
            yield wire.decode(frame)


def replay(records: Iterable[StepRecord], runner: Runner) -> list[str]:
    """Run recorded plans on a fresh runner; the differences found, a line each (none: equal).

    Steps that failed when they were recorded are submitted and not compared.
    """
    differences = []
    for record in records:
        handle = runner.submit(record.plan)
        if record.result is None:
            continue
        result = runner.collect(handle)
        differences += [
            f"step {record.plan.step}: {name} is {getattr(result, name)!r}, "
            f"was {getattr(record.result, name)!r}"
            for name in _differing(result, record.result)
        ]
    return differences


def _differing(one: StepResult, other: StepResult) -> list[str]:
    return [
        item.name
        for item in fields(StepResult)
        if not _same(getattr(one, item.name), getattr(other, item.name))
    ]


def _same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        # Bytes, not values: NaN equals NaN, and 0.0 differs from -0.0.
        return left.shape == right.shape and left.tobytes() == right.tobytes()
    for record in (PromptScores, PooledSums, Candidates):
        if isinstance(left, record) and isinstance(right, record):
            return all(
                _same(getattr(left, item.name), getattr(right, item.name))
                for item in fields(record)
            )
    return left == right
