"""Wire: records to bytes and back, for borders between processes and for files of plans.

msgpack with typed decoding by msgspec: a frame names its record, and a decoder accepts only the
records it was made for, each field checked against its annotation. Arrays travel as (dtype,
shape, bytes) and must have the annotated dtype. Nothing is pickled; nothing runs on decoding but
the records' own checks.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from quire.base.errors import WorkerError


class WireError(WorkerError):
    """Bytes that are not a frame of a known record."""


class Wire:
    """Encodes and decodes the given record types (frozen dataclasses)."""

    def __init__(self, *record_types: type) -> None:
        self._names = {record_type: record_type.__name__ for record_type in record_types}
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
            name: msgspec.msgpack.Decoder(record_type, dec_hook=_array_from_wire)
            for record_type, name in self._names.items()
        }
        self._frame = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)

    def encode(self, record: object) -> bytes:
        """Return one frame. Raises WireError for a record type this wire was not made for."""
        name = self._names.get(type(record))
        if name is None:
            raise WireError(
                f"{type(record).__name__} is not a record of this wire; {self._known()}"
            )
        return self._encoder.encode((name, record))

    def decode(self, frame: bytes | memoryview) -> Any:
        """Return the record of a frame. Raises WireError where it is not one, or a field does not
        fit."""
        try:
            name, body = self._frame.decode(frame)
            decoder = self._decoders.get(name)
            if decoder is None:
                raise WireError(f"a frame holds a {name!r}; {self._known()}")
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise WireError(f"a frame of {len(frame)} bytes cannot be read: {error}") from error

    def _known(self) -> str:
        return "known here: " + ", ".join(sorted(self._decoders))


def _array_to_wire(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _array_from_wire(expected: Any, value: Any) -> Any:
    if not _is_array(expected):
        raise NotImplementedError(f"{expected} cannot be received")
    dtype_name, shape, payload = value
    dtype = np.dtype(dtype_name)
    wanted = _dtype_of(expected)
    if dtype.hasobject or (wanted is not None and dtype != wanted):
        raise ValueError(f"an array has dtype {dtype}, {wanted} is expected")
    array = np.frombuffer(payload, dtype).reshape(shape)
    return array


@cache
def _is_array(annotation: Any) -> bool:
    return get_origin(annotation) is np.ndarray or annotation is np.ndarray


@cache
def _dtype_of(annotation: Any) -> np.dtype[Any] | None:
    arguments = get_args(annotation)
    return np.dtype(get_args(arguments[1])[0]) if len(arguments) == 2 else None
