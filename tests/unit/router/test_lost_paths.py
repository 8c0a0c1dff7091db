"""Connections to replicas: one that has lost its path breaks, and a quiet one is checked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from quire.base.server_url import server_url
from quire.router.http_client import LOST_S, ConnectionPool
from tests.unit.router.fake_replica import FakeReplica

# Devices that forget a quiet connection wait for at least some minutes.
QUIET_S = 60
LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def with_connection(make_loop: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    """Return what `read` finds at the socket of a pool's connection."""

    async def go() -> Any:
        replica = FakeReplica()
        await replica.start()
        pool = ConnectionPool(server_url(replica.url), 2.0)
        try:
            assert (await pool.request(b"GET", b"/health", []))[0] == 200
            (connection,) = pool._all
            assert connection._transport is not None
            return read(connection._transport.get_extra_info("socket"))
        finally:
            pool.close()
            replica.stop_listening(cuts=True)
            await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(go())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="options of Linux")
@LOOPS
def test_a_lost_path_is_found_with_traffic_and_without(make_loop: Callable[[], Any]) -> None:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")

    def read(opened: Any) -> list[int]:
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return [opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]

    idle_s, every_s, count, unacknowledged_ms = with_connection(make_loop, read)
    assert idle_s < QUIET_S
    assert idle_s + every_s * count == LOST_S == unacknowledged_ms / 1000
    assert count > 1, "one lost packet is no lost path"


def test_systems_without_these_options_keep_connections_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"):
        monkeypatch.delattr(socket, name, raising=False)
    option = socket.SO_KEEPALIVE
    assert with_connection(
        asyncio.new_event_loop, lambda opened: opened.getsockopt(socket.SOL_SOCKET, option)
    )
