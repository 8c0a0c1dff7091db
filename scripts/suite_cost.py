"""A pytest plugin that prints the CPU seconds of each test file, with those of its processes.

    python -m pytest -p scripts.suite_cost tests/serve -n 3 --dist loadfile

CPU seconds mean the same on a loaded machine, so this is how the cost of a change to the suite is
measured. The time of a process that is still running counts where it is used: a server shared by
files is no cost of the file that ends it. SUITE_COST=test prints each test instead of each
file. Knows no test. Always holds: the time of a process that its parent did not wait for, because
the parent was killed, is counted up to the last look at it only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "CPU seconds"
NUM_SHOWN = 60
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its ended children and of its running ones."""
    return sum(os.times()[:4]) + sum(_seconds_of(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has ended meanwhile
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process and of the children that it waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) * _TICKS_S


class SuiteCost:
    """Measure in the processes that run tests; collect and print in the one that reports."""

    def __init__(self) -> None:
        self._last_s = cpu_seconds()
        self._spent_s: dict[str, float] = defaultdict(float)
        self._num_tests: dict[str, int] = defaultdict(int)

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        """Print what collecting costs a process, and begin."""
        self._last_s = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Add what was spent since the last test ended."""
        report = yield
        if call.when == "teardown":
            now_s = cpu_seconds()
            report.user_properties.append((NAME, now_s - self._last_s))
            self._last_s = now_s
        return report  # type: ignore[return-value]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect, in the process that reports."""
        by_test = os.environ.get("SUITE_COST") == "test"
        name = report.nodeid if by_test else report.nodeid.partition("::")[0]
        for key, seconds in report.user_properties:
            if key == NAME and isinstance(seconds, float) and report.when == "teardown":
                self._spent_s[name] += seconds
                self._num_tests[name] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sums: of each folder, and the longest files or tests."""
        folders: dict[str, float] = defaultdict(float)
        for name, seconds in self._spent_s.items():
            folders[str(Path(name.partition("::")[0]).parent)] += seconds
        terminalreporter.section(f"{NAME}: {sum(folders.values()):.1f}")
        for folder, seconds in sorted(folders.items(), key=lambda one: -one[1]):
            terminalreporter.write_line(f"{seconds:8.2f}  {folder}")
        terminalreporter.write_line("")
        longest = sorted(self._spent_s.items(), key=lambda one: -one[1])[:NUM_SHOWN]
        for name, seconds in longest:
            terminalreporter.write_line(f"{seconds:8.2f}  {self._num_tests[name]:5d}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    config.pluginmanager.register(SuiteCost(), "quire-suite-cost")
