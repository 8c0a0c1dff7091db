"""A request that reports its progress has an output for each prompt chunk except the last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from quire.base.records import Request
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


def reports(harness: Harness) -> Iterator[tuple[str, int]]:
    """Run to the end and yield (request id, prompt tokens computed) of each progress output."""
    update = harness.scheduler.update
    reported: list[tuple[str, int]] = []

    def watched(*args: object) -> object:
        outputs = update(*args)  # type: ignore[arg-type]
        for output in outputs:
            if output.prompt_progress is not None:
                assert output.token_ids == ()
                assert output.finish_reason is None
                reported.append((output.request_id, output.prompt_progress))
        return outputs

    harness.scheduler.update = watched  # type: ignore[method-assign,assignment]
    harness.drain()
    harness.check_end()
    return iter(reported)


def asking(name: str, length: int) -> Request:
    return replace(make_request(name, range(length), max_tokens=3), report_progress=True)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_each_chunk_except_the_last_is_reported_once(plans_in_flight: int) -> None:
    harness = Harness(Setup(max_num_batched_tokens=4, plans_in_flight=plans_in_flight))
    harness.add(asking("a", 11))
    assert list(reports(harness)) == [("a", 4), ("a", 8)]


def test_only_requests_that_ask_report() -> None:
    harness = Harness(Setup(max_num_batched_tokens=4))
    harness.add(make_request("quiet", range(50, 61), max_tokens=3))
    harness.add(asking("b", 9))
    reported = list(reports(harness))
    assert {name for name, _ in reported} == {"b"}
    assert [computed for _, computed in reported] == sorted({computed for _, computed in reported})
    harness.add(make_request("after", range(70, 81), max_tokens=3))
    assert list(reports(harness)) == []


def test_cached_tokens_count_as_computed() -> None:
    harness = Harness(Setup(max_num_batched_tokens=4))
    harness.add(make_request("first", range(8), max_tokens=1))
    harness.drain()
    harness.add(asking("second", 16))
    assert list(reports(harness)) == [("second", 12)]


def test_a_prompt_of_one_chunk_reports_nothing() -> None:
    harness = Harness(Setup())
    harness.add(asking("a", 9))
    assert list(reports(harness)) == []
