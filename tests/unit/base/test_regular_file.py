"""Only regular files are read, up to a size limit, and without blocking."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.base.regular_file import is_present, open_regular, read_regular


def test_a_regular_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", limit_bytes=7) == b"content"


def test_bytes_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 1 << 40)  # sparse: reading it would take all memory
    with pytest.raises(OSError, match="it has 1099511627776 bytes; at most 100 are allowed"):
        read_regular(tmp_path / "file", limit_bytes=100)


def test_memory_is_taken_for_the_content_not_for_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file", limit_bytes=1 << 50) == b"content"
    assert len(read_regular(Path("/proc/self/status"), limit_bytes=1 << 50)) > 100


def test_a_file_without_a_size_is_bounded_too() -> None:
    with pytest.raises(OSError, match="it has 2 bytes; at most 1 are allowed"):
        read_regular(Path("/proc/self/status"), limit_bytes=1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("fifo", "a FIFO"), ("directory", "a directory"), ("device", "a character device")],
)
def test_other_kinds_of_files_are_named_and_not_waited_for(
    tmp_path: Path, kind: str, words: str
) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert is_present(path)
    with pytest.raises(OSError, match=f"it is {words}; a regular file must be there"):
        open_regular(path)


def test_a_missing_file_and_a_dangling_link_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert is_present(tmp_path / "link")
    assert not is_present(tmp_path / "nothing")
    assert not is_present(tmp_path / ("n" * 300))
    assert not is_present(Path("\0"))
