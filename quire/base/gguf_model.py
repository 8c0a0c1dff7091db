"""A model as GGUF: its file, or the files it was split into, and which file a path stands for.

A split model's files are named NAME-00001-of-0000N.gguf; the first has the metadata, each says its
number and the count. What always holds after opening: all parts are there and agree, and a tensor
lies in one of them. Reads the container only (gguf_file.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, WeightsError
from quire.base.gguf_file import GgufFile, GgufTensor
from quire.base.gguf_open import open_gguf
from quire.base.gguf_parts import PART, SUFFIX, first_part_of, is_beside

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
_SHOWN_FILES = 8


class GgufModel:
    """Metadata of the first file and tensors of all, by name. Raises WeightsError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _open_parts(path)
        self.metadata: Mapping[str, Any] = self.files[0].metadata
        self._holders: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._holders:
                    raise WeightsError(
                        f"{file.path}: {name} is in {self._holders[name].path.name} too; "
                        "fetch both again"
                    )
                self._holders[name] = file

    @property
    def tensors(self) -> dict[str, GgufTensor]:
        """All descriptions, by name."""
        return {name: file.tensors[name] for name, file in self._holders.items()}

    def holder(self, name: str) -> GgufFile:
        """Return the file in which the tensor `name` lies."""
        return self._holders[name]


def find_gguf(path: Path) -> Path | None:
    """Return the (first) GGUF file that `path` stands for; None where it stands for something else.

    A file itself, by its suffix; or the one model in a folder without safetensors. Raises
    ConfigError where the folder has several.
    """
    is_dir = os.path.isdir(path)  # unlike Path.is_dir False for a text that is too long for a path
    if path.suffix == SUFFIX and not is_dir:
        return _first_part(path)
    if not is_dir or any(path.glob("*.safetensors")):
        return None
    found = sorted(
        {_first_part(file) for file in path.glob(f"*{SUFFIX}") if not is_beside(file.name)}
    )
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:_SHOWN_FILES])
        more = f" and {len(found) - _SHOWN_FILES} more" if len(found) > _SHOWN_FILES else ""
        raise ConfigError(
            f"{path}: several GGUF models are there ({names}{more}); give the path of one file"
        )
    return found[0] if found else None


def model_name_of(path: Path) -> str:
    """Return what a GGUF file's name says the model is called."""
    part = PART.fullmatch(path.name)
    return part["stem"] if part else path.stem


def _first_part(path: Path) -> Path:
    return path.with_name(first_part_of(path.name))


def _open_parts(path: Path) -> list[GgufFile]:
    first = open_gguf(path)
    part = PART.fullmatch(path.name)
    said = max(1, _whole(first, COUNT, 1))
    named = int(part["count"]) if part else 1
    if said != named:
        raise WeightsError(
            f"{path}: {COUNT} is {said}, and its name says {named}; keep the names that the parts "
            f"of a split model came with (NAME-00001-of-{said:05d}{SUFFIX})"
        )
    if part is None or said == 1:
        return [first]
    files = [first]
    for number in range(2, said + 1):
        other = path.with_name(f"{part['stem']}-{number:05d}-of-{part['count']}{SUFFIX}")
        if not other.is_file():
            raise WeightsError(f"{path}: part {other.name} of {said} is missing; fetch it")
        files.append(open_gguf(other))
    for index, file in enumerate(files):
        found, count = _whole(file, NUMBER, -1), _whole(file, COUNT, -1)
        if (found, count) != (index, said):
            raise WeightsError(
                f"{file.path}: {NUMBER} is {found} and {COUNT} {count}; {index} and {said} must "
                "stand there; fetch the parts again"
            )
    total, needed = sum(len(file.tensors) for file in files), _whole(first, TENSORS, -1)
    if total != needed:
        raise WeightsError(
            f"{path}: its {said} parts hold {total} tensors, {TENSORS} says {needed}; fetch them "
            "again"
        )
    return files


def _whole(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise WeightsError(f"{file.path}: {key} is {value!r}; a whole number must stand there")
    return value
