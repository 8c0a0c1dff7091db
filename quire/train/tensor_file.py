"""Write and read tensors of a training as safetensors: heads that servers load, and checkpoints.

Nothing is pickled. A file is written beside its place and then moved there, so that a training that
is killed leaves the file before it; where writing fails, nothing is left beside it. Knows no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.base.strict_json import parse_object
from quire.train.output_files import writing
from quire.weights.checkpoint import open_checkpoint
from quire.weights.dtypes import NUMPY_TYPES, bf16_bits
from quire.weights.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES, TABLE_TYPES

Float32s = NDArray[np.float32]
Array = NDArray[Any]
# The names of stored types, by what NumPy calls them.
_TYPES = {
    **{"float32": "F32", "float16": "F16", "uint16": "BF16"},
    **{"int32": "I32", "int64": "I64", "bool": "BOOL"},
}


def as_stored(values: Float32s, dtype: str) -> Array:
    """Return float32 values as they are stored in `dtype`: f32, f16 or bf16."""
    if dtype == "bf16":
        return bf16_bits(values)
    return values.astype({"f32": np.float32, "f16": np.float16}[dtype])


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; bf16 as uint16, see as_stored. Raises SettingError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, values in tensors.items():
        end = offset + values.nbytes
        header[name] = {
            "dtype": _TYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            with part.open("wb") as file:
                file.write(len(encoded).to_bytes(LENGTH_BYTES, "little"))
                file.write(encoded)
                for values in tensors.values():
                    file.write(np.ascontiguousarray(values).tobytes())
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with suppress(OSError):  # a full disk needs the space; the first error is reported
                part.unlink()
            raise


def read_tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors of a file, floats as float32 and whole numbers as int64, and its metadata.
    Raises WeightsError."""
    checkpoint = open_checkpoint(path)
    tensors: dict[str, Array] = {}
    for name in checkpoint.names:
        dtype, _ = checkpoint.describe(name)
        if dtype in TABLE_TYPES:
            tensors[name] = checkpoint.tensor(name).whole_numbers()
        elif dtype in NUMPY_TYPES:
            tensors[name] = checkpoint.read_f32(name)
        else:
            raise WeightsError(f"{path}: {name} is of {dtype}, which no training writes")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = parse_object(file.read(length), limit_bytes=MAX_HEADER_BYTES)
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise WeightsError(f"{path}: __metadata__ must map strings to strings")
    return tensors, metadata
