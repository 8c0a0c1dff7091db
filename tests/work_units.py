"""How tests are divided among the processes of pytest-xdist, and what these send of them.

Not known: what any test does. Always holds: a unit runs in one process, in the order of collection;
each report that is not a passed setup or teardown arrives. With some 17,000 tests, xdist's own
accounting (a count over all tests of a process, for each of six messages a test) took as long as
half a minute of tests.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.conftest import unit_of

SENT_AT_ONCE = "sent at once"
# Messages that can wait until their test has ended.
_OF_A_TEST = frozenset({"testreport", "logfinish"})


class UnitScheduling(LoadFileScheduling):
    """Give a process another unit when it has two tests left, with accounting in constant time."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # would start the units with most tests first
        self._places: dict[str, int] = {}

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Drop a test that has ended: the tests of a process are those that it has yet to run."""
        nodeid = self.registered_collections[node][item_index]
        units = self.assigned_work[node]
        unit = units[unit_of(nodeid)]
        del unit[nodeid]
        if not unit:
            del units[unit_of(nodeid)]
        self._reschedule(node)

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        return sum(map(len, workload.values()))

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._places:
            self._places = {nodeid: at for at, nodeid in enumerate(self.collection)}
        scope, unit = self.workqueue.popitem(last=False)
        self.assigned_work[node][scope] = unit
        node.send_runtest_some([self._places[nodeid] for nodeid in unit])


def send_tests_at_once(config: pytest.Config) -> None:
    """Send one message a test, in a process that runs tests.

    Passed setups and teardowns are left out where they say nothing and no option shows them.
    """
    (interactor,) = (
        plugin
        for plugin in config.pluginmanager.get_plugins()
        if type(plugin).__name__ == "WorkerInteractor"
    )
    shows_all = config.option.durations is not None or config.option.xmlpath is not None
    waiting: list[tuple[str, dict[str, Any]]] = []

    def send(name: str, **content: Any) -> None:
        if name == "logstart" or (name == "testreport" and not shows_all and _is_mere(content)):
            return
        waiting.append((name, content))
        if name not in _OF_A_TEST:
            interactor.channel.send((SENT_AT_ONCE, {"messages": waiting.copy()}))
            waiting.clear()

    interactor.sendevent = send


def _is_mere(content: dict[str, Any]) -> bool:
    """Return whether a report says only that a setup or teardown has passed."""
    report = content["data"]
    return (
        report["when"] != "call"
        and report["outcome"] == "passed"
        and not report["user_properties"]
        and not report["sections"]
    )


def receive_tests_at_once() -> None:
    """Take the messages apart, in the process that reports."""
    take_one = WorkerController.process_from_remote

    def take(self: WorkerController, message: Any) -> None:
        is_several = isinstance(message, tuple) and message[0] == SENT_AT_ONCE
        for one in message[1]["messages"] if is_several else [message]:
            take_one(self, one)

    WorkerController.process_from_remote = take
