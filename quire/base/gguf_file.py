"""One GGUF file, mapped read-only and checked before anything is believed.

Format (ggml-org/ggml, docs/gguf.md), versions 2 and 3: the magic, a version, the numbers of tensors
and of metadata entries, the entries (typed, by key), a description of each tensor (name, dimensions
with the innermost first, type, offset), then the tensors, each at a multiple of the alignment. What
always holds after opening: every number was compared with the size of the file before it was used,
keys and names are there once, tensors follow each other with nothing but padding between, and
nothing nests. No value of a tensor is looked at. Knows no model and no tokenizer.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.base.gguf_types import TYPES, BlockType
from quire.base.regular_file import open_regular
from quire.base.show import show

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIXED_BYTES = 24  # magic, version and the two numbers
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_ENTRIES = 1 << 16  # of metadata
MAX_TENSORS = 1 << 17
MAX_ARRAY = 1 << 22  # entries: a vocabulary, its merges
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 64
MAX_TEXT_BYTES = 16 << 20  # of one value: a chat template
MAX_DIMENSIONS = 4
MAX_SHOWN_PROBLEMS = 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
# struct's letter for each fixed-width type of metadata values, by the file's number for it.
_LETTERS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
)
_KNOWN = "0 to 12"
_LENGTH = struct.Struct("<Q")
_HOW_TO_MEND = "the file is corrupt or cut short; fetch it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """An array of metadata where it lies; `count` entries, texts or numbers.

    Vocabularies have hundreds of thousands of entries, so they are read when they are asked for.
    """

    count: int
    holds_texts: bool
    content: mmap.mmap
    start: int
    dtype: np.dtype[Any] | None

    def texts(self) -> list[bytes]:
        """Return the texts as UTF-8 bytes, not checked."""
        found, at, content = [], self.start, self.content
        for _ in range(self.count if self.holds_texts else 0):
            (length,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size + length
            found.append(content[at - length : at])
        return found

    def numbers(self) -> NDArray[Any]:
        """Return the numbers (of flags: bool), a fresh array; empty where the array holds texts."""
        if self.dtype is None:
            return np.empty(0)
        size = self.count * self.dtype.itemsize
        return np.frombuffer(self.content[self.start : self.start + size], self.dtype).copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor's description. shape: the outermost first, as elsewhere; start, end: in the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    end: int


class GgufFile:
    """An open file: `metadata` and `tensors`, by key and by name.

    `opened` is what the system knew of it then. Metadata values are int, float, bool, str or
    GgufArray. Raises WeightsError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map, self.opened = _map_file(path)
        cursor = _Cursor(path, self._map)
        num_tensors, num_entries = _read_start(cursor)
        self.metadata = _read_metadata(cursor, num_entries)
        described = [_read_tensor(cursor) for _ in range(num_tensors)]
        alignment = _alignment(cursor, self.metadata)
        self.header_bytes = cursor.at
        self.tensors = _placed(cursor, described, alignment)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def raw(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Return the tensor's bytes [end - start], read-only, a view of the mapping."""
        return self._bytes[tensor.start : tensor.end]

    def header(self) -> bytes:
        """Return all bytes before the tensors: metadata and descriptions."""
        return self._map[: self.header_bytes]

    def release(self, tensor: GgufTensor) -> None:
        """Give the tensor's pages back to the system; reading it again reads the file again."""
        start = tensor.start - tensor.start % mmap.PAGESIZE
        if tensor.end > start and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, start, tensor.end - start)


class _Cursor:
    """A place in the file; the reader of bytes names their purpose."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at, self.size = path, content, 0, len(content)

    def broken(self, problem: str, at: int | None = None) -> WeightsError:
        place = self.at if at is None else at
        return WeightsError(f"{self.path}: byte {place}: {problem}; {_HOW_TO_MEND}")

    def number(self, code: str, what: str) -> Any:
        """Return one number of struct's kind `code`."""
        size = struct.calcsize(code)
        if self.at + size > self.size:
            raise self.broken(f"{what} should be here, but {self.size - self.at} bytes are left")
        (value,) = struct.unpack_from("<" + code, self.content, self.at)
        self.at += size
        return value

    def text(self, what: str, limit: int) -> str:
        """Return a string of at most `limit` bytes."""
        begin = self.at
        length = self.number("Q", f"the length of {what}")
        if length > min(limit, self.size - self.at):
            raise self.broken(
                f"{what} claims {length} bytes; {self.size - self.at} are left and at most "
                f"{limit} are allowed",
                begin,
            )
        raw = self.content[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is {raw[:40]!r}, not UTF-8 ({error})", begin) from None


def _map_file(path: Path) -> tuple[mmap.mmap, os.stat_result]:
    try:
        with open_regular(path) as file:
            opened = os.fstat(file.fileno())
            size = opened.st_size
            start = file.read(8)
            if size < FIXED_BYTES or start[:4] != MAGIC:
                raise WeightsError(_why_no_gguf(path, start, size))
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), opened
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}; check the path") from error


def _why_no_gguf(path: Path, start: bytes, size: int) -> str:
    if start[:7] == b"version":
        return f"{path}: a pointer of Git LFS, not the file itself; fetch it with git lfs pull"
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return (
            f"{path}: begins with {start[:4]!r}, a format older than GGUF; fetch the model as GGUF"
        )
    if start[:4] != MAGIC:
        return (
            f"{path}: begins with {start[:4]!r}, a GGUF file with {MAGIC!r}; the "
            "file is corrupt or of another format: download it again, as with `quire pull`"
        )
    return f"{path}: the file has {size} bytes, too short for GGUF; fetch it again"


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata entries."""
    cursor.at = len(MAGIC)
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        kind = f"version {version}"
        if swapped in VERSIONS:
            kind = f"big-endian (version {swapped} with its bytes reversed)"
        raise WeightsError(
            f"{cursor.path}: this GGUF file is {kind}; versions 2 and 3, little-endian, can be "
            "read: convert the model again, or fetch a newer file of it"
        )
    num_tensors = _count(cursor, "tensors", MAX_TENSORS)
    return num_tensors, _count(cursor, "metadata entries", MAX_ENTRIES)


def _count(cursor: _Cursor, what: str, limit: int) -> int:
    begin = cursor.at
    count = cursor.number("Q", f"the number of {what}")
    if count > limit:
        raise cursor.broken(f"the file claims {count} {what}; at most {limit} are allowed", begin)
    return int(count)


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_entries):
        begin = cursor.at
        key = cursor.text(f"the key of metadata entry {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.broken(f"the key {show(key)} is there twice", begin)
        metadata[key] = _read_value(cursor, f"the value of {show(key)}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> Any:
    begin = cursor.at
    code = cursor.number("I", f"the type of {what}")
    if code == _STRING:
        return cursor.text(what, MAX_TEXT_BYTES)
    if code == _ARRAY:
        return _read_array(cursor, what)
    letter = _LETTERS.get(code)
    if letter is None:
        raise cursor.broken(f"{what} is of type {code}; {_KNOWN} are known", begin)
    value = cursor.number(letter, what)
    if code == _BOOL:
        if value > 1:
            raise cursor.broken(f"{what} is a flag of {value}; 0 and 1 are allowed", begin)
        return bool(value)
    return value


def _read_array(cursor: _Cursor, what: str) -> GgufArray:
    begin = cursor.at
    code = cursor.number("I", f"the type of the entries of {what}")
    if code == _ARRAY:
        raise cursor.broken(f"{what} is an array of arrays, which is not read", begin)
    if code != _STRING and code not in _LETTERS:
        raise cursor.broken(f"{what} holds entries of type {code}; {_KNOWN} are known", begin)
    dtype = None if code == _STRING else np.dtype("<" + _LETTERS[code])
    count = cursor.number("Q", f"the number of entries of {what}")
    least = _LENGTH.size if dtype is None else dtype.itemsize
    if count * least > cursor.size - cursor.at or count > MAX_ARRAY:
        raise cursor.broken(
            f"{what} claims {count} entries of at least {least} bytes; "
            f"{cursor.size - cursor.at} bytes are left; at most {MAX_ARRAY} entries are allowed",
            begin,
        )
    start = cursor.at
    if dtype is None:
        _pass_texts(cursor, count, what)
    else:
        cursor.at += count * least
        if code == _BOOL:
            flags = np.frombuffer(cursor.content[start : cursor.at], np.uint8)
            if flags.size and flags.max() > 1:
                raise cursor.broken(f"{what} holds a flag of {flags.max()}; 0 and 1 are allowed")
            dtype = np.dtype(np.bool_)
    return GgufArray(
        count=count,
        holds_texts=dtype is None,
        content=cursor.content,
        start=start,
        dtype=dtype,
    )


def _pass_texts(cursor: _Cursor, count: int, what: str) -> None:
    """Move behind `count` strings, each of which lies in the file."""
    at, size, content = cursor.at, cursor.size, cursor.content
    unpack, width = _LENGTH.unpack_from, _LENGTH.size
    for index in range(count):
        if at + width > size:
            raise cursor.broken(f"{what} ends after {index} of {count} entries", at)
        (length,) = unpack(content, at)
        at += width + length
        if at > size:
            raise cursor.broken(
                f"entry {index} of {what} claims {length} bytes; {size - at + length} are left",
                at - length - width,
            )
    cursor.at = at


def _read_tensor(cursor: _Cursor) -> GgufTensor:
    """Return a description; `start` and `end` are still relative to the first tensor's place."""
    begin = cursor.at
    name = cursor.text("a tensor's name", MAX_NAME_BYTES)
    num_dimensions = cursor.number("I", f"the number of dimensions of {name}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.broken(
            f"tensor {name} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed",
            begin,
        )
    sizes = [cursor.number("Q", f"a dimension of {name}") for _ in range(num_dimensions)]
    code = cursor.number("I", f"the type of {name}")
    offset = cursor.number("Q", f"the offset of {name}")
    kind = TYPES.get(code)
    if kind is None:
        raise cursor.broken(
            f"tensor {name} is of type {code}, which is not known (the largest known is "
            f"{max(TYPES)})",
            begin,
        )
    if 0 in sizes or sizes[0] % kind.block_size:
        raise cursor.broken(
            f"tensor {name} is {kind.name} {list(reversed(sizes))}; no dimension may be 0, and the "
            f"last must be a multiple of {kind.block_size}",
            begin,
        )
    num_bytes = prod(sizes) // kind.block_size * kind.block_bytes
    if num_bytes > cursor.size or offset > cursor.size:
        raise cursor.broken(
            f"tensor {name}, {kind.name} {list(reversed(sizes))}, needs {num_bytes} bytes at "
            f"offset {offset}; the file has {cursor.size}",
            begin,
        )
    shape = tuple(reversed(sizes))
    return GgufTensor(name=name, type=kind, shape=shape, start=offset, end=offset + num_bytes)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not is_whole or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise WeightsError(
            f"{cursor.path}: general.alignment is {show(alignment)}; a power of 2 up to "
            f"{MAX_ALIGNMENT} is allowed; {_HOW_TO_MEND}"
        )
    return int(alignment)


def _placed(cursor: _Cursor, described: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors with their places in the file, each of which was checked."""
    first = _aligned(cursor.at, alignment)
    problems: list[str] = []
    tensors: dict[str, GgufTensor] = {}
    for tensor in described:
        if tensor.name in tensors:
            problems.append(f"{tensor.name} is there twice")
        tensors[tensor.name] = GgufTensor(
            name=tensor.name,
            type=tensor.type,
            shape=tensor.shape,
            start=first + tensor.start,
            end=first + tensor.end,
        )
    expected, before = first, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start != expected:
            problems.append(
                f"{tensor.name} begins at byte {tensor.start}; after {before}, at a multiple of "
                f"{alignment}, it would be {expected}"
            )
        expected, before = _aligned(tensor.end, alignment), tensor.name
        if tensor.end > cursor.size:
            problems.append(f"{tensor.name} ends at byte {tensor.end} of {cursor.size}")
    if tensors and not problems and cursor.size > expected:
        problems.append(f"{cursor.size - expected} bytes after the last tensor belong to none")
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:MAX_SHOWN_PROBLEMS])
        more = len(problems) - MAX_SHOWN_PROBLEMS
        tail = f"\n  - and {more} more" if more > 0 else ""
        raise WeightsError(f"{cursor.path}: {_HOW_TO_MEND}:{shown}{tail}")
    return tensors


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
