"""Files that a training cannot write: the error, and what is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.train.output_files import make_out, writing
from quire.train.tensor_file import read_tensors, write_tensors

TENSORS = {"a": np.arange(6, dtype=np.float32)}


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_file_before_it_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "training.safetensors"
    write_tensors(path, TENSORS, {"step": "3"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SettingError) as caught:
            write_tensors(path, {"a": TENSORS["a"] + 1}, {"step": "6"})
    for said in (f"{path}: cannot be written: No space left", "free space", "another --out"):
        assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]
    tensors, metadata = read_tensors(path)
    assert metadata == {"step": "3"}
    assert np.array_equal(tensors["a"], TENSORS["a"])


def test_an_interrupted_write_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "training.safetensors", TENSORS, {})
    assert not list(tmp_path.iterdir())


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.mkdir()
    with pytest.raises(SettingError, match=r"model.safetensors: cannot be written: Is a directory"):
        write_tensors(path, TENSORS, {})
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SettingError, match=r"cannot be written: Is a directory"), writing(path):
        path.write_text("")


def test_an_out_that_is_no_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for out, reason in ((file, "File exists"), (file / "heads", "Not a directory")):
        with pytest.raises(SettingError, match=rf"--out {out}: no directory .*: {reason}; give"):
            make_out(out)
    make_out(tmp_path / "some" / "heads")
    assert (tmp_path / "some" / "heads").is_dir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for another user
    with pytest.raises(SettingError, match=r"--out .*/heads: no file can be made there"):
        make_out(tmp_path / "some" / "heads")
