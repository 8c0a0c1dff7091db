"""Queue timeout: a request that waited too long is ended with its group; running ones are not."""

from __future__ import annotations

import pytest

from quire.base.errors import QueueTimedOut
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


def harness(limit_ms: float = 100.0) -> Harness:
    return Harness(Setup(max_num_seqs=1, queue_timeout_ms=limit_ms))


def add(found: Harness, name: str, arrival_ms: float = 0.0, streams: int = 1) -> None:
    for stream in range(streams):
        request = make_request(
            f"{name}.{stream}",
            [1, 2],
            max_tokens=20,
            group=name,
            stream=stream,
            arrival_ms=arrival_ms,
        )
        found.add(request)


def expired(found: Harness, now_ms: float) -> list[tuple[str, ...]]:
    return [ids for ids, _ in found.scheduler.expire(now_ms)]


def test_a_request_at_the_queue_timeout_is_ended_with_both_numbers() -> None:
    found = harness()
    add(found, "runs")
    found.step()
    add(found, "waits", arrival_ms=5.0)
    assert found.scheduler.expire(104.0) == []
    ((ids, error),) = found.scheduler.expire(105.0)
    assert ids == ("waits.0",)
    assert isinstance(error, QueueTimedOut)
    assert "waited 100 ms" in str(error)
    assert "at most 100 ms" in str(error)
    assert found.scheduler.stats().waiting == 0
    assert found.scheduler.expire(1e6) == []
    assert found.scheduler.check_integrity() == []


def test_a_request_that_has_waited_elsewhere_is_ended_before_those_that_came_earlier() -> None:
    found = harness()
    add(found, "runs")
    found.step()
    add(found, "waits", arrival_ms=50.0)
    add(found, "again", arrival_ms=10.0)
    assert expired(found, 109.0) == []
    assert expired(found, 110.0) == [("again.0",)]
    assert expired(found, 150.0) == [("waits.0",)]


def test_running_and_preempted_requests_are_never_ended() -> None:
    found = harness()
    add(found, "runs")
    found.step()
    assert found.scheduler.expire(1e6) == []
    found.scheduler._preemptor.preempt(0)
    assert found.scheduler.expire(2e6) == []
    found.drain()
    found.check_end()


def test_a_group_is_ended_as_one_before_it_ran_and_never_after() -> None:
    found = harness()
    add(found, "first", streams=2)
    found.step()  # its leader runs; the fork still waits
    add(found, "second", streams=3)
    assert expired(found, 200.0) == [("second.0", "second.1", "second.2")]
    for name in ("second.0", "second.1", "second.2"):
        del found.requests[name]
    found.drain()
    found.check_end()


@pytest.mark.parametrize("abort_first", [True, False])
def test_a_group_without_its_leader_is_ended_as_well(abort_first: bool) -> None:
    found = harness()
    add(found, "runs")
    found.step()
    add(found, "group", streams=3)
    if abort_first:
        found.abort("group.0")
    left = ("group.1", "group.2") if abort_first else ("group.0", "group.1", "group.2")
    assert expired(found, 200.0) == [left]
    assert found.scheduler.check_integrity() == []


def test_without_a_limit_all_requests_wait() -> None:
    found = harness(0.0)
    add(found, "runs")
    add(found, "waits")
    assert found.scheduler.expire(1e12) == []
    found.drain()
    found.check_end()


def test_a_fork_of_a_leader_that_has_answered_is_not_ended() -> None:
    found = harness()
    add(found, "group", streams=2)
    while "group.0" not in found.ends:
        found.step()
    assert "group.1" not in found.ends
    assert found.scheduler.expire(1e6) == []
    found.drain()
    found.check_end()
