"""Limits of the operating system on this process (ulimit), and the errors that name them.

Files that a process must open, and memory that it cannot get, end libraries by an abort or a bare
MemoryError; here they are found before, or explained after.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from quire.base.errors import CapacityError, SettingError

# A server opens some 40 files before the first connection, each of its processes about as many.
MIN_OPEN_FILES = 64
_ADVISED_OPEN_FILES = 4096
MAX_OPEN_FILES = 65_536
# Address space with which libraries load, and with which a small model runs: both count the stacks
# of threads, which are mostly not used. Below the first, libraries abort the process.
MIN_ADDRESS_SPACE = 448 << 20
_SMALL_MODEL = "1 GiB"
_RAISE = (
    "Raise the limit, as in `ulimit -v unlimited`; MemoryMax= of systemd or docker run --memory "
    "limit the memory that is really used"
)


def check_open_files() -> None:
    """Raise SettingError where the limit on open files is too low to start an engine process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return
    more = _ADVISED_OPEN_FILES
    if MIN_OPEN_FILES < hard < more:
        more = hard  # more needs root
    raise SettingError(
        f"this process may open {soft} files (RLIMIT_NOFILE), and at least {MIN_OPEN_FILES} are "
        "needed, with one more for each connection; raise the limit before the start, as in "
        f"`ulimit -n {more}`, or with LimitNOFILE= in a systemd unit"
    )


def raise_open_files() -> None:
    """Allow this process as many open files as it may allow itself, and 65,536 at most: login
    shells and systemd set 1,024, of which each stream of a router takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # such as in a sandbox that forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_address_space() -> None:
    """Raise CapacityError where the limit on address space is too low for any model."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < MIN_ADDRESS_SPACE:
        raise CapacityError(
            f"{_limit_text(soft)}; at least {_mib(MIN_ADDRESS_SPACE)} MiB are needed to start, and "
            f"{_SMALL_MODEL} for a small model. {_RAISE}"
        )


def address_space_left(root: Path = Path("/")) -> int | None:
    """Return the bytes of address space that this process may still take, None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(soft - _address_space_taken(root), 0)


def out_of_memory() -> CapacityError:
    """Return the error for memory that could not be allocated; names the limit that is set."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return CapacityError(
            "memory could not be allocated, and no limit on address space is set; stop other "
            "programs, raise the container's memory limit, take a smaller model (quire plan MODEL "
            "says what one needs), or lower --kv-cache-memory"
        )
    taken = _address_space_taken(Path("/"))
    return CapacityError(
        f"memory could not be allocated: {_limit_text(soft)}, of which {_mib(taken)} MiB are "
        f"taken; a small model needs {_SMALL_MODEL}, others more by their size. {_RAISE}"
    )


def _limit_text(soft: int) -> str:
    return (
        f"this process may take {_mib(soft)} MiB of address space (RLIMIT_AS, `ulimit -v "
        f"{soft >> 10}`)"
    )


def _address_space_taken(root: Path) -> int:
    try:
        pages = int((root / "proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()


def _mib(num_bytes: int) -> int:
    return num_bytes >> 20
