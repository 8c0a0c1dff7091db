"""How ranks meet: all come in any order, and what differs or lacks is refused and named."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.base.errors import SettingError, WorkerError
from quire.comm.framed_socket import MAGIC, FramedSocket, WrongKey
from quire.comm.rendezvous import (
    Listener,
    MeetingPoint,
    RankConnections,
    meet_as_rank_zero,
    meet_rank_zero,
)

KEY = b"0123456789abcdef"


def meeting(world_size: int, timeout_s: float = 20.0) -> tuple[Listener, MeetingPoint]:
    """Return a free place to meet."""
    listener = Listener("127.0.0.1", 0)
    return listener, MeetingPoint(
        host="127.0.0.1",
        port=listener.port,
        world_size=world_size,
        key=KEY,
        version="1.0",
        timeout_s=timeout_s,
    )


class Ranks:
    """Ranks above 0 in threads: what each has, or why it has not come."""

    def __init__(self, points: dict[int, MeetingPoint]) -> None:
        self.found: dict[int, RankConnections] = {}
        self.errors: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=self._meet, args=(rank, point))
            for rank, point in points.items()
        ]
        for thread in self._threads:
            thread.start()

    def _meet(self, rank: int, point: MeetingPoint) -> None:
        try:
            self.found[rank] = meet_rank_zero(point, rank)
        except WorkerError as error:
            self.errors[rank] = str(error)

    def end(self, *, closes: bool = True) -> None:
        """Wait until all have come or failed."""
        for thread in self._threads:
            thread.join()
        for found in self.found.values() if closes else ():
            found.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_are_connected_with_each_other(world_size: int) -> None:
    listener, point = meeting(world_size)
    ranks = Ranks(dict.fromkeys(reversed(range(1, world_size)), point))
    zero = meet_as_rank_zero(point, listener)
    ranks.end(closes=False)
    assert not ranks.errors
    everyone = {0: zero, **ranks.found}
    for own in range(world_size):
        assert sorted(everyone[own].sockets) == [r for r in range(world_size) if r != own]
        for other, connection in everyone[own].sockets.items():
            connection.send(b"%d to %d" % (own, other))
    for own in range(world_size):
        for other, connection in everyone[own].sockets.items():
            assert connection.receive() == b"%d to %d" % (other, own)
    for one in everyone.values():
        one.close()


def test_missing_ranks_are_named_everywhere() -> None:
    listener, point = meeting(4, timeout_s=5.0)
    ranks = Ranks({2: point})
    with pytest.raises(WorkerError, match=r"of 4 ranks, ranks 1, 3 did not connect .* within 5 s"):
        meet_as_rank_zero(point, listener)
    ranks.end()
    assert "ranks 1, 3 did not connect" in ranks.errors[2]


def test_a_rank_without_rank_zero_says_where_it_looked() -> None:
    listener, point = meeting(2, timeout_s=0.3)
    listener.close()
    with pytest.raises(
        WorkerError, match=rf"rank 0 could not be reached at 127.0.0.1:{point.port}"
    ):
        meet_rank_zero(point, 1)


def test_a_rank_that_cannot_come_ends_the_wait() -> None:
    listener, point = meeting(2)
    with pytest.raises(WorkerError, match="its node is gone"):
        meet_as_rank_zero(point, listener, lost=lambda: "its node is gone")


def test_another_key_lets_nothing_in() -> None:
    listener, point = meeting(2, timeout_s=5.0)
    ranks = Ranks({1: replace(point, key=b"another key, as long")})
    with pytest.raises(WorkerError, match=r"rank 1 did not .* another key came from 127\.0\.0\.1"):
        meet_as_rank_zero(point, listener)
    ranks.end()
    assert "has another key" in ranks.errors[1]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda point: replace(point, version="2.0"), "is of version 2.0 and rank 0 of 1.0"),
        (lambda point: replace(point, world_size=4), "expects 4 ranks and rank 0 expects 2"),
    ],
)
def test_a_rank_that_differs_ends_the_start_on_both_sides(
    change: Callable[[MeetingPoint], MeetingPoint], found: str
) -> None:
    listener, point = meeting(2)
    ranks = Ranks({1: change(point)})
    with pytest.raises(WorkerError, match=found):
        meet_as_rank_zero(point, listener)
    ranks.end()
    assert found in ranks.errors[1]


def introduce(point: MeetingPoint, rank: int) -> tuple[FramedSocket, dict[str, object]]:
    """Say by hand which rank this is; return the connection and rank 0's answer."""
    one = FramedSocket(socket.create_connection((point.host, point.port)))
    one.prove(KEY, is_server=False)
    size, version = point.world_size, point.version
    one.send_fields({"rank": rank, "world_size": size, "version": version, "port": 1})
    return one, one.receive_fields()


def test_a_second_process_of_a_rank_is_refused_until_the_first_has_died() -> None:
    listener, point = meeting(3)
    zero: list[RankConnections] = []
    waiting = threading.Thread(target=lambda: zero.append(meet_as_rank_zero(point, listener)))
    waiting.start()
    first, welcome = introduce(point, 1)
    assert welcome == {"welcome": 1}
    second, refused = introduce(point, 1)
    assert "there is a rank 1 already" in str(refused["refused"])
    first.close()
    ranks = Ranks({1: point, 2: point})
    ranks.end()
    waiting.join()
    assert not ranks.errors
    assert sorted(zero[0].sockets) == [1, 2]
    second.close()
    zero[0].close()


def test_a_rank_that_comes_behind_the_failure_is_refused() -> None:
    """Its handshake was under way: it would have been admitted after the others were closed."""
    listener, point = meeting(3)
    late: list[FramedSocket] = []

    def lost() -> str:
        if not late:
            late.append(FramedSocket(socket.create_connection((point.host, point.port))))
            return ""
        late[0].prove(KEY, is_server=False)  # the other end has taken the connection
        return "its node is gone"

    with pytest.raises(WorkerError, match="its node is gone"):
        meet_as_rank_zero(point, listener, lost=lost)
    (one,) = late
    one.send_fields({"rank": 1, "world_size": 3, "version": point.version, "port": 1})
    assert one.receive_fields() == {"refused": "rank 1 came too late; the log of rank 0 says why"}
    with pytest.raises(OSError, match="closed"):
        one.receive_fields()
    one.close()


def test_a_rank_that_died_before_the_others_came_is_waited_for() -> None:
    listener, point = meeting(3)
    zero: list[RankConnections] = []
    waiting = threading.Thread(target=lambda: zero.append(meet_as_rank_zero(point, listener)))
    waiting.start()
    dead, _ = introduce(point, 1)
    dead.close()
    others = Ranks({2: point})
    waiting.join(0.5)  # rank 2 is known by now, and all ranks have come once
    assert waiting.is_alive()
    successor = Ranks({1: point})
    for ranks in (others, successor):
        ranks.end(closes=False)
    waiting.join()
    assert not others.errors
    assert not successor.errors
    everyone = [*zero, *others.found.values(), *successor.found.values()]
    assert sorted(zero[0].sockets) == [1, 2]
    for one in everyone:
        one.close()


def test_strangers_hold_up_nothing() -> None:
    listener, point = meeting(2)
    silent = socket.create_connection((point.host, point.port))
    with socket.create_connection((point.host, point.port)) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
    boaster = socket.create_connection((point.host, point.port))
    boaster.sendall(MAGIC + bytes(32) + bytes(32) + b"\xff" * 64)
    ranks = Ranks({1: point})
    zero = meet_as_rank_zero(point, listener)
    ranks.end()
    assert not ranks.errors
    zero.close()
    silent.close()
    boaster.close()


def test_an_address_that_is_taken_or_foreign_is_refused() -> None:
    listener, point = meeting(2)
    with pytest.raises(SettingError, match=rf"cannot listen at 127.0.0.1:{point.port} .*in use"):
        Listener(point.host, point.port)
    listener.close()
    with pytest.raises(SettingError, match=r"cannot listen at 192\.0\.2\.1:29500"):
        Listener("192.0.2.1", 29500)
    with pytest.raises(SettingError, match="cannot be looked up"):
        Listener("no-such-host.invalid", 29500)


def test_a_message_above_the_limit_is_refused_unread() -> None:
    one, other = (FramedSocket(end) for end in _tcp_pair())
    one.send(bytes(100))
    with pytest.raises(OSError, match="at most 10 are allowed"):
        other.receive(max_bytes=10)
    one.send(b"[1]")
    one.close()
    other.close()


def test_an_end_without_the_key_proves_nothing() -> None:
    one, other = (FramedSocket(end) for end in _tcp_pair())
    failed: list[bool] = []

    def accept() -> None:
        try:
            other.prove(KEY, is_server=True)
        except (WrongKey, OSError):
            failed.append(True)
        other.close()

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(WrongKey):
        one.prove(b"x" * 16, is_server=False)
    one.close()
    thread.join()
    assert failed == [True]


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]
