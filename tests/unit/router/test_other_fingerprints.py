"""Replicas that were started again between two probes, and answer as another model or build."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, stream


@pytest.mark.parametrize("names", [True, False])
def test_a_stream_goes_on_at_no_replica_that_answers_as_another_one(names: bool) -> None:
    """A server of before this header is judged by what it has listed."""
    first, second, third = replicas = [FakeReplica(), FakeReplica(), FakeReplica()]
    first.fails_after = 4
    second.names_fingerprint = names

    async def story(router: Router) -> None:
        second.fingerprint = "fp_b"
        status, _, body = await stream(router)
        assert (status, body) == (200, ANSWER)
        assert len(second.requests) == 1
        assert len(third.requests) == names
        if not names:
            return
        [known] = [one for one in router.fleet.replicas.values() if one.name == second.url]
        assert known.breaker._num_failures == 0
        while not known.is_up:
            await asyncio.sleep(0.01)
        assert second.num_left, "what it would have computed was given up"
        first.fails_after = None
        assert known.models == {"box": "fp_b"}
        for _ in range(6):
            assert (await stream(router))[0] == 200
        assert len(second.requests) > 1, "requests without output may go there"
        assert sum("models of a replica changed" in line for line in router.lines) == 1

    run(replicas, story)
    if names:
        assert third.requests[0]["output_ids"] == [100, 101, 102, 103]


@pytest.mark.parametrize("others", [["fp_a"], ["fp_a", "fp_b"]])
def test_a_stream_has_the_fingerprint_of_its_answer(others: list[str]) -> None:
    """And not the one that its replica was listed with."""
    first, *rest = replicas = [FakeReplica("fp_a"), *map(FakeReplica, others)]

    async def story(router: Router) -> None:
        first.fingerprint, first.fails_after = "fp_b", 4
        _, _, body = await stream(router)
        if "fp_b" in others:
            assert body == ANSWER
            return
        error: dict[str, Any] = json.loads(body.split(b"data: ")[-1])["error"]
        assert error["code"] == "stream_broken"
        assert "fp_b" in error["message"]

    run(replicas, story, resume_s=0.3)
    assert len(first.requests) == 1
    assert not rest[0].requests


def test_other_streams_of_such_a_replica_go_on() -> None:
    """They are answers of the new process as well."""
    only = FakeReplica()

    async def story(router: Router) -> None:
        only.fingerprint, only.gate = "fp_b", asyncio.Event()
        asked = [asyncio.ensure_future(stream(router)) for _ in range(3)]
        while len(only.requests) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # it was checked
        [known] = router.fleet.replicas.values()
        assert known.models == {"box": "fp_b"}
        assert known.is_up
        only.gate.set()
        assert [(await one)[2] for one in asked] == [ANSWER] * 3

    run([only], story)
    assert len(only.requests) == 3


def test_a_stream_asks_a_replica_that_answers_as_another_one_once() -> None:
    """It may be several servers behind a balancer, and list the fingerprint of one of them."""

    class Balancer(FakeReplica):
        async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            self.fingerprint = "fp_b"
            try:
                return await super()._stream(request, writer)
            finally:
                self.fingerprint = "fp_a"

    first, second = FakeReplica("fp_a"), Balancer("fp_a")

    def ends(token: int) -> None:
        if token == 104:
            first.stop_listening(cuts=True)

    first.before_token = ends

    async def story(router: Router) -> None:
        _, _, body = await stream(router)
        error: dict[str, Any] = json.loads(body.split(b"data: ")[-1])["error"]
        assert error["code"] == "stream_broken"
        known = router.fleet.replicas[second.url]
        assert known.is_up, "others may go there"

    run([first, second], story, resume_s=5.0)
    assert len(second.requests) == 1
