"""Huge pages for memory that ranks share: fewer misses of address translation in an exchange.

Reserved pages (hugetlb) are taken where enough are free, else transparent ones are asked for, which
the system may grant for shared memory or not; usual pages are as right, and a little slower. Knows
no rank. Always holds: what is returned can be written to its end, with no error later for a page
that lacks (a limit of the control group on reserved pages would otherwise be a SIGBUS).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
SHARED_MODE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_REFUSED = ("never", "deny")


# Lets the calling thread run near what uses memory, by a number of it: the system takes a page of
# the NUMA node that the thread runs on, where one is reserved there.
Near = Callable[[int], AbstractContextManager[None]]


def anywhere(number: int) -> AbstractContextManager[None]:
    """Stay where this thread runs."""
    return nullcontext()


def reserved_file(name: str, num_bytes: int, *, near: Near = anywhere) -> int | None:
    """Return the descriptor of a zero-filled file in reserved huge pages, of at least num_bytes, or
    None where the system does not give so many. The caller closes it. near: what uses the page at
    a byte."""
    if not hasattr(os, "MFD_HUGETLB") or num_bytes < HUGE_PAGE_BYTES:
        return None
    flags = os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB
    descriptor = -1
    try:
        descriptor = os.memfd_create(name, flags)
        num_pages = -(-num_bytes // HUGE_PAGE_BYTES)
        os.ftruncate(descriptor, num_pages * HUGE_PAGE_BYTES)
        with mmap.mmap(descriptor, 0) as memory:
            for first_byte in range(0, num_pages * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES):
                with near(first_byte):
                    memory.madvise(_MADV_POPULATE_WRITE, first_byte, HUGE_PAGE_BYTES)
    except (OSError, ValueError):
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def advise(memory: mmap.mmap) -> None:
    """Ask for transparent huge pages; a system that refuses leaves the memory as it is."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def pages_of(descriptor: int, *, mode: Path = SHARED_MODE) -> str:
    """Return in words which pages a file in memory has: reserved, transparent or usual ones."""
    if os.fstatvfs(descriptor).f_bsize >= HUGE_PAGE_BYTES:
        return "2 MiB, reserved"
    try:
        chosen = mode.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = ""
    is_small = os.fstat(descriptor).st_size < HUGE_PAGE_BYTES
    if not chosen or chosen in _REFUSED or is_small:
        return f"{mmap.PAGESIZE >> 10} KiB"
    return "2 MiB, transparent"
