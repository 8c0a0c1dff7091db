"""Channel: frames and bytes of blocks in any mixture, limits of time, and an end from outside."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from quire.transfer.links.channel import Channel, LinkClosed, LinkTimeout
from quire.transfer.links.messages import Beat, Block, End

GIVE_UP_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connecting = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    made = Channel(connecting), Channel(accepted)
    yield made
    for channel in made:
        channel.close()


def test_frames_and_blocks_of_all_sizes_arrive_as_they_were_sent(
    ends: tuple[Channel, Channel],
) -> None:
    left, right = ends
    draw = np.random.default_rng(5)
    sizes = [0, 1, 100, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 70_000, 3_000_000, 5, 0, 40_000]
    blocks = [draw.integers(0, 256, size, np.uint8) for size in sizes]

    def send() -> None:
        for index, block in enumerate(blocks):
            for _ in range(index):
                left.send(Beat(), within_s=GIVE_UP_S)
            left.send(Block(index, len(block), Block.INLINE), block.data, within_s=GIVE_UP_S)
        left.send(End("over"), within_s=GIVE_UP_S)

    thread = threading.Thread(target=send)
    thread.start()
    for index, block in enumerate(blocks):
        for _ in range(index):
            assert isinstance(right.receive(Beat, within_s=GIVE_UP_S), Beat)
        said = right.receive(Block, within_s=GIVE_UP_S)
        assert said == Block(index, len(block), Block.INLINE)
        got = np.zeros(len(block), np.uint8)
        right.receive_inline(got.data, within_s=GIVE_UP_S)
        assert np.array_equal(got, block), index
    assert right.receive(End, within_s=GIVE_UP_S) == End("over")
    thread.join()
    assert not right.has_input()


def test_what_was_read_ahead_counts_as_input(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    for _ in range(3):
        left.send(Beat(), within_s=GIVE_UP_S)
    assert right.has_input(GIVE_UP_S)
    for num_left in (2, 1, 0):
        right.receive(Beat, within_s=GIVE_UP_S)
        assert right.has_input(GIVE_UP_S if num_left else 0.0) == bool(num_left)


@pytest.mark.parametrize("num_bytes", [100, 1 << 20])
def test_a_side_that_sends_little_by_little_has_no_more_time(
    ends: tuple[Channel, Channel], num_bytes: int
) -> None:
    left, right = ends
    is_over = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            while not is_over.wait(0.005):
                left._socket.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    room = np.zeros(num_bytes, np.uint8)
    with pytest.raises(LinkTimeout):
        right.receive_inline(room.data, within_s=0.1)
    assert not room[-1]
    is_over.set()
    thread.join()


def test_a_side_that_takes_nothing_has_no_more_time(ends: tuple[Channel, Channel]) -> None:
    left, _ = ends
    with pytest.raises(LinkTimeout):
        left.send(Block(0, 0, Block.INLINE), bytes(64 << 20), within_s=0.1)


def test_another_thread_ends_a_wait(ends: tuple[Channel, Channel]) -> None:
    _, right = ends
    failures: list[type[Exception]] = []

    def receive() -> None:
        try:
            right.receive_inline(memoryview(bytearray(1 << 20)), within_s=GIVE_UP_S)
        except OSError as error:
            failures.append(type(error))

    thread = threading.Thread(target=receive)
    thread.start()
    right.stop()
    thread.join(GIVE_UP_S)
    assert failures == [LinkClosed]
    with pytest.raises(OSError, match=r"."):
        right.receive(Beat, within_s=GIVE_UP_S)


def test_a_descriptor_that_was_closed_is_never_shut(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stop` waits for a `close` under way: the descriptor may be another connection's next."""
    left, _ = ends
    order: list[str] = []
    closing, goes_on = threading.Event(), threading.Event()
    own = left._socket

    class Watched:
        def close(self) -> None:
            closing.set()
            goes_on.wait(GIVE_UP_S)
            own.close()
            order.append("closed")

        def __getattr__(self, name: str) -> object:
            return getattr(own, name)

    left._socket = Watched()  # type: ignore[assignment]
    monkeypatch.setattr(
        socket.socket, "shutdown", lambda self, how: order.append("shut"), raising=True
    )
    closer = threading.Thread(target=left.close)
    closer.start()
    assert closing.wait(GIVE_UP_S)
    stopper = threading.Thread(target=left.stop)
    stopper.start()
    stopper.join(0.05)
    assert order == ["shut"]  # of close itself
    goes_on.set()
    closer.join()
    stopper.join()
    assert order == ["shut", "closed", "shut"]
    left._socket = own


@pytest.mark.parametrize(("host", "is_bounded"), [("127.0.0.1", True), ("192.0.2.7", False)])
def test_only_connections_within_the_machine_have_small_buffers(
    host: str, is_bounded: bool
) -> None:
    class Connected(socket.socket):
        bounded = 0

        def getpeername(self) -> tuple[str, int]:
            return host, 1

        def setsockopt(self, level: int, option: int, value: object) -> None:  # type: ignore[override]
            self.bounded += option in (socket.SO_SNDBUF, socket.SO_RCVBUF)

    connection = Connected(socket.AF_INET, socket.SOCK_STREAM)
    channel = Channel(connection)
    assert connection.bounded == 2 * is_bounded
    channel.close()
