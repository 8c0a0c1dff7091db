"""The pack cache: packed weights in a directory, reused only for their own model."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.sampling_params import SamplingParams
from quire.engine.library.llm import LLM
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights import pack_cache
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import HEAD, NO_STAMP, STAMP_AT, PackCache
from tests.tiny_models import write_tiny_llama

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True)
SCHEMES = ["none", "int8", "int4-g32", "int4-g64-zp"]


class Start:
    """A model directory, a cache directory, and the output of a start with both."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.model = write_tiny_llama(root / "model", seed=seed, dtype="bf16", hidden_size=96)
        self.folder = root / "packed"
        self.said = ""
        aged(self.model)

    def __call__(self, *, scheme: str = "none", cached: bool = True) -> NativeExecutor:
        stream = io.StringIO()
        cache = PackCache(self.folder, Log("engine", stream)) if cached else None
        executor = NativeExecutor(
            program_of(self.model, scheme),
            open_checkpoint(self.model),
            ExecutorOptions(
                limits=StepLimits(max_tokens=8, max_samples=2, max_sequences=2),
                num_threads=2,
                pack_cache=cache,
            ),
        )
        self.said = stream.getvalue()
        return executor

    @property
    def file(self) -> Path:
        """Return the one file of the cache."""
        (found,) = self.folder.iterdir()
        return found


def program_of(model: Path, scheme: str) -> Program:
    program = build_program(open_model(model), dtype=DType.BF16, max_positions=64)
    return quantize(program, scheme)


def aged(model: Path) -> None:
    """Wait until the files are too old to share a timestamp with a change."""
    newest = max(file.stat().st_ctime for file in model.iterdir())
    time.sleep(max(0.0, newest + 0.06 - time.time()))


@pytest.fixture(autouse=True)
def _settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_cache, "SETTLED_S", 0.05)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_second_start_maps_what_the_first_packed(start: Start, scheme: str) -> None:
    packed = start(scheme=scheme)
    assert "packed weights are kept" in start.said
    mapped = start(scheme=scheme)
    assert start.said.count("\n") == 1
    assert "packed weights are mapped" in start.said
    assert mapped.weights_digest == packed.weights_digest
    assert mapped.weights_digest == start(scheme=scheme, cached=False).weights_digest


@pytest.mark.parametrize("scheme", SCHEMES)
def test_answers_and_fingerprint_equal_those_without_a_cache(start: Start, scheme: str) -> None:
    answers = []
    for settings in ({}, {"pack_cache": start.folder}, {"pack_cache": start.folder}):
        with LLM(start.model, threads=2, quantization=scheme, **settings) as llm:
            (told,) = llm.generate([[0, 5, 9, 200, 31]], GREEDY)
            answers.append((told.token_ids, llm.card.fingerprint))
    assert answers[0] == answers[1] == answers[2]


def test_each_precision_and_path_has_its_own_file(start: Start, tmp_path: Path) -> None:
    for scheme in SCHEMES:
        start(scheme=scheme)
    assert len(list(start.folder.iterdir())) == len(SCHEMES)
    elsewhere = Start(tmp_path / "elsewhere", seed=1)
    elsewhere.folder = start.folder
    elsewhere()
    assert "are kept" in elsewhere.said
    assert len(list(start.folder.iterdir())) == len(SCHEMES) + 1


def _change_byte(at: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    return change


def _cut(share: float) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, int(file.stat().st_size * share))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (_cut(0), "0 bytes, too few"),
    "cut": (_cut(0.7), "it was cut"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "it was cut"),
    "magic": (_change_byte(0), "was never finished"),
    "version": (_change_byte(8), "packed by another version"),
    "a weight's first byte": (_change_byte(4096), "were changed: the digest differs"),
    "the index": (_change_byte(-3), "its index was changed"),
    "a foreign file": (lambda file: file.write_bytes(bytes(100_000)), "was never finished"),
    "others may write": (lambda file: file.chmod(0o666), "others may write to it (mode 666)"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_rebuilt_with_a_reason(start: Start, name: str) -> None:
    right = start().weights_digest
    damage, reason = DAMAGES[name]
    damage(start.file)
    assert start().weights_digest == right
    assert "warning engine: packed weights are made anew" in start.said
    assert reason in start.said
    start()
    assert "are mapped" in start.said
    assert "warning" not in start.said


def test_a_link_is_not_followed(start: Start, tmp_path: Path) -> None:
    start()
    other = tmp_path / "other"
    shutil.move(start.file, other)
    next_to = start.folder / "x"
    start()
    target = start.file
    target.unlink()
    target.symlink_to(other)
    start()
    assert "made anew" in start.said
    assert "cannot be opened" in start.said
    assert not target.is_symlink()
    assert not next_to.exists()


def test_the_file_of_another_model_is_not_used(start: Start, tmp_path: Path) -> None:
    start()
    other = Start(tmp_path / "other", seed=7)
    right = other().weights_digest
    shutil.copy(start.file, other.file)
    assert other().weights_digest == right
    assert "made anew" in other.said
    assert "the checkpoint has changed" in other.said


def test_a_change_of_the_checkpoint_is_detected_whatever_its_dates(start: Start) -> None:
    before = start().weights_digest
    file = start.model / "model.safetensors"
    known = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    with file.open("r+b") as opened:  # in place: same inode, same size
        opened.write(content)
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    aged(start.model)
    after = start().weights_digest
    assert after != before
    assert "it is of other weights: the checkpoint has changed" in start.said
    assert start().weights_digest == after
    assert "are mapped" in start.said


def test_a_touched_checkpoint_is_read_once_and_its_weights_kept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    (start.model / "model.safetensors").touch()
    aged(start.model)
    start()
    assert "are mapped" in start.said

    def no_reading(*_: object) -> str:
        raise AssertionError("the checkpoint was read")

    monkeypatch.setattr("quire.execute.packing._digest_of_sources", no_reading)
    start()
    assert "are mapped" in start.said


def test_a_fresh_checkpoint_is_not_trusted_by_its_dates(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_cache, "SETTLED_S", 3600.0)
    start()
    assert start.file.read_bytes()[STAMP_AT : HEAD.size] == NO_STAMP
    start()
    assert "are mapped" in start.said


def test_a_directory_writable_by_others_is_rejected(start: Start) -> None:
    start.folder.mkdir()
    start.folder.chmod(0o777)
    with pytest.raises(SettingError, match=r"others may write to it \(mode 777\).* chmod 700"):
        start()
    start.folder.chmod(0o755)
    start()


def test_a_path_that_is_no_directory_is_rejected(start: Start) -> None:
    start.folder.write_text("a file")
    with pytest.raises(SettingError, match=r"pack_cache: .* cannot be used as a folder"):
        start()


def test_created_directories_and_files_are_the_users_own(start: Start) -> None:
    start()
    assert start.folder.stat().st_mode & 0o777 == 0o700
    assert start.file.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_reported_before_packing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRoom:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda _: NoRoom)
    start()
    assert start.said.count("\n") == 1
    assert list(start.folder.iterdir()) == []
    assert "warning engine: packed weights cannot be kept" in start.said
    assert "12288 are free" in start.said


@pytest.mark.parametrize("calls", [0, 1])
def test_a_disk_that_fills_during_packing_stops_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    monkeypatch.setattr(pack_cache, "RUN_BYTES", 4096)
    right, left, write = start(cached=False).weights_digest, calls, os.write

    def full(file: int, content: memoryview) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(os, "write", full)
    assert start().weights_digest == right
    assert start.said.count("\n") == 1
    assert "No space left on device" in start.said
    assert list(start.folder.iterdir()) == []


def test_files_of_a_killed_start_are_removed(start: Start) -> None:
    start()
    name = start.file.name
    start.file.unlink()
    left = start.folder / f".{name}.123456.part"
    left.write_bytes(b"half")
    start()
    assert start.file.name == name


def test_the_reference_executor_rejects_it(start: Start) -> None:
    with pytest.raises(SettingError, match="reference executor packs nothing"):
        LLM(start.model, executor="reference", pack_cache=start.folder)


def test_runs_of_the_file_hold_what_was_added(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start().weights_digest
    first = start.file.read_bytes()
    start.file.unlink()
    monkeypatch.setattr(pack_cache, "RUN_BYTES", 1 << 14)
    assert start().weights_digest == whole
    assert np.array_equal(
        np.frombuffer(first, np.uint8), np.frombuffer(start.file.read_bytes(), np.uint8)
    )
