"""A disk tier: saved blocks are found again, also after a restart; incomplete ones are not."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.transfer.disk import DiskStore
from quire.transfer.folder import TierFolder
from quire.transfer.segment import ENTRY_BYTES, PAGE, Segment, segment_bytes, stride_of

BLOCK_BYTES = 5000  # no multiple of a page
PER_SEGMENT = 4


def raw(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return a block's bytes, different for each number."""
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def opened(path: Path, *, segments: int = 3, fingerprint: bytes = b"one") -> DiskStore:
    whole = segment_bytes(PER_SEGMENT, BLOCK_BYTES)
    return DiskStore(
        TierFolder(path),
        max_bytes=segments * whole,
        block_bytes=BLOCK_BYTES,
        fingerprint=fingerprint,
        max_segment_bytes=whole,
    )


def found(store: DiskStore, number: int, place: int) -> bool:
    out = np.zeros(BLOCK_BYTES, np.uint8)
    if not store.fetch(place, digest(number), out):
        return False
    assert np.array_equal(out, raw(number)), "other bytes than were saved"
    return True


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 16]))


def block_at(block: int) -> int:
    """Return the offset of a block in a segment."""
    return segment_bytes(PER_SEGMENT, BLOCK_BYTES) - (PER_SEGMENT - block) * stride_of(BLOCK_BYTES)


def test_saved_blocks_are_loaded_and_found_after_a_restart_oldest_first(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    assert store.num_blocks == 12
    assert store.held() == []
    places = [7, 0, 3, 11]
    for number, place in enumerate(places):
        store.save(place, digest(number), raw(number))
    store.expect([0, 3, 4, 7, 11])
    assert all(found(store, number, place) for number, place in enumerate(places))
    key = store._folder.hash_key
    store.close()
    again = opened(tmp_path)
    assert again._folder.hash_key == key
    assert list(again.held()) == [(digest(number), place) for number, place in enumerate(places)]
    assert all(found(again, number, place) for number, place in enumerate(places))
    again.save(0, digest(9), raw(9))
    assert found(again, 9, 0)
    assert not found(again, 1, 0)
    again.close()


def test_a_digest_saved_twice_is_in_its_last_place(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.save(1, digest(5), raw(5))
    store.save(6, digest(5), raw(5))
    store.close()
    again = opened(tmp_path)
    assert list(again.held()) == [(digest(5), 6)]
    again.close()


@pytest.mark.parametrize("at", [block_at(2), block_at(2) + BLOCK_BYTES - 1, PAGE + 2 * ENTRY_BYTES])
def test_a_flipped_byte_is_detected_and_the_block_dropped(tmp_path: Path, at: int) -> None:
    store = opened(tmp_path)
    for place in range(4):
        store.save(place, digest(place), raw(place))
    flip(tmp_path / "quire-tier-0000.kv", at)
    assert not found(store, 2, 2)
    assert all(found(store, number, number) for number in (0, 1, 3))
    store.close()
    again = opened(tmp_path)
    assert [place for _, place in again.held()] == [0, 1, 3]
    again.close()


def test_an_interrupted_save_leaves_nothing_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save(1, digest(1), raw(1))
    pwrite, sizes = os.pwrite, []

    def dies(descriptor: int, content: bytes, at: int) -> int:
        sizes.append(len(content))
        if len(content) == BLOCK_BYTES:
            pwrite(descriptor, content[:3000], at)
            raise OSError(errno.EIO, "power was lost")
        return pwrite(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", dies)
    with pytest.raises(OSError, match="power was lost"):
        store.save(1, digest(2), raw(2))
    monkeypatch.undo()
    assert sizes[0] == ENTRY_BYTES, "the entry is wiped before the bytes are written"
    assert not found(store, 1, 1)
    assert not found(store, 2, 1)
    store.close()
    again = opened(tmp_path)
    assert again.held() == []
    again.close()


def test_blocks_of_another_fingerprint_are_never_read_and_are_replaced(tmp_path: Path) -> None:
    store = opened(tmp_path, fingerprint=b"one")
    for place in range(12):
        store.save(place, digest(place), raw(place))
    store.close()
    other = opened(tmp_path, fingerprint=b"two")
    assert other.held() == []
    assert not found(other, 0, 0)
    other.save(0, digest(20), raw(20))
    other.save(8, digest(21), raw(21))
    files = list(tmp_path.glob("*.kv"))
    assert sum(file.stat().st_size for file in files) <= 3 * segment_bytes(4, BLOCK_BYTES)
    other.close()
    first = opened(tmp_path, fingerprint=b"one")
    assert sorted(place for _, place in first.held()) == [4, 5, 6, 7]
    first.close()


def test_a_smaller_tier_deletes_segments_beyond_it(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for place in range(12):
        store.save(place, digest(place), raw(place))
    store.close()
    small = opened(tmp_path, segments=1)
    assert [place for _, place in small.held()] == [0, 1, 2, 3]
    assert [file.name for file in tmp_path.glob("*.kv")] == ["quire-tier-0000.kv"]
    small.close()


def test_a_truncated_file_or_one_writable_by_others_is_not_used(tmp_path: Path) -> None:
    for spoil in (lambda file: os.truncate(file, 6000), lambda file: file.chmod(0o666)):
        store = opened(tmp_path)
        store.clear()
        store.save(0, digest(0), raw(0))
        store.close()
        spoil(tmp_path / "quire-tier-0000.kv")
        again = opened(tmp_path)
        assert again.held() == []
        again.save(0, digest(1), raw(1))
        assert found(again, 1, 0)
        again.close()


def test_a_file_that_shrinks_during_use_is_an_error_not_a_crash(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.save(2, digest(2), raw(2))
    os.truncate(tmp_path / "quire-tier-0000.kv", block_at(2) + 100)
    with pytest.raises(OSError, match="ends before the block"):
        found(store, 2, 2)
    store.close()


def test_read_ahead_blocks_are_not_returned_once_changed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for place in range(4):
        store.save(place, digest(place), raw(place))
    store.expect([0, 1, 2, 3])
    store.save(1, digest(8), raw(8))
    assert found(store, 0, 0)
    assert found(store, 8, 1)
    store.clear()
    assert not found(store, 2, 2)
    assert not found(store, 3, 3)
    store.close()


def nothing_cached(
    monkeypatch: pytest.MonkeyPatch, *, direct_error: int | None = None
) -> Counter[bool]:
    """Simulate an empty page cache and failing direct reads; count plain (False) and direct (True)
    reads of blocks.
    """
    preadv, reads = os.preadv, Counter[bool]()

    def asked(descriptor: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "not there")
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        reads[is_direct] += 1
        if is_direct and direct_error is not None:
            raise OSError(direct_error, "asked past the page cache")
        return preadv(descriptor, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", asked)
    return reads


def test_blocks_outside_the_page_cache_are_read_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    for place in range(4):
        store.save(place, digest(place), raw(place))
    if store._segments[0]._direct is None:
        pytest.skip("this file system has no direct reads")
    reads = nothing_cached(monkeypatch)
    store.expect([0, 1, 2])
    assert all(found(store, place, place) for place in range(4))
    assert reads == {True: 4}
    store.close()


def test_a_file_system_with_stricter_alignment_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    for place in range(3):
        store.save(place, digest(place), raw(place))
    if store._segments[0]._direct is None:
        pytest.skip("this file system has no direct reads")
    reads = nothing_cached(monkeypatch, direct_error=errno.EINVAL)
    assert all(found(store, place, place) for place in range(3))
    assert reads == {True: 1, False: 3}
    store.close()


def test_a_file_system_without_direct_reads_is_read_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def opens(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such flag here")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", opens)
    store = opened(tmp_path)
    store.save(2, digest(2), raw(2))
    reads = nothing_cached(monkeypatch)
    assert found(store, 2, 2)
    assert reads == {False: 1}
    store.close()


def test_a_disk_error_in_a_read_ahead_is_an_error_of_the_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save(1, digest(1), raw(1))

    def gone(*_: object) -> int:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "preadv", gone)
    store.expect([1])
    with pytest.raises(OSError, match="disk is gone"):
        found(store, 1, 1)
    monkeypatch.undo()
    assert found(store, 1, 1)
    store.close()


def test_cleared_blocks_are_not_found_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.save(0, digest(0), raw(0))
    store.clear()
    assert not found(store, 0, 0)
    store.close()
    again = opened(tmp_path)
    assert again.held() == []
    again.close()


def test_a_second_process_on_a_directory_gets_the_first_ones_id(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(SettingError, match=rf"in use by another engine \(process {os.getpid()}\)"):
        TierFolder(tmp_path)
    code = (
        "from pathlib import Path\n"
        "from quire.base.errors import SettingError\n"
        "from quire.transfer.folder import TierFolder\n"
        f"try: TierFolder(Path({str(tmp_path)!r}))\n"
        "except SettingError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"process {os.getpid()}" in said.stdout
    store.close()
    TierFolder(tmp_path).close()


def test_unusable_directories_are_rejected_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(SettingError, match="cannot be used as a tier"):
        TierFolder(file)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(SettingError, match="others may write to it"):
        TierFolder(shared)
    real_open = os.open

    def read_only(path: Path, flags: int, *more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(SettingError, match="Read-only file system"):
        TierFolder(tmp_path / "fresh")


def test_a_tier_too_small_for_a_block_reports_the_block_size(tmp_path: Path) -> None:
    folder = TierFolder(tmp_path)
    with pytest.raises(SettingError, match="a block takes 16384 bytes"):
        DiskStore(folder, max_bytes=5000, block_bytes=BLOCK_BYTES, fingerprint=b"one")
    store = DiskStore(folder, max_bytes=16384, block_bytes=BLOCK_BYTES, fingerprint=b"one")
    assert store.num_blocks == 1
    store.close()


def test_a_full_disk_is_detected_when_a_segment_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save(0, digest(0), raw(0))

    def full(descriptor: int, at: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(5, digest(5), raw(5))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "quire-tier-0000.kv",
        "quire-tier.key",
        "quire-tier.lock",
    ]
    assert found(store, 0, 0)
    store.close()


def test_the_key_is_secret_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    folder, file = TierFolder(tmp_path), tmp_path / "quire-tier.key"
    key = folder.hash_key
    assert len(key) == 16
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folder.close()
    assert file.read_bytes() == b"QuireKey" + key
    file.write_bytes(b"QuireKey" + key[:9])
    folder = TierFolder(tmp_path)
    second = folder.hash_key
    assert len(second) == 16
    assert second != key
    folder.close()
    file.chmod(0o644)  # no longer secret
    folder = TierFolder(tmp_path)
    assert folder.hash_key != second
    folder.close()


@pytest.mark.parametrize("name", ["key", "lock", "notes.txt", "segment-0000.kv", "quire-tier.kv"])
def test_a_directory_with_foreign_files_is_rejected_and_unchanged(
    tmp_path: Path, name: str
) -> None:
    TierFolder(tmp_path).close()
    (tmp_path / name).write_text("mine")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SettingError, match=f"holds {name}, which no tier makes; .* an empty one"):
        TierFolder(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / name).unlink()
    TierFolder(tmp_path).close()


@pytest.mark.parametrize("name", ["quire-tier.key", "quire-tier.lock"])
@pytest.mark.parametrize("content", ["mine", "0123456789abcdef", "12 and more"])
def test_a_foreign_file_with_one_of_our_names_is_unchanged(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingError, match=f"{name} is not what a tier writes .* delete it"):
        TierFolder(tmp_path)
    assert (tmp_path / name).read_text() == content
    (tmp_path / name).unlink()
    TierFolder(tmp_path).close()  # rejected stores hold nothing


def test_the_root_of_the_file_system_is_rejected() -> None:
    with pytest.raises(SettingError, match=r"/ (holds .* and \d+ more|.*another user)"):
        TierFolder(Path("/"))


def test_a_dedicated_disk_is_accepted_and_exposure_is_reported(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    tmp_path.chmod(0o755)
    folder = TierFolder(tmp_path)
    assert folder.note == "others may look into it (mode 755): chmod 700 it"
    folder.close()
    tmp_path.chmod(0o700)
    folder = TierFolder(tmp_path)
    assert folder.note == ""
    folder.close()


def test_a_tier_larger_than_its_disk_is_rejected_with_the_available_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save(0, digest(0), raw(0))
    store.close()
    own = (tmp_path / "quire-tier-0000.kv").stat().st_size
    disk = os.statvfs(tmp_path)
    fields = [*disk[:4], (1 << 30) // disk.f_frsize, *disk[5:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    folder = TierFolder(tmp_path)
    folder.check_room((1 << 30) + own)
    with pytest.raises(
        SettingError, match=r"1\.0 GiB free and 0\.0 GiB the tier .* at most 1024MiB"
    ):
        folder.check_room((1 << 30) + own + 1)
    with pytest.raises(SettingError, match=r"102,400,000\.0 GiB"):
        folder.check_room(100_000 << 40)
    folder.close()


def test_a_tier_may_be_on_another_file_system(tmp_path: Path) -> None:
    other = Path("/dev/shm") / f"quire-test-{os.getpid()}"
    if not other.parent.is_dir() or other.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no other writable file system")
    try:
        store = opened(other)
        store.save(3, digest(3), raw(3))
        store.close()
        again = opened(other)
        assert found(again, 3, 3)
        again.close()
    finally:
        for file in other.glob("*"):
            file.unlink()
        other.rmdir()


def test_a_segment_of_other_sizes_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "quire-tier-0000.kv"
    Segment.make(path, 4, BLOCK_BYTES, b"one").close()
    assert Segment.open(path, 4, BLOCK_BYTES + 1, b"one") is None
    assert Segment.open(path, 3, BLOCK_BYTES, b"one") is None
    assert Segment.open(path, 4, BLOCK_BYTES, b"other") is None
    assert Segment.open(tmp_path / "none", 4, BLOCK_BYTES, b"one") is None
