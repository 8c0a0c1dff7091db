"""Ranks connected by sockets: large parts and all links arrive unchanged, a rank that is gone is
named, and frames that do not fit the memory of ranks end the group."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading

import numpy as np
import pytest

from quire.base.errors import DeviceLost
from quire.comm.links import LinkMemory, LinkSizes
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank, create_segment
from tests.cases import each_case
from tests.rank_threads import connected_ranks, on_all_ranks

SMALL = SegmentSizes(slot_bytes=64, message_bytes=64)
LARGE = SegmentSizes(slot_bytes=1 << 20, message_bytes=1 << 16)
# kind, value, done, reserved, word, two offsets, two sizes (native/src/rank_sockets.cc).
FRAME = struct.Struct("=IIIIqqqqq")
PUBLISH, ASK, ANSWER, ABORT, BYE = range(1, 6)


def alone(sizes: SegmentSizes = SMALL) -> tuple[SharedMemoryRank, socket.socket]:
    """Return rank 1 of 2, and the socket at which rank 0 would be."""
    near, far = socket.socketpair()
    segment = create_segment(2, sizes)
    try:
        group = SharedMemoryRank(segment, rank=1, degree=2, sizes=sizes)
    finally:
        os.close(segment)
    group.native.connect([near.detach(), -1])
    return group, far


def test_parts_larger_than_a_socket_takes_at_once_arrive_unchanged() -> None:
    def run(group: SharedMemoryRank) -> None:
        for turn in range(6):
            values = np.random.default_rng([turn, group.rank]).integers(0, 256, 3 << 20, np.uint8)
            gathered = group.all_gather(values)
            for rank in range(3):
                wanted = np.random.default_rng([turn, rank]).integers(0, 256, 3 << 20, np.uint8)
                np.testing.assert_array_equal(gathered[rank], wanted)

    on_all_ranks(connected_ranks(3, LARGE), run)


def test_messages_of_a_link_arrive_in_order_and_wait_for_room() -> None:
    sizes = LinkSizes(slot_bytes=64, slots=2)
    first = SMALL.total(2) + -SMALL.total(2) % 64
    groups = connected_ranks(2, SMALL, link_bytes=64 + sizes.total)
    ends = [
        LinkMemory(
            group, first_byte=first, rows=sizes, messages=sizes, num_rows=0, num_messages=1
        ).messages(0, group, peer=1 - group.rank, sends=group.rank == 0)
        for group in groups
    ]
    messages = [bytes([number]) * (1 + number % 64) for number in range(100)]

    def send_all() -> None:
        for message in messages:
            ends[0].send(message)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [ends[1].receive() for _ in messages] == messages
    sender.join()


def test_a_rank_that_is_gone_is_named_at_once() -> None:
    group, far = alone()
    waits: list[str] = []

    def wait() -> None:
        with pytest.raises(DeviceLost) as found:
            group.broadcast(None)  # a wait without limit
        waits.append(str(found.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    far.close()
    waiter.join()
    assert "rank 0 has closed its connection" in waits[0]
    assert "rank 0 has closed its connection" in group.native.wait_until_over()
    assert group.native.is_aborted


def test_a_rank_that_does_not_respond_is_found_and_one_that_does_is_waited_for() -> None:
    group, far = alone()
    with pytest.raises(DeviceLost, match="rank 0 does not respond"):
        group.barrier()
    far.close()
    groups = connected_ranks(2, SMALL, timeout_s=0.3)
    with pytest.raises(DeviceLost, match="rank 1 did not reach the same operation in time"):
        groups[0].barrier()


def test_a_rank_that_takes_nothing_is_found() -> None:
    group, far = alone(LARGE)
    with pytest.raises(
        DeviceLost, match=r"rank 0 (does not take what it is sent|does not respond)"
    ):
        group.all_gather(np.zeros(64 << 20, np.uint8))
    far.close()


def test_leaving_is_no_loss() -> None:
    groups = connected_ranks(3, SMALL)
    groups[1].native.leave()
    groups[1].close()
    groups[2].native.leave()
    assert groups[2].native.wait_until_over() == ""
    groups[2].close()
    assert not groups[0].native.is_aborted
    groups[0].native.leave()
    assert groups[0].native.wait_until_over() == ""


def test_ranks_end_with_rank_zero() -> None:
    groups = connected_ranks(2, SMALL)
    groups[0].native.leave()
    assert groups[1].native.wait_until_over() == "rank 0 has ended"


def test_the_reason_of_a_lost_rank_reaches_those_that_do_not_see_it() -> None:
    groups = connected_ranks(3, SMALL)
    groups[1].abort()
    for group in (groups[0], groups[2]):
        assert re.match(r"rank \d or another one cannot go on", group.native.wait_until_over())


@each_case("more", ["x" * 20, "x" * 5000, "\U0001f600" * 400, "of a file \udcff"])
def test_a_rank_that_fails_says_why(more: str) -> None:
    groups = connected_ranks(3, SMALL)
    groups[1].abort(f"no memory {more}")
    groups[1].abort("what follows from it")
    for group in (groups[0], groups[2]):
        found = group.native.wait_until_over()
        wanted = "rank 1 cannot go on: no memory " + more.replace("\udcff", "?")
        assert wanted.startswith(found)
        assert min(len(wanted), 250) <= len(found)
        assert len(found.encode()) < 1100


@each_case(
    ("frame", "found"),
    [
        (FRAME.pack(PUBLISH, 1, 0, 0, 1 << 40, 0, 0, 0, 0), "outside the memory"),
        (FRAME.pack(PUBLISH, 1, 0, 0, -64, 0, 0, 0, 0), "outside the memory"),
        (FRAME.pack(PUBLISH, 1, 0, 0, 4, 0, 0, 0, 0), "outside the memory"),
        (FRAME.pack(PUBLISH, 1, 0, 0, 0, 64, 0, 1 << 62, 0), "outside the memory"),
        (FRAME.pack(PUBLISH, 1, 0, 0, 0, 1 << 62, 0, 1 << 62, 0), "outside the memory"),
        (FRAME.pack(PUBLISH, 1, 0, 0, 0, 0, 64, 0, -1), "outside the memory"),
        (FRAME.pack(ABORT, 0, 0, 0, 0, 0, 0, 1 << 20, 0), "a reason of an impossible size"),
        (FRAME.pack(99, 1, 0, 0, 0, 0, 0, 0, 0), "unknown kind"),
        (b"GET / HTTP/1.1\r\n" * 10, "unknown kind"),
        (FRAME.pack(PUBLISH, 1, 0, 0, 0, 0, 0, 64, 0)[:20], "closed its connection"),
    ],
)
def test_a_frame_that_is_wrong_ends_the_group(frame: bytes, found: str) -> None:
    group, far = alone()
    far.sendall(frame)
    if found == "closed its connection":
        far.close()
    assert found in group.native.wait_until_over()
    with pytest.raises(DeviceLost, match=found):
        group.barrier()
    far.close()


def test_a_message_of_an_impossible_size_ends_the_group() -> None:
    group, far = alone()
    sent, sizes = 64, 128  # offsets in the header: the number of messages, their two sizes
    words = struct.pack("=q", 1 << 40)
    far.sendall(FRAME.pack(PUBLISH, 1, 0, 0, sent, sizes + 8, 0, 8, 0) + words)
    with pytest.raises(DeviceLost, match="a message of an impossible size"):
        group.broadcast(None)
    far.close()


def test_sockets_are_given_by_rank() -> None:
    segment = create_segment(2, SMALL)
    try:
        group = SharedMemoryRank(segment, rank=0, degree=2, sizes=SMALL)
    finally:
        os.close(segment)
    with pytest.raises(ValueError, match="a socket for each other rank"):
        group.native.connect([-1])
    with pytest.raises(ValueError, match="a socket for each other rank"):
        group.native.connect([5, -1])
