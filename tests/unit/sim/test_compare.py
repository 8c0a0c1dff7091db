"""Comparisons: progress, and partial results of a stopped one."""

from __future__ import annotations

from io import StringIO
from typing import Any

from quire.obs.report import Progress
from quire.obs.timing import Goals
from quire.obs.trace import Arrival
from quire.sim.compare import Comparison, compare
from quire.sim.summary import comparison_text
from tests.unit.sim.made import DEFAULTS, config, machine

TRACE = [Arrival(arrival_s=0.2 * number, prompt_tokens=20, output_tokens=5) for number in range(40)]
COMPARISON = Comparison(
    trace_name="made up",
    trace=TRACE,
    policies=("fcfs", "sjf"),
    speeds=(1.0, 2.0),
    defaults=DEFAULTS,
    goals=Goals(),
)


def test_a_stopped_comparison_returns_the_runs_so_far() -> None:
    seen: list[Any] = []
    polled = []
    whole = compare(COMPARISON, machine(), config(), should_stop=lambda: bool(polled.append(1)))
    assert (whole["complete"], len(whole["runs"])) == (True, 4)
    num_polls = len(polled)

    def stop() -> bool:
        polled.append(1)
        return len(polled) > num_polls + num_polls // 3

    outcome = compare(COMPARISON, machine(), config(), should_stop=stop, on_run=seen.append)
    assert not outcome["complete"]
    *complete, last = outcome["runs"]
    assert complete == whole["runs"][: len(complete)] == seen
    assert not last["complete"]
    assert 0 < last["summary"]["num_requests"] < 40
    text = comparison_text(outcome)
    assert f"stopped after {len(complete)} of 4 runs" in text
    assert f"{last['policy']}*" in text


def test_a_comparison_stopped_at_once_has_no_runs() -> None:
    outcome = compare(COMPARISON, machine(), config(), should_stop=lambda: True)
    assert outcome["runs"] == []
    assert not outcome["complete"]
    assert "stopped after 0 of 4 runs" in comparison_text(outcome)


def test_progress_names_the_run_and_counts_requests() -> None:
    lines = _Terminal()
    compare(COMPARISON, machine(), config(), progress=Progress(lines))
    shown = lines.getvalue()
    assert "run 1 of 4: fcfs at speed 1: 0 of 40 requests ended, 1 arrived" in shown
    assert "run 4 of 4: sjf at speed 2: " in shown


def test_progress_without_a_terminal_is_an_occasional_line() -> None:
    now_s, lines = iter([0.0, 10.0, 30.0, 31.0, 61.0]), StringIO()
    progress = Progress(lines, every_s=30.0, clock_s=lambda: next(now_s))
    for word in ("first", "second", "third", "fourth"):
        progress.say(word)
    progress.clear()
    assert lines.getvalue() == "second\nfourth\n"


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True
