"""All transports, by one contract: bytes arrive unchanged, in the order of ranks; lost ranks end
waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quire import _native
from quire.base.errors import CapacityError, DeviceLost
from quire.comm.communicator import Communicator
from quire.comm.in_process import InProcessGroup, InProcessRank
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank, create_segment
from tests.rank_threads import connected_ranks, on_all_ranks, shared_memory_ranks

SMALL = SegmentSizes(slot_bytes=64, message_bytes=64)
Make = Callable[[int], Sequence[Communicator]]


def _shared(degree: int) -> list[SharedMemoryRank]:
    return shared_memory_ranks(degree, SMALL)


def _in_process(degree: int) -> list[InProcessRank]:
    return InProcessGroup(degree).ranks()


def _connected(degree: int) -> list[SharedMemoryRank]:
    return connected_ranks(degree, SMALL)


@pytest.fixture(params=[_in_process, _shared, _connected], ids=["in process", "shared", "sockets"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes the ranks of a group."""
    made: Make = request.param
    return made


def _bytes(rank: int, size: int, turn: int) -> np.ndarray:
    return np.random.default_rng([rank, size, turn]).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_parts_arrive_unchanged_in_the_order_of_ranks(make: Make, degree: int) -> None:
    sizes = (0, 1, 63, 64, 65, 1000)  # below, at and above a slot

    def run(group: Communicator) -> None:
        for turn in range(20):
            for size in sizes:
                gathered = group.all_gather(_bytes(group.rank, size, turn))
                wanted = [_bytes(rank, size, turn) for rank in range(degree)]
                np.testing.assert_array_equal(gathered, wanted)
            group.barrier()

    on_all_ranks(make(degree), run)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_messages_of_rank_zero_arrive_in_order(make: Make, degree: int) -> None:
    def run(group: Communicator) -> list[bytes]:
        messages = [bytes([number]) * (number % 65) for number in range(100)]
        return [group.broadcast(one if group.rank == 0 else None) for one in messages]

    received = on_all_ranks(make(degree), run)
    assert all(messages == received[0] for messages in received)
    assert received[0][99] == bytes([99]) * 34


def test_an_abort_ends_the_waits_of_all_ranks(make: Make) -> None:
    groups = make(3)
    timer = threading.Timer(0.05, groups[2].abort)

    def run(group: Communicator) -> None:
        if group.rank == 2:
            timer.start()
        else:
            with pytest.raises(DeviceLost):
                group.all_gather(np.zeros(4, np.uint8))

    on_all_ranks(groups, run)
    timer.join()


@pytest.mark.parametrize(("width", "unit"), [(7, 1), (97, 32), (130, 32), (64, 16)])
def test_columns_of_many_rows_are_exchanged_in_parts(width: int, unit: int) -> None:
    own = shared_memory_ranks(2, SegmentSizes(slot_bytes=1024, message_bytes=64))
    values = np.random.default_rng(width).standard_normal((50, width)).astype(np.float32)

    def run(group: SharedMemoryRank) -> int:
        pool = _native.Pool(1)
        program = _native.Program(pool, 50 * width * 4)
        program.add_buffer(0, 0, width, 50, "f32")
        fields = {"x": (0, 0, width), "rank": group.rank, "degree": 2, "unit": unit}
        program.add_segment([("all_gather", fields)])
        program.set_group(group.native)
        units = -(-width // unit)
        edge = min(-(-units // 2) * unit, width)
        mine = slice(0, edge) if group.rank == 0 else slice(edge, width)
        data = program.array((0, 0, width), 50)
        data[:] = np.nan
        data[:, mine] = values[:, mine]
        rows = np.zeros(50, np.int32)
        inputs = dict.fromkeys(("token_ids", "positions", "rope_positions", "kv_slots"), rows)
        program.run(
            0,
            **inputs,
            seq_starts=np.array([0, 50], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            sample_rows=np.empty(0, np.int32),
        )
        np.testing.assert_array_equal(data, values)
        return group.native.received_bytes

    received = on_all_ranks(own, run)
    assert sum(received) == values.nbytes


def test_a_failing_call_after_an_abort_does_not_keep_others_from_being_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, _ = _shared(2)
    called = []

    def fail() -> None:
        raise RuntimeError("no group any more")

    first.on_abort(fail)
    first.on_abort(lambda: called.append(first.native.is_aborted))
    first.abort()
    assert called == [True]
    assert "no group any more" in capsys.readouterr().err


def test_a_rank_that_is_not_there_is_found_and_named() -> None:
    segment = create_segment(2, SMALL)
    try:
        alone = SharedMemoryRank(segment, rank=0, degree=2, sizes=SMALL)
        with pytest.raises(DeviceLost, match="rank 1 does not respond"):
            alone.barrier()
    finally:
        os.close(segment)


def test_a_rank_that_only_gets_no_processor_is_late_and_not_gone() -> None:
    """Its thread that answers is ready to run, as seen of one that never sleeps."""
    segment = create_segment(2, SMALL)
    threads = set(os.listdir("/proc/self/task"))
    try:
        here = SharedMemoryRank(segment, rank=0, degree=2, sizes=SMALL, timeout_s=1.8)
        threads |= set(os.listdir("/proc/self/task"))
        gone = SharedMemoryRank(segment, rank=1, degree=2, sizes=SMALL)
    finally:
        os.close(segment)
    (answering,) = set(os.listdir("/proc/self/task")) - threads
    words = here.memory[: len(here.memory) // 64 * 64].view(np.uint32)[::16]
    until_s = time.monotonic() + 30
    while not (places := np.flatnonzero(words == int(answering))).size:  # it has just begun
        assert time.monotonic() < until_s, "the thread has not written its number"
    del gone
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            words[places] = busy.pid
            with pytest.raises(DeviceLost, match="did not reach the same operation in time"):
                here.barrier()
        finally:
            busy.kill()
    with pytest.raises(DeviceLost, match="does not respond"):
        here.barrier()


def test_a_rank_that_responds_and_does_not_come_is_waited_for_to_a_limit() -> None:
    groups = shared_memory_ranks(2, SMALL, timeout_s=0.3)
    with pytest.raises(DeviceLost, match="rank 1 did not reach the same operation in time"):
        groups[0].barrier()


def test_what_does_not_fit_is_refused() -> None:
    groups = shared_memory_ranks(2, SMALL)
    with pytest.raises(ValueError, match="at most 64 are allowed"):
        groups[0].broadcast(bytes(65))
    with pytest.raises(ValueError, match="rank 0 sends"):
        groups[1].broadcast(b"x")
    with pytest.raises(ValueError, match="receives none"):
        groups[0].broadcast(None)
    with pytest.raises(ValueError, match="not \\[members, bytes of own\\]"):
        groups[0].native.all_gather(np.zeros(3, np.uint8), np.zeros((2, 4), np.uint8))
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        _native.RankGroup(
            np.zeros(SMALL.total(2), np.uint8),
            rank=2,
            degree=2,
            slot_bytes=64,
            message_bytes=64,
            timeout_s=1.0,
        )


def test_a_segment_that_does_not_fit_into_memory_is_refused() -> None:
    sizes = SegmentSizes(slot_bytes=1 << 58, message_bytes=64)
    with pytest.raises(CapacityError, match="for 2 ranks cannot be made"):
        shared_memory_ranks(2, sizes)
