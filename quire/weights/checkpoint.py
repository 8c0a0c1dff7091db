"""A checkpoint: all tensors of a model by name, in one file or in shards.

Formats are safetensors (safetensors_checkpoint.py), also in fp8 (fp8_checkpoint.py), and GGUF
(gguf_checkpoint.py); the last two are imported on demand. Pickles are rejected, because loading one
runs any code it contains. Invariant: each name is in exactly one shard, the one given by the index,
and no path leaves the directory. Knows no model; binding.py compares names and shapes with a
program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.base.gguf_model import find_gguf
from quire.base.regular_file import LFS_POINTER, is_present, open_regular, read_regular
from quire.base.show import show
from quire.base.strict_json import parse_object
from quire.weights.dtypes import FP8
from quire.weights.safetensors import SafetensorsFile, StoredTensor, raise_problems
from quire.weights.safetensors_checkpoint import WHOLE, SafetensorsCheckpoint

if TYPE_CHECKING:
    from quire.weights.fp8_checkpoint import Fp8Stored

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADS_FILE = "medusa_lm_head.safetensors"  # of draft heads, in place of SINGLE_FILE
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_INDEX_BYTES = 100_000_000
_MAX_NAME_BYTES = 255  # of a file, on every usual file system


class RowReader(Protocol):
    """Rows that are converted to float32 on request."""

    @property
    def columns(self) -> int:
        """Return the number of elements in a row."""

    def to_f32(self, rows: slice) -> NDArray[np.float32]:
        """Return the values of some rows, [rows, columns]. Thread-safe."""


class Checkpoint(Protocol):
    """Tensors by name. described_by: the source of the expected shapes, for error messages."""

    path: Path
    described_by: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensor names."""

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors in their files."""

    @property
    def files(self) -> Mapping[Path, os.stat_result]:
        """Return the files that hold tensors, with their metadata (os.stat_result) when opened."""

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of a tensor without reading values. Raises WeightsError."""

    def block_type(self, name: str) -> str:
        """Return the block type of a quantized tensor, "" for a plain one."""

    def tensor(self, name: str) -> StoredTensor:
        """Return the tensor, a view of the file if possible. Raises WeightsError if unknown."""

    def content(self, name: str) -> StoredTensor:
        """Return what is digested: the tensor, or the blocks of a quantized one.

        For blocks, `dtype` names their type.
        """

    def quantized_rows(self, name: str, *, transposed: bool) -> RowReader | None:
        """Return the rows of a quantized matrix, or of its transpose, if stored by row.

        None: use the whole tensor.
        """

    def fp8(self, name: str) -> Fp8Stored | None:
        """Return the codes and scales of an fp8 matrix, None for any other tensor."""

    def read_f32(self, name: str, rows: slice = WHOLE) -> NDArray[np.float32]:
        """Return a new float32 copy of the tensor, or of a slice of its first axis."""

    def release(self, name: str) -> None:
        """Drop the tensor's pages from memory; views stay valid and read the file again."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in directory `path`, or the single safetensors or GGUF file `path`.

    model.safetensors takes precedence over model.safetensors.index.json, as in transformers; a GGUF
    file is used if there is neither. Raises WeightsError if there is no readable checkpoint (with
    instructions), or if files are corrupt.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".safetensors":
        return _open_single(path, path)
    if (gguf := find_gguf(path)) is not None:
        from quire.weights.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(gguf)
    if not path.is_dir():
        raise WeightsError(f"{path}: no such directory; give the directory of a model")
    for name in (SINGLE_FILE, INDEX_FILE):
        if (path / name).exists() and not (path / name).is_file():
            raise WeightsError(f"{path / name} is not a regular file; put the model's file there")
    if (path / SINGLE_FILE).exists():
        return _open_single(path, path / SINGLE_FILE)
    if (path / INDEX_FILE).exists():
        return _open_shards(path)
    raise WeightsError(_why_nothing(path))


def lacks_weights(path: Path) -> bool:
    """Return whether weights are absent: no file holds any, one that the index names is missing, or
    Git LFS has left a pointer in place of one. Raises WeightsError for a damaged index."""
    if path.is_file() or find_gguf(path) is not None:
        return False
    if is_present(path / SINGLE_FILE):
        return _is_pointer(path / SINGLE_FILE)
    if not is_present(path / INDEX_FILE):
        return True
    shards = [path / name for name in set(read_weight_map(path / INDEX_FILE).values())]
    return any(not is_present(shard) or _is_pointer(shard) for shard in shards)


def _is_pointer(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def _open_single(path: Path, file_path: Path) -> Checkpoint:
    file = SafetensorsFile(file_path)
    return _with_fp8(SafetensorsCheckpoint(path, dict.fromkeys(file.names, file)))


def _with_fp8(checkpoint: SafetensorsCheckpoint) -> Checkpoint:
    if all(checkpoint.describe(name)[0] != FP8 for name in checkpoint.names):
        return checkpoint
    from quire.weights.fp8_checkpoint import Fp8Checkpoint

    return Fp8Checkpoint(checkpoint)


def _open_shards(folder: Path) -> Checkpoint:
    weight_map = read_weight_map(folder / INDEX_FILE)
    problems: list[str] = []
    files: dict[str, SafetensorsFile] = {}
    for file_name in sorted(set(weight_map.values())):
        if not is_present(folder / file_name):
            problems.append(f"shard {file_name} is missing; fetch it")
            continue
        try:
            files[file_name] = SafetensorsFile(folder / file_name)
        except WeightsError as error:
            problems.append(str(error))
    for name, file_name in weight_map.items():
        if file_name in files and name not in files[file_name].names:
            others = [other for other, file in files.items() if name in file.names]
            where = f"it is in {', '.join(others)}" if others else "it is in no shard that was read"
            problems.append(f"{name} should be in {file_name}, but {where}")
    for file_name, file in files.items():
        for name in file.names:
            if name not in weight_map:
                problems.append(f"{name} is in {file_name}, but not in the index")
            elif weight_map[name] != file_name and name in _names(files, weight_map[name]):
                problems.append(f"{name} is in {file_name} and in {weight_map[name]}")
    raise_problems(str(folder / INDEX_FILE), problems)
    holders = {name: files[file] for name, file in weight_map.items()}
    return _with_fp8(SafetensorsCheckpoint(folder, holders))


def _names(files: dict[str, SafetensorsFile], file_name: str) -> tuple[str, ...]:
    return files[file_name].names if file_name in files else ()


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the shard of each tensor, as an index file names it; shards are plain file names.

    Raises WeightsError.
    """
    try:
        index = parse_object(
            read_regular(path, limit_bytes=MAX_INDEX_BYTES), limit_bytes=MAX_INDEX_BYTES
        )
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: weight_map must be an object of tensor names and files")
    problems = [
        f"{name}: file is {show(file_name)}; a plain name ending in .safetensors, of at most "
        f"{_MAX_NAME_BYTES} bytes, is allowed"
        for name, file_name in weight_map.items()
        if not _is_plain_name(file_name)
    ]
    raise_problems(str(path), problems)
    return weight_map


def _is_plain_name(file_name: Any) -> bool:
    return (
        isinstance(file_name, str)
        and file_name.endswith(".safetensors")
        and not file_name.startswith(".")
        and not any(character in file_name for character in "/\\:\0")
        and len(file_name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
    )


def _why_nothing(folder: Path) -> str:
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    pickles = [name for name in files if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{folder}: the weights are pickles ({', '.join(pickles[:3])}), which are rejected "
            "because loading one can run any code it contains; convert them to safetensors "
            "(load the model in transformers and call save_pretrained), or fetch the safetensors "
            "files of the same model"
        )
    for name in (SINGLE_FILE, INDEX_FILE):
        link = folder / name
        if link.is_symlink() and not link.exists():
            return (
                f"{link}: this is a link to {os.readlink(link)}, which does not exist; restore "
                "that file, or download the model again with quire pull"
            )
    found = ", ".join(files[:8]) or "nothing"
    return (
        f"{folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; found {found}. Copy the "
        "model's weights there, or download all of it with quire pull"
    )
