"""A router that may open no more files: its replicas are not the cause."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest

from quire.router import http_client
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_bad_input import ANSWER, STREAM


class Files:
    """A limit on files that a test sets and takes away. is_short: one is free again by the time
    that a connection has failed."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, by_name: bool, is_short: bool = False
    ) -> None:
        self.are_used_up = False
        self._by_name, self._is_short = by_name, is_short
        loop: Any = asyncio.get_running_loop()
        self._connect, self._dup = loop.create_connection, os.dup
        monkeypatch.setattr(loop, "create_connection", self._connected, raising=False)
        monkeypatch.setattr(os, "dup", self._duplicated)

    async def _connected(self, *words: Any, **named: Any) -> Any:
        if self.are_used_up:  # a name is not found then, for no reason that is said
            raise OSError(-3 if self._by_name else errno.EMFILE, "nothing that is read")
        return await self._connect(*words, **named)

    def _duplicated(self, number: int) -> int:
        if self.are_used_up and not self._is_short:
            raise OSError(errno.EMFILE, "too many open files")
        return self._dup(number)


@pytest.mark.parametrize(("by_name", "is_short"), [(False, False), (True, False), (False, True)])
def test_a_request_waits_for_a_file_and_no_replica_is_blamed(
    monkeypatch: pytest.MonkeyPatch, by_name: bool, is_short: bool
) -> None:
    """Else all are given up at once, and all streams with them."""
    replicas = [FakeReplica(), FakeReplica()]
    gate = replicas[0].gate = replicas[1].gate = asyncio.Event()

    async def story(router: Router) -> None:
        files = Files(monkeypatch, by_name=by_name, is_short=is_short)
        open_ = [asyncio.ensure_future(router.post("/generate", STREAM)) for _ in range(2)]
        for replica in replicas:
            await replica.began.wait()
        files.are_used_up = True
        for one in router.fleet.replicas.values():
            router.fleet.pool(one).close()  # probes need new connections
        late = asyncio.ensure_future(router.post("/generate", STREAM))
        await asyncio.sleep(5.0)
        assert not any(task.done() for task in (*open_, late))
        assert all(one.is_up for one in router.fleet.replicas.values()), router.lines
        files.are_used_up = False
        gate.set()
        for task in (*open_, late):
            assert (await task)[::2] == (200, ANSWER)
        assert router.count("quire_router_replica_faults_total") == 0
        assert router.count("quire_router_resumed_streams_total") == 0
        monkeypatch.undo()

    run(replicas, story, resume_s=30.0)


def test_a_request_that_finds_no_file_is_refused_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(router: Router) -> None:
        files = Files(monkeypatch, by_name=False)
        for one in router.fleet.replicas.values():
            router.fleet.pool(one).close()
        files.are_used_up = True
        status, headers, body = await router.post("/generate", STREAM)
        assert status == 503, body
        assert b"retry-after" in headers
        files.are_used_up = False
        assert (await router.post("/generate", STREAM))[::2] == (200, ANSWER)
        monkeypatch.undo()

    run([FakeReplica(), FakeReplica()], story, resume_s=1.0)


def test_a_stream_that_is_to_continue_waits_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 4

    async def story(router: Router) -> None:
        files = Files(monkeypatch, by_name=False)
        loop = asyncio.get_running_loop()

        def use_up(token: int) -> None:
            if token == 103:
                files.are_used_up = True
                loop.call_later(1.0, setattr, files, "are_used_up", False)

        monkeypatch.setattr(http_client, "_MAX_IDLE", 0)
        first.before_token = use_up
        began_s = loop.time()
        assert (await router.post("/generate", STREAM))[::2] == (200, ANSWER)
        assert 0.9 < loop.time() - began_s < 2.5
        assert second.requests[0]["output_ids"] == [100, 101, 102, 103]
        assert not any("fenced" in line and second.url in line for line in router.lines)
        monkeypatch.undo()

    run([first, second], story, resume_s=30.0)
