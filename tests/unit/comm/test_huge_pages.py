"""Segments in huge pages where the system gives some, and in usual ones, without an error, where it
gives none or gives them at first only."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.comm import huge_pages
from quire.comm.huge_pages import HUGE_PAGE_BYTES, advise, pages_of, reserved_file
from quire.comm.shared_memory import SegmentSizes, create_segment
from tests.rank_threads import on_all_ranks, shared_memory_ranks

FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
LARGE = SegmentSizes(slot_bytes=1 << 20, message_bytes=1 << 20)


def free_pages() -> int:
    """Return how many reserved huge pages are free here."""
    return int(FREE.read_text()) if FREE.exists() else 0


def open_files() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_is_made_whatever_pages_there_are() -> None:
    groups = shared_memory_ranks(2, LARGE)
    assert {group.pages for group in groups} <= {"2 MiB, reserved", "2 MiB, transparent", "4 KiB"}
    assert len(groups[0].memory) >= LARGE.total(2)
    gathered = on_all_ranks(groups, lambda group: group.all_gather(np.full(9, group.rank, "u1")))
    assert [part.tolist() for part in gathered] == [[[0] * 9, [1] * 9]] * 2


@pytest.mark.skipif(free_pages() < 4, reason="no reserved huge pages are free here")
def test_reserved_pages_are_taken_where_they_are_free() -> None:
    descriptor = create_segment(2, LARGE)
    try:
        assert pages_of(descriptor) == "2 MiB, reserved"
        assert os.fstat(descriptor).st_size % HUGE_PAGE_BYTES == 0
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("where", ["file", "size", "pages"])
def test_a_system_that_gives_no_reserved_pages_gives_usual_ones(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It may say so when the file is made or sized, or only when a page is first written: that of
    a control group's limit."""
    made = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        if where == "file" and flags & os.MFD_HUGETLB:
            raise OSError(errno.EINVAL, "no huge pages in this kernel")
        return made(name, flags & ~(os.MFD_HUGETLB | os.MFD_HUGE_2MB))

    class Mapped(mmap.mmap):
        def madvise(self, option: int, *_: Any) -> None:
            if where == "pages" and option == huge_pages._MADV_POPULATE_WRITE:
                raise OSError(errno.EFAULT, "a page cannot be had")

    def ftruncate(descriptor: int, num_bytes: int) -> None:
        if where == "size" and num_bytes % HUGE_PAGE_BYTES == 0:
            raise OSError(errno.ENOMEM, "no room")
        sized(descriptor, num_bytes)

    sized = os.ftruncate
    monkeypatch.setattr(os, "memfd_create", memfd_create)
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    monkeypatch.setattr(mmap, "mmap", Mapped)
    before = open_files()
    assert reserved_file("quire-test", 3 * HUGE_PAGE_BYTES) is None
    descriptor = create_segment(2, LARGE, link_bytes=64)
    try:
        assert os.fstat(descriptor).st_size == LARGE.total(2) + 64
        assert open_files() == before + 1
    finally:
        os.close(descriptor)


def test_each_page_is_written_once_near_the_rank_that_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks have two slots of a mebibyte each; messages and links are behind these."""
    made, here, written = os.memfd_create, list[int](), list[tuple[int, int, int]]()

    class Mapped(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            assert option == huge_pages._MADV_POPULATE_WRITE
            written.append((here[-1], start, length))

    @contextmanager
    def near(rank: int) -> Iterator[None]:
        here.append(rank)
        yield
        here.pop()

    def memfd_create(name: str, flags: int) -> int:
        return made(name, flags & ~(os.MFD_HUGETLB | os.MFD_HUGE_2MB))

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    monkeypatch.setattr(mmap, "mmap", Mapped)
    descriptor = create_segment(3, LARGE, link_bytes=HUGE_PAGE_BYTES, near=near)
    num_bytes = os.fstat(descriptor).st_size
    os.close(descriptor)
    pages = range(0, num_bytes, HUGE_PAGE_BYTES)
    assert [(start, length) for _, start, length in written] == [
        (start, HUGE_PAGE_BYTES) for start in pages
    ]
    assert num_bytes > 5 * HUGE_PAGE_BYTES
    assert [rank for rank, _, _ in written] == [0, 1, 2] + [0] * (len(pages) - 3)


def test_small_segments_take_no_huge_page() -> None:
    assert reserved_file("quire-test", HUGE_PAGE_BYTES - 1) is None


@pytest.mark.parametrize(
    ("mode", "pages"),
    [
        ("always within_size [advise] never deny force", "2 MiB, transparent"),
        ("[always] within_size advise never deny force", "2 MiB, transparent"),
        ("always within_size advise [never] deny force", f"{mmap.PAGESIZE >> 10} KiB"),
        ("always within_size advise never [deny] force", f"{mmap.PAGESIZE >> 10} KiB"),
        ("", f"{mmap.PAGESIZE >> 10} KiB"),
    ],
)
def test_pages_are_named_by_what_the_system_grants(tmp_path: Path, mode: str, pages: str) -> None:
    file = tmp_path / "shmem_enabled"
    if mode:
        file.write_text(mode + "\n")
    descriptor = os.memfd_create("quire-test")
    os.ftruncate(descriptor, HUGE_PAGE_BYTES)
    assert pages_of(descriptor, mode=file) == pages
    os.ftruncate(descriptor, HUGE_PAGE_BYTES - 1)
    assert pages_of(descriptor, mode=file) == f"{mmap.PAGESIZE >> 10} KiB"
    os.close(descriptor)


def test_advice_that_is_refused_changes_nothing() -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "not for this mapping")

    memory = Refusing(-1, mmap.PAGESIZE)
    advise(memory)
    memory[:1] = b"x"
    assert memory[:2] == b"x\0"
