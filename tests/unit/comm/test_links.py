"""Links between ranks: rows and messages arrive unchanged and in order; steps that one end did not
run are dropped; a rank that is gone ends waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from quire import _native
from quire.base.errors import CapacityError, DeviceLost
from quire.comm.in_process import InProcessLink
from quire.comm.links import Link, LinkMemory, LinkSizes
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank, create_segment
from tests.rank_threads import connected_ranks

GROUP = SegmentSizes(slot_bytes=64, message_bytes=64)
MESSAGES = LinkSizes(slot_bytes=64, slots=3)
WIDTH = 24
ROWS = 40


class Ends:
    """Both ends of a link for rows and of one for messages, from rank 0 to rank 1."""

    def __init__(
        self, sizes: LinkSizes, ranks: tuple[int, ...] = (0, 1), *, by_sockets: bool = False
    ) -> None:
        first, link_bytes = GROUP.total(2), 64 + sizes.total + MESSAGES.total
        if by_sockets:
            self.groups = dict(enumerate(connected_ranks(2, GROUP, link_bytes=link_bytes)))
        else:
            segment = create_segment(2, GROUP, link_bytes=link_bytes)
            self.groups = {
                rank: SharedMemoryRank(segment, rank=rank, degree=2, sizes=GROUP) for rank in ranks
            }
            os.close(segment)
        memories = {
            rank: LinkMemory(
                group,
                first_byte=first + -first % 64,
                rows=sizes,
                messages=MESSAGES,
                num_rows=1,
                num_messages=1,
            )
            for rank, group in self.groups.items()
        }
        self.rows = {rank: self._end(memories[rank].rows, rank) for rank in ranks}
        self.messages = {rank: self._end(memories[rank].messages, rank) for rank in ranks}

    def _end(self, make: Callable[..., Link], rank: int) -> Link:
        return make(0, self.groups[rank], peer=1 - rank, sends=rank == 0)


def program_of(kind: str, link: Link) -> tuple[_native.Program, np.ndarray, Callable[[int], None]]:
    """Return a program of one send or recv, its rows, and what runs it on so many of them."""
    program = _native.Program(_native.Pool(1), ROWS * 64)
    program.add_buffer(0, 0, 2 * WIDTH // 3, ROWS, "f32")
    view = {"send": "x", "recv": "y"}[kind]
    program.add_segment([(kind, {view: (0, 0, WIDTH // 2), "stage": 1})])
    program.set_links(*((None, link.native) if kind == "send" else (link.native, None)))
    data = program.array((0, 0, WIDTH // 2), ROWS)

    def run(count: int) -> None:
        rows = np.zeros(count, np.int32)
        program.run(
            0,
            **dict.fromkeys(("token_ids", "positions", "rope_positions", "kv_slots"), rows),
            seq_starts=np.array([0, count], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            sample_rows=np.empty(0, np.int32),
        )

    return program, data, run


@pytest.fixture(
    params=[(1, False), (3, False), (64, False), (1, True), (64, True)],
    ids=lambda made: f"{made[0]} rows a slot{' by sockets' if made[1] else ''}",
)
def ends(request: pytest.FixtureRequest) -> Ends:
    """Return ends of links with slots for one row, a few, or all of a step."""
    rows, by_sockets = request.param
    return Ends(LinkSizes(slot_bytes=rows * WIDTH // 2 * 4, slots=4), by_sockets=by_sockets)


def test_rows_of_many_steps_arrive_unchanged(ends: Ends) -> None:
    values = np.random.default_rng(3).standard_normal((30, ROWS, WIDTH // 2)).astype(np.float32)
    counts = [1 + 7 * step % ROWS for step in range(len(values))]
    _, sent, send = program_of("send", ends.rows[0])
    _, received, receive = program_of("recv", ends.rows[1])

    def send_all() -> None:
        for step, count in enumerate(counts):
            sent[:count] = values[step, :count]
            ends.rows[0].native.begin(step)
            send(count)

    sender = threading.Thread(target=send_all)
    sender.start()
    for step, count in enumerate(counts):
        received[:] = np.nan
        ends.rows[1].native.begin(step)
        receive(count)
        np.testing.assert_array_equal(received[:count], values[step, :count])
        assert np.isnan(received[count:]).all()
    sender.join()
    assert ends.rows[1].native.received_bytes == sum(counts) * WIDTH // 2 * 4


def test_steps_that_only_one_end_runs_leave_both_in_step(ends: Ends) -> None:
    _, sent, send = program_of("send", ends.rows[0])
    _, received, receive = program_of("recv", ends.rows[1])
    sent[:] = 1.0
    ends.rows[0].native.begin(1)
    send(2)  # not received: the other end rejects the step by itself
    ends.rows[0].native.begin(2)
    ends.rows[0].reject()
    ends.rows[1].native.begin(2)
    with pytest.raises(ValueError, match="rank 0, which computes the layers before, rejected"):
        receive(2)
    sent[:] = 3.0
    ends.rows[0].native.begin(3)
    send(2)
    ends.rows[1].native.begin(3)
    receive(2)
    assert (received[:2] == 3.0).all()


def test_rows_go_through_from_outside_the_compiled_module_too() -> None:
    ends = Ends(LinkSizes(slot_bytes=100, slots=2))
    rows = np.arange(7 * 40, dtype=np.uint8).reshape(7, 40)
    received = np.zeros_like(rows)
    for end in ends.rows.values():
        end.native.begin(1)
    sender = threading.Thread(target=ends.rows[0].send_rows, args=(rows,))
    sender.start()
    ends.rows[1].receive_rows(received)
    sender.join()
    np.testing.assert_array_equal(received, rows)
    for end in ends.rows.values():
        end.native.begin(2)
    ends.rows[0].reject()
    with pytest.raises(ValueError, match="rejected the step"):
        ends.rows[1].receive_rows(received)
    with pytest.raises(ValueError, match="rows have no bytes"):
        ends.rows[0].send_rows(np.zeros((3, 0), np.uint8))
    ends.groups[0].abort()
    with pytest.raises(DeviceLost):
        ends.rows[1].receive_rows(received)


def test_what_is_to_end_with_the_group_is_called_by_an_abort() -> None:
    ends, calls = Ends(LinkSizes(slot_bytes=64, slots=1)), []
    ends.groups[0].on_abort(lambda: calls.append(1))
    ends.groups[1].abort()
    assert not calls
    ends.groups[0].abort()
    assert calls == [1]


def test_other_rows_than_are_meant_lose_the_group(ends: Ends) -> None:
    _, _, send = program_of("send", ends.rows[0])
    _, _, receive = program_of("recv", ends.rows[1])
    for end in ends.rows.values():
        end.native.begin(1)
    send(1)
    with pytest.raises(_native.RankLost, match="sent 48 bytes of rows instead of 192"):
        receive(4)
    ends.rows[0].native.begin(5)
    send(1)
    ends.rows[1].native.begin(4)
    with pytest.raises(_native.RankLost, match="rows of step 5 instead of 4"):
        receive(1)


def test_messages_arrive_in_order_and_wait_for_room() -> None:
    ends = Ends(LinkSizes(slot_bytes=64, slots=1))
    messages = [bytes([number]) * (1 + number % 64) for number in range(60)]

    def send_all() -> None:
        for message in messages:
            ends.messages[0].send(message)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [ends.messages[1].receive() for _ in messages] == messages
    sender.join()


def test_an_abort_ends_the_waits_of_both_ends() -> None:
    ends = Ends(LinkSizes(slot_bytes=64, slots=1))
    timer = threading.Timer(0.05, ends.groups[0].abort)
    timer.start()
    _, _, receive = program_of("recv", ends.rows[1])
    with pytest.raises(_native.RankLost):
        receive(1)
    with pytest.raises(DeviceLost):
        ends.messages[1].receive()
    with pytest.raises(DeviceLost):
        ends.messages[0].send(b"more")
    timer.join()


def test_a_rank_that_is_not_there_is_found_and_named() -> None:
    ends = Ends(LinkSizes(slot_bytes=64, slots=1), ranks=(1,))
    _, _, receive = program_of("recv", ends.rows[1])
    with pytest.raises(_native.RankLost, match="rank 0 does not respond"):
        receive(1)


def test_what_does_not_fit_is_refused() -> None:
    ends = Ends(LinkSizes(slot_bytes=WIDTH // 2 * 4 - 1, slots=1))
    _, _, send = program_of("send", ends.rows[0])
    with pytest.raises(ValueError, match="a row of 48 bytes; slots have 47"):
        send(1)
    with pytest.raises(ValueError, match="at most 64 are allowed"):
        ends.messages[0].send(bytes(65))
    with pytest.raises(ValueError, match="this end receives"):
        ends.messages[1].send(b"x")
    with pytest.raises(ValueError, match="this end of the link sends"):
        ends.messages[0].receive()
    with pytest.raises(ValueError, match="peer is 0; rank 0 of 2"):
        Link(ends.groups[0], np.zeros(4096, np.uint8), MESSAGES, peer=0, sends=True)
    with pytest.raises(ValueError, match="must be above 0"):
        LinkSizes(slot_bytes=64, slots=0).total  # noqa: B018
    program, _, run = program_of("send", ends.rows[0])
    program.set_links(None, None)
    with pytest.raises(ValueError, match="there is no link to another stage"):
        run(1)


def test_links_that_do_not_fit_the_segment_are_refused() -> None:
    segment = create_segment(2, GROUP)
    group = SharedMemoryRank(segment, rank=0, degree=2, sizes=GROUP)
    os.close(segment)
    with pytest.raises(CapacityError, match="for links between ranks cannot be used"):
        LinkMemory(
            group,
            first_byte=GROUP.total(2),
            rows=MESSAGES,
            messages=MESSAGES,
            num_rows=1 << 40,
            num_messages=0,
        )


def test_rows_between_threads_are_copies_of_the_meant_size() -> None:
    link = InProcessLink(timeout_s=0.01)
    rows, got = np.arange(8, dtype=np.uint8).reshape(2, 4), np.empty((2, 4), np.uint8)
    link.send_rows(rows)
    rows[:] = 0
    link.receive_rows(got)
    assert got.ravel().tolist() == list(range(8))
    link.send_rows(rows)
    with pytest.raises(ValueError, match=r"shape \(2, 4\) have come; \(1, 4\) are meant"):
        link.receive_rows(got[:1])
    with pytest.raises(DeviceLost, match="sends nothing"):
        link.receive_rows(got)
