"""ProcessBeats: processes that have stopped, as the others see it, at given times."""

from __future__ import annotations

from pathlib import Path

from quire.api.workers.process_beats import (
    BEAT_S,
    MAX_SILENT_S,
    ProcessBeats,
    forget_process,
)


class _Processes:
    """Processes of one server. running: those that beat, by number."""

    def __init__(self, folder: Path, num: int) -> None:
        self._folder, self._num = folder, num
        self.now_s = 100.0
        self.running = {one + 1: self.new(one, one + 1) for one in range(num)}

    def new(self, slot: int, number: int) -> ProcessBeats:
        return ProcessBeats(self._folder, slot=slot, num_slots=self._num, number=number)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.now_s += BEAT_S
            for one in self.running.values():
                one.beat(self.now_s)


def test_a_process_that_stops_is_found_by_all_others_until_it_goes_on(tmp_path: Path) -> None:
    processes = _Processes(tmp_path, 3)
    processes.run(5)
    assert [one.stopped for one in processes.running.values()] == [()] * 3
    second = processes.running.pop(2)
    processes.run(0.5)
    assert processes.running[1].stopped == ()
    processes.run(0.4)
    assert [one.stopped for one in processes.running.values()] == [(2,)] * 2
    processes.running[2] = second
    processes.run(0.5)
    assert [one.stopped for one in processes.running.values()] == [()] * 3, "nor are the others"


def test_without_a_history_it_is_waited_for_longer_and_the_end_of_one_is_no_stop(
    tmp_path: Path,
) -> None:
    processes = _Processes(tmp_path, 2)
    processes.run(1)
    del processes.running[2]
    processes.run(MAX_SILENT_S - 0.2)
    assert processes.running[1].stopped == ()
    processes.run(0.5)
    assert processes.running[1].stopped == (2,)
    processes.running[3] = processes.new(1, 3)
    processes.run(0.2)
    assert processes.running[1].stopped == (), "another has taken its place"


def test_a_process_that_has_ended_has_not_stopped(tmp_path: Path) -> None:
    """Even before another has taken its place."""
    forget_process(tmp_path, 1)  # before any has beaten
    processes = _Processes(tmp_path, 3)
    processes.run(5)
    del processes.running[2]
    processes.run(0.3)
    forget_process(tmp_path, 1)
    processes.run(5)
    assert [one.stopped for one in processes.running.values()] == [()] * 2


def test_a_process_that_was_late_itself_finds_none(tmp_path: Path) -> None:
    """As all are after a machine was suspended, whichever is the first to go on."""
    processes = _Processes(tmp_path, 2)
    processes.run(5)
    processes.now_s += 60.0
    waiting = processes.running.pop(2)
    processes.run(0.3)
    assert processes.running[1].stopped == ()
    processes.running[2] = waiting
    processes.run(5)
    assert processes.running[1].stopped == processes.running[2].stopped == ()
