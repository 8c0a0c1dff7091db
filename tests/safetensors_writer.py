"""Write safetensors files for tests: valid ones, and invalid ones with any header.

The writer is independent on purpose: the reader under test must not be checked by itself. It uses
nothing of the package. bf16 values are given as float32 and rounded to nearest even here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[np.float32]]


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 values to bfloat16, ties to even; returns the upper 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encode(values: NDArray[np.float32], dtype: str) -> bytes:
    """Encode `values` stored as f32, f16 or bf16, little-endian."""
    if dtype == "bf16":
        return bf16_bits(values).astype("<u2").tobytes()
    return np.ascontiguousarray(values).astype({"f32": "<f4", "f16": "<f2"}[dtype]).tobytes()


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return `values` after a round trip through `dtype`, as float32."""
    raw = encode(values, dtype)
    if dtype == "bf16":
        wide = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(values.shape)
    stored = np.frombuffer(raw, {"f32": "<f4", "f16": "<f2"}[dtype])
    return stored.astype(np.float32).reshape(values.shape)


def write_safetensors(
    path: Path, tensors: Tensors, *, dtype: str = "f32", metadata: dict[str, str] | None = None
) -> Path:
    """Write a well-formed file, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, values in tensors.items():
        raw = encode(values, dtype)
        header[name] = {
            "dtype": dtype.upper(),
            "shape": list(values.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    return write_raw(path, json.dumps(header).encode(), body)


def write_raw(path: Path, header: bytes, body: bytes, *, said_length: int | None = None) -> Path:
    """Write any header and body; `said_length` overrides the header's length."""
    length = len(header) if said_length is None else said_length
    path.write_bytes(length.to_bytes(8, "little") + header + body)
    return path
