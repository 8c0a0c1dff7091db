"""Shared memory of two engines: what is mapped is what was made, and nothing else."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from quire.transfer.links.messages import Segment
from quire.transfer.links.shared_memory import (
    KEEP_S,
    LOOK_S,
    PAGE,
    MappedSegment,
    MappedSegments,
    OwnSegment,
)


def test_bytes_are_those_of_the_other_side() -> None:
    own = OwnSegment(10_000)
    own.memory[:] = np.arange(10_000) % 251
    mapped = MappedSegment(own.message())
    assert np.array_equal(mapped.view(100, 900), own.memory[100:1000])
    own.memory[200] ^= 1
    assert np.array_equal(mapped.view(100, 900), own.memory[100:1000])
    assert not mapped.view(0, 10).flags.writeable
    for offset, num_bytes in ((-1, 10), (9_991, 10), (1 << 60, 1), (0, 10_001)):
        with pytest.raises(OSError, match="beyond"):
            mapped.view(offset, num_bytes)
    mapped.close()
    own.close()


def test_what_another_process_may_not_be_is_refused() -> None:
    """Of descriptors that the other side names: another secret, size, a pipe, none, a file."""
    own = OwnSegment(5_000)
    message = own.message()
    reading, writing = os.pipe()
    plain = os.memfd_create("plain")
    os.ftruncate(plain, message.num_bytes)
    os.pwrite(plain, message.secret, 0)
    changes = (
        {"secret": b"x" * 32},
        {"num_bytes": message.num_bytes - PAGE},
        {"num_bytes": 0},
        {"descriptor": reading},
        {"descriptor": plain},  # which could be cut while it is read
        {"descriptor": 1 << 30},
        {"process_id": (1 << 32) - 1},
    )
    for change in changes:
        wrong: Segment = replace(message, **change)  # type: ignore[arg-type]
        with pytest.raises(OSError, match=r"."):
            MappedSegment(wrong)
    for descriptor in (reading, writing, plain):
        os.close(descriptor)
    MappedSegment(message).close()
    own.close()


def test_a_segment_keeps_its_size() -> None:
    own = OwnSegment(5_000)
    with pytest.raises(PermissionError):
        os.ftruncate(own.message().descriptor, 100)
    own.close()


def test_a_mapping_is_kept_for_the_next_reader_and_not_for_long() -> None:
    now_s = [0.0]
    own, other = OwnSegment(5_000), OwnSegment(5_000)
    own.memory[:] = 7
    segments = MappedSegments(lambda: now_s[0])
    first, second = segments.open(own.message()), segments.open(own.message())
    assert len(segments) == 1
    first.close()
    now_s[0] = KEEP_S
    assert segments.forget_unread() is None  # it has a reader
    assert second.view(4_990, 10).tolist() == [7] * 10
    second.close()
    segments.open(other.message()).close()
    assert segments.forget_unread() == LOOK_S
    now_s[0] += KEEP_S / 2
    again = segments.open(own.message())
    now_s[0] += KEEP_S / 2
    assert segments.forget_unread() is None
    assert len(segments) == 1  # the other one is gone
    again.close()
    assert segments.forget_unread() == LOOK_S
    own.close()  # as when its process ends
    assert segments.forget_unread() is None
    assert len(segments) == 0
    other.close()
    with pytest.raises(OSError, match=r"."):
        segments.open(own.message())
    assert segments.forget_unread() is None


def test_a_reader_that_ends_unmaps_what_is_due_of_others() -> None:
    now_s = [0.0]
    segments = MappedSegments(lambda: now_s[0])
    made = [OwnSegment(5_000), OwnSegment(5_000)]
    first, second = (segments.open(own.message()) for own in made)
    first.close()
    now_s[0] = 2 * KEEP_S
    second.close()  # no thread waits for a job, which would unmap the first
    assert len(segments) == 1
    for own in made:
        own.close()


def test_a_reader_closes_once_and_reads_nothing_after_that() -> None:
    segments, own = MappedSegments(), OwnSegment(5_000)
    first, second = segments.open(own.message()), segments.open(own.message())
    for _ in range(2):
        first.close()
    assert len(second.view(0, 10)) == 10
    with pytest.raises(OSError, match="closed"):
        first.view(0, 10)
    segments.close()
    assert not len(segments)
    with pytest.raises(OSError, match="beyond"):
        second.view(0, 10)
    second.close()
    with pytest.raises(OSError, match="the engine ends"):
        segments.open(own.message())
    own.close()


def test_mappings_without_a_reader_hold_no_descriptors() -> None:
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    segments = MappedSegments()
    before = num_descriptors()
    for _ in range(5):
        own = OwnSegment(5_000)
        segments.open(own.message()).close()
        own.close()
        segments.forget_unread()
        del own  # and its own mapping
    assert num_descriptors() == before
