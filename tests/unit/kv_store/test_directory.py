"""A store in a directory: values are whole or missing, whatever other processes do to the files."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.kv_store import directory_files
from quire.kv_store.directory import DirectoryStore
from quire.kv_store.directory_files import BLOCKS, CLAIMS, KEY, PARTIAL, StoreFiles
from quire.kv_store.eviction import PARTIAL_NS, SHARES, file_bytes
from quire.kv_store.shared_store import CLAIM_LEASE_S

SIZE = 4096
HOUR_S = 3600


def opened(path: Path, max_bytes: int = 1 << 30) -> DirectoryStore:
    return DirectoryStore(StoreFiles(path), max_bytes=max_bytes)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def value(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def put(store: DirectoryStore, *numbers: int) -> list[bool]:
    values = [(memoryview(value(one)[:10]), memoryview(value(one)[10:])) for one in numbers]
    return store.put([key(one) for one in numbers], values)


def got(store: DirectoryStore, number: int) -> bytes | int | None:
    """Return a value, the size of one of another size, or None."""
    head, rest = bytearray(10), bytearray(SIZE - 10)
    (size,) = store.get([key(number)], [(memoryview(head), memoryview(rest))])
    return bytes(head + rest) if size == SIZE else size


def file_of(path: Path, number: int) -> Path:
    name = key(number).hex()
    return path / BLOCKS / name[:2] / name


def age(path: Path, seconds: float) -> None:
    then_s = time.time() - seconds
    os.utime(path, (then_s, then_s))


def numbers_in(path: Path) -> list[int]:
    return sorted(int(file.name, 16) for file in (path / BLOCKS).glob("*/*"))


def test_values_are_found_by_every_process_that_has_the_directory(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "kv"), opened(tmp_path / "kv")
    assert put(one, 1, 2) == [True, True]
    assert other.exists([key(1), key(3), key(2)]) == [True, False, True]
    assert got(other, 2) == value(2)
    assert got(other, 3) is None
    other.remove(key(2))
    other.remove(key(2))
    assert got(one, 2) is None
    assert StoreFiles(tmp_path / "kv").hash_key == StoreFiles(tmp_path / "kv").hash_key
    assert not list((tmp_path / "kv" / PARTIAL).iterdir())


def test_a_value_of_another_size_is_told_apart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    with file_of(tmp_path, 1).open("r+b") as file:
        file.truncate(100)
    assert got(store, 1) == 100
    assert put(store, 1) == [True]  # a cut file is replaced
    assert got(store, 1) == value(1)


def test_nothing_is_reached_through_links(tmp_path: Path) -> None:
    store, secret = opened(tmp_path / "kv"), tmp_path / "secret"
    secret.write_bytes(value(1))
    put(store, 1, 2)
    file_of(tmp_path / "kv", 1).unlink()
    file_of(tmp_path / "kv", 1).symlink_to(secret)
    assert got(store, 1) is None
    assert store.exists([key(1)]) == [False]
    assert put(store, 1) == [True]
    assert not file_of(tmp_path / "kv", 1).is_symlink()
    assert secret.read_bytes() == value(1)

    shard = file_of(tmp_path / "kv", 2).parent
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert got(store, 2) is None
    with pytest.raises(OSError, match="Not a directory"):
        put(store, 2)


def test_what_is_no_file_is_no_value(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    file_of(tmp_path, 2).parent.mkdir(exist_ok=True)
    file_of(tmp_path, 2).mkdir()
    os.mkfifo(file_of(tmp_path, 3))
    assert [got(store, 2), got(store, 3)] == [None, None]
    assert store.exists([key(2), key(3)]) == [False, False]
    # Which is no failure of the store: other values are stored and found.
    (file_of(tmp_path, 2) / "what another program keeps there").touch()
    store.remove(key(2))
    assert put(store, 2, 3, 4) == [False, True, True]
    assert [got(store, at) for at in (2, 3, 4)] == [None, value(3), value(4)]
    assert not list((tmp_path / PARTIAL).iterdir())


def test_directories_that_are_removed_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    assert store.claim(key(1), b"one")
    for name in (BLOCKS, CLAIMS, PARTIAL):
        shutil.rmtree(tmp_path / name)
    store.renew(key(1), b"one")
    store.release(key(1), b"one")
    assert store.claims([]) == []
    assert put(store, 1) == [True]
    assert store.claim(key(1), b"one")
    rename, removed = os.rename, iter((BLOCKS,))

    def remove_first(*arguments: Any, **folders: Any) -> None:
        for name in removed:  # once, between the making of a directory and its use
            shutil.rmtree(tmp_path / name)
        rename(*arguments, **folders)

    monkeypatch.setattr(os, "rename", remove_first)
    assert put(store, 2) == [True]
    assert numbers_in(tmp_path) == [2]


def test_files_that_others_may_write_are_not_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    file_of(tmp_path, 1).chmod(0o666)
    assert got(store, 1) == -1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "photo.jpg").touch(), "photo.jpg"),
        (lambda path: path.chmod(0o777), "others may write"),
        (lambda path: (path / KEY).write_bytes(b"something else"), "not what a store writes"),
        (lambda path: (path / KEY).chmod(0o644), "chmod 600"),
        (lambda path: (path / KEY).write_bytes(b"QuireSKy"), "not what a store writes"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: object, words: str
) -> None:
    monkeypatch.setattr(directory_files, "_KEY_PAUSE_S", 0.0)
    path = tmp_path / "kv"
    StoreFiles(path).close()
    assert callable(spoil)
    spoil(path)
    with pytest.raises(SettingError, match=words):
        StoreFiles(path)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    with pytest.raises(SettingError, match="cannot be used as a store"):
        StoreFiles(tmp_path / "kv")


def test_a_directory_that_another_process_makes_meanwhile_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make = tmp_path / "store", Path.mkdir

    def make_second(one: Path, **options: Any) -> None:
        make(one)
        make(one, **options)

    monkeypatch.setattr(Path, "mkdir", make_second)
    StoreFiles(path).close()


def test_the_least_recently_used_give_way(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=10 * SIZE)
    put(store, *range(10))
    for number in range(10):
        age(file_of(tmp_path, number), HOUR_S * (10 - number))
    assert got(store, 0) == value(0)  # the oldest, and now the youngest
    put(store, 10)
    assert numbers_in(tmp_path) == [0, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_value_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=SIZE - 1)
    assert put(store, 1) == [False]


def test_several_processes_keep_the_limit(tmp_path: Path) -> None:
    StoreFiles(tmp_path / "kv").close()
    program = """
import sys
from pathlib import Path
from quire.kv_store.directory import DirectoryStore
from quire.kv_store.directory_files import StoreFiles
store = DirectoryStore(StoreFiles(Path(sys.argv[1])), max_bytes=64 * 4096)
for number in range(150):
    key = (1000 * int(sys.argv[2]) + number).to_bytes(16, "big")
    assert store.put([key], [(memoryview(bytes(4096)),)]) == [True]
    (size,) = store.get([key], [(memoryview(bytearray(4096)),)])
    assert size in (4096, None), size
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "kv"), str(number)])
        for number in range(3)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    # Of 450 entries; a process that is slow to evict lets the others write meanwhile.
    assert 30 <= len(numbers_in(tmp_path / "kv")) <= 64 + 3 * 64 // SHARES + 32


def test_a_reader_keeps_what_is_evicted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, 1)
    read = os.readv

    def evicted_first(descriptor: int, buffers: Sequence[memoryview]) -> int:
        file_of(tmp_path, 1).unlink(missing_ok=True)
        return read(descriptor, buffers)

    monkeypatch.setattr(os, "readv", evicted_first)
    assert got(store, 1) == value(1)
    assert got(store, 1) is None


def test_a_full_disk_stores_nothing_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, *range(20))
    write = os.writev

    def full(descriptor: int, buffers: Sequence[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    assert put(store, 20) == [False]
    assert not list((tmp_path / PARTIAL).iterdir())
    assert len(numbers_in(tmp_path)) < 20
    monkeypatch.setattr(os, "writev", write)
    assert put(store, 20) == [True]


def test_a_read_only_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(opened(tmp_path), 1)

    def refused(self: StoreFiles) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(StoreFiles, "lock", refused)
    store = opened(tmp_path)
    assert not store.can_write
    assert got(store, 1) == value(1)
    assert put(store, 2) == [False]
    assert not store.claim(key(1), b"mine")
    with pytest.raises(SettingError, match="read-only and holds no store"):
        StoreFiles(tmp_path / "other")


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=8 * SIZE)
    put(store, 1)
    left, young = tmp_path / PARTIAL / "left", tmp_path / PARTIAL / "young"
    left.write_bytes(bytes(SIZE))
    young.write_bytes(bytes(SIZE))
    age(left, PARTIAL_NS / 1e9 + 60)
    put(store, 2)
    assert not left.exists()
    assert young.exists()


def test_a_writer_that_is_killed_leaves_no_half_value(tmp_path: Path) -> None:
    store = opened(tmp_path)
    program = """
import os, signal, sys
from pathlib import Path
from quire.kv_store.directory import DirectoryStore
from quire.kv_store.directory_files import StoreFiles
store = DirectoryStore(StoreFiles(Path(sys.argv[1])), max_bytes=1 << 30)
write = os.writev
def half(descriptor, buffers):
    os.write(descriptor, buffers[0][: len(buffers[0]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
os.writev = half
store.put([(1).to_bytes(16, "big")], [(memoryview(bytes(4096)),)])
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert got(store, 1) is None
    assert len(list((tmp_path / PARTIAL).iterdir())) == 1
    assert put(store, 1) == [True]


def test_a_claim_is_one_engines_until_it_ends_or_dies(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.claim(key(1), b"one")
    assert not other.claim(key(1), b"other")
    assert other.claims([]) == [b"one"]
    other.release(key(1), b"other")
    assert other.claims([]) == [b"one"]
    file = tmp_path / CLAIMS / key(1).hex()
    age(file, CLAIM_LEASE_S - 2)
    assert other.claims([]) == [b"one"]
    one.renew(key(1), b"one")
    age(file, CLAIM_LEASE_S + 2)  # its engine was killed
    assert other.claims([]) == []
    assert other.claim(key(1), b"other")
    assert one.claims([]) == [b"other"]
    one.renew(key(1), b"one")  # it lives after all, and is no more the holder
    one.release(key(1), b"one")
    assert one.claims([]) == [b"other"]
    other.release(key(1), b"other")
    assert one.claims([]) == []


def test_a_page_is_the_least_a_file_takes() -> None:
    assert [file_bytes(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_without_hard_links_a_claim_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.claim(key(1), b"one")
    assert not other.claim(key(1), b"other")
    assert other.claims([]) == [b"one"]
    assert not list((tmp_path / PARTIAL).iterdir())
