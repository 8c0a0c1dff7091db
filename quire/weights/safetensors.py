"""Map a safetensors file into memory and validate its header.

Format (huggingface/safetensors): 8 bytes little-endian header length, a JSON object naming each
tensor's dtype, shape and data_offsets (relative to the end of the header), then the data. What
always holds after opening: tensors cover the data without gap or overlap, each has exactly the
bytes its dtype and shape need, and all dtypes are f32, f16 or bf16, fp8 (with scales:
fp8_checkpoint.py), or those of masks in old files, which are ignored, and of the token tables of
draft heads. Values are not inspected.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.base.regular_file import LFS_POINTER, open_regular
from quire.base.strict_json import parse_object
from quire.weights.dtypes import BYTE_TYPE_BYTES, FP8, NUMPY_TYPES

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_SHOWN_PROBLEMS = 20
LENGTH_BYTES = 8

DTYPES = {
    **{"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": FP8},
    **{"U8": "u8", "BOOL": "bool", "I32": "i32", "I64": "i64"},
}
# NumPy type of each type of whole numbers.
TABLE_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"i32": np.dtype("<i4"), "i64": np.dtype("<i8")}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as it lies in the file: `raw` uint8 [bytes], read-only, a view of the mapping.

    `dtype` is "f32", "f16" or "bf16"; `array` views the same bytes typed and shaped (bf16 as
    uint16). A mask is "u8" or "bool" and has no `array`, nor has fp8, "f8_e4m3", or a table of
    whole numbers, "i32" or "i64", for which `whole_numbers` is. The start need not be aligned to
    the element size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    @property
    def array(self) -> NDArray[Any]:
        """The elements, [*shape]; bf16 as uint16."""
        return self.raw.view(NUMPY_TYPES[self.dtype]).reshape(self.shape)

    def whole_numbers(self) -> NDArray[np.int64]:
        """Return a copy of a table of whole numbers, [*shape]."""
        # The bytes are copied: the file aligns no tensor.
        table = np.frombuffer(self.raw.tobytes(), TABLE_TYPES[self.dtype])
        return table.astype(np.int64).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    end: int


class SafetensorsFile:
    """An open file; `opened`: its metadata (os.stat_result) at that moment.

    Raises WeightsError, all problems of the header listed together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map, self.opened = _map_file(path)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._entries = _read_entries(path, self._bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names in the header's order."""
        return tuple(self._entries)

    def tensor(self, name: str) -> StoredTensor:
        """Return the tensor `name`, which must be one of `names`."""
        entry = self._entries[name]
        raw = self._bytes[entry.start : entry.end]
        return StoredTensor(name=name, dtype=entry.dtype, shape=entry.shape, raw=raw)

    def release(self, name: str) -> None:
        """Give the tensor's pages back to the system; reading it again reads the file again."""
        entry = self._entries[name]
        start = entry.start - entry.start % mmap.PAGESIZE
        if entry.end > start and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, start, entry.end - start)


def _map_file(path: Path) -> tuple[mmap.mmap, os.stat_result]:
    try:
        with open_regular(path) as file:
            opened = os.fstat(file.fileno())
            size = opened.st_size
            if size < LENGTH_BYTES:
                raise WeightsError(
                    f"{path}: the file has {size} bytes, too short for safetensors; fetch it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), opened
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error


def _read_entries(path: Path, content: NDArray[np.uint8]) -> dict[str, _Entry]:
    if content[: len(LFS_POINTER)].tobytes() == LFS_POINTER:
        raise WeightsError(f"{path}: a pointer of Git LFS, not the file itself; run git lfs pull")
    length = int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    room = len(content) - LENGTH_BYTES
    if length > min(room, MAX_HEADER_BYTES):
        raise WeightsError(
            f"{path}: the header says it has {length} bytes; {room} bytes follow and at most "
            f"{MAX_HEADER_BYTES} are allowed; the file is corrupt or cut short, fetch it again"
        )
    data_start = LENGTH_BYTES + length
    raw = content[LENGTH_BYTES:data_start].tobytes()
    if raw[:1] != b"{":
        raise WeightsError(
            f"{path}: the header is not a JSON object; this is no safetensors file, or a damaged "
            "one: copy or download it again"
        )
    try:
        header = parse_object(raw, limit_bytes=MAX_HEADER_BYTES)
    except ValueError as error:
        raise WeightsError(
            f"{path}: the header cannot be read: {error}; the file is damaged: copy or download it "
            "again"
        ) from error
    _check_metadata(path, header.pop("__metadata__", None))

    problems: list[str] = []
    entries: dict[str, _Entry] = {}
    for name, described in header.items():
        entry = _read_entry(name, described, data_start, problems)
        if entry is not None:
            entries[name] = entry
    if not problems:
        _check_coverage(entries, data_start, len(content), problems)
    raise_problems(str(path), problems)
    return entries


def _check_metadata(path: Path, metadata: Any) -> None:
    if metadata is None:
        return
    fine = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not fine:
        raise WeightsError(f"{path}: __metadata__ must map strings to strings")


def _read_entry(name: str, described: Any, data_start: int, problems: list[str]) -> _Entry | None:
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(described, dict) or described.keys() != keys:
        problems.append(f"{name}: must have exactly dtype, shape and data_offsets")
        return None
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problems.append(
            f"{name}: dtype is {dtype!r}; F32, F16, BF16 and F8_E4M3 can be read, and I64 and I32 "
            "for the token tables of draft heads"
        )
        return None
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        problems.append(
            f"{name}: shape is {shape!r}; a list of at most {MAX_DIMENSIONS} whole numbers "
            "from 0 is allowed"
        )
        return None
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.append(f"{name}: data_offsets is {offsets!r}; [start, end] is allowed")
        return None
    kind = DTYPES[dtype]
    needed = prod(shape) * _element_bytes(kind)
    if offsets[1] - offsets[0] != needed:
        problems.append(
            f"{name}: {dtype} {shape} needs {needed} bytes, but data_offsets {offsets} "
            f"span {offsets[1] - offsets[0]}"
        )
        return None
    start, end = data_start + offsets[0], data_start + offsets[1]
    return _Entry(DTYPES[dtype], tuple(shape), start, end)


def _element_bytes(kind: str) -> int:
    if kind in NUMPY_TYPES:
        return NUMPY_TYPES[kind].itemsize
    return TABLE_TYPES[kind].itemsize if kind in TABLE_TYPES else BYTE_TYPE_BYTES


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _check_coverage(
    entries: Mapping[str, _Entry], data_start: int, file_size: int, problems: list[str]
) -> None:
    """Tensors, sorted by place, follow each other from the first data byte to the last."""
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
    position, before = data_start, "the header"
    for name, entry in ordered:
        if entry.start < position:
            problems.append(f"{name}: overlaps {before} by {position - entry.start} bytes")
        elif entry.start > position:
            problems.append(f"{name}: {entry.start - position} bytes between {before} and it")
        position, before = max(position, entry.end), name
    if position > file_size:
        problems.append(
            f"the data ends {position - file_size} bytes after the end of the file; it is cut "
            "short, fetch it again"
        )
    elif position < file_size:
        problems.append(f"{file_size - position} bytes after the last tensor belong to none")


def raise_problems(where: str, problems: list[str], *, advice: str = "") -> None:
    """Raise WeightsError listing `problems` (the first of them, and how many more), if any.

    advice: what to do, in a last line.
    """
    if not problems:
        return
    lines = [f"\n  - {problem}" for problem in problems[:MAX_SHOWN_PROBLEMS]]
    if len(problems) > MAX_SHOWN_PROBLEMS:
        lines.append(f"\n  - and {len(problems) - MAX_SHOWN_PROBLEMS} more")
    lines += [f"\n{advice}"] if advice else []
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise WeightsError(f"{where}: {count}" + "".join(lines))
