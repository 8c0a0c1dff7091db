"""Tensors of the KServe protocol: texts and token ids in, texts and token ids out.

Contents are typed or raw: raw ones are little-endian numbers, and texts each behind its length in
four bytes. Knows no engine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.api.rpc.messages import kserve_v2 as messages
from quire.base.errors import InvalidParameter
from quire.base.show import show

TEXT_INPUT, IDS_INPUT = "text_input", "input_ids"
TEXT_OUTPUT, IDS_OUTPUT, REASON_OUTPUT = "text_output", "output_ids", "finish_reason"
OUTPUTS = (TEXT_OUTPUT, IDS_OUTPUT, REASON_OUTPUT)
_ID_TYPES = {"INT32": "<i4", "INT64": "<i8"}


def prompt_of(asked: Any) -> str | list[int]:
    """Return the text or the token ids of a request. Raises InvalidParameter."""
    names = [tensor.name for tensor in asked.inputs]
    if names not in ([TEXT_INPUT], [IDS_INPUT]):
        raise _fault(
            f"the inputs are {show(names)}; one is needed: {TEXT_INPUT} (BYTES [1]), or "
            f"{IDS_INPUT} (INT32 or INT64 [n])"
        )
    raw = list(asked.raw_input_contents)
    if len(raw) > 1:
        raise _fault(f"raw_input_contents has {len(raw)} entries for 1 input")
    tensor = asked.inputs[0]
    num_values = _num_values(tensor)
    return (
        _text(tensor, raw, num_values)
        if tensor.name == TEXT_INPUT
        else _ids(tensor, raw, num_values)
    )


def fields_of(asked: Any) -> dict[str, Any]:
    """Return the parameters of a request as fields. Raises InvalidParameter."""
    fields: dict[str, Any] = {}
    for name, parameter in asked.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidParameter(f"parameter {show(name)} has no value", param=name[:64])
        fields[name] = getattr(parameter, kind)
    return fields


def answer_of(
    asked: Any,
    *,
    model: str,
    request_id: str,
    text: str,
    token_ids: Sequence[int],
    finish_reason: str,
) -> Any:
    """Return the response: the outputs that were asked for, else all of them."""
    wanted = [output.name for output in asked.outputs] or list(OUTPUTS)
    answer = messages.ModelInferResponse(model_name=model, id=asked.id or request_id)
    values: dict[str, Any] = {
        TEXT_OUTPUT: text.encode(),
        IDS_OUTPUT: list(token_ids),
        REASON_OUTPUT: finish_reason.encode(),
    }
    is_raw = bool(asked.raw_input_contents)
    for name in wanted:
        value, is_text = values[name], name != IDS_OUTPUT
        tensor = answer.outputs.add(
            name=name,
            datatype="BYTES" if is_text else "INT32",
            shape=[1 if is_text else len(value)],
        )
        if is_raw:
            answer.raw_output_contents.append(
                struct.pack("<I", len(value)) + value
                if is_text
                else np.asarray(value, "<i4").tobytes()
            )
        elif is_text:
            tensor.contents.bytes_contents.append(value)
        else:
            tensor.contents.int_contents.extend(value)
    return answer


def check_outputs(asked: Any) -> None:
    """Raise InvalidParameter for outputs that there are not."""
    for output in asked.outputs:
        if output.name not in OUTPUTS:
            raise InvalidParameter(
                f"output {show(output.name)} is not known; {', '.join(OUTPUTS)} are",
                param="outputs",
            )


def _num_values(tensor: Any) -> int:
    """Return the values that the shape says: [n], or [1, n] as of a batch of one."""
    shape = list(tensor.shape)
    if not shape or len(shape) > 2 or min(shape) < 0 or (len(shape) == 2 and shape[0] != 1):
        raise _fault(f"{tensor.name} has the shape {shape}; [n] or [1, n] is allowed")
    return int(shape[-1])


def _text(tensor: Any, raw: list[bytes], num_values: int) -> str:
    if tensor.datatype != "BYTES" or num_values != 1:
        raise _fault(
            f"{TEXT_INPUT} is {show(tensor.datatype)} {list(tensor.shape)}; BYTES [1] is allowed"
        )
    if raw:
        (size,) = struct.unpack("<I", raw[0][:4]) if len(raw[0]) >= 4 else (-1,)
        texts = [raw[0][4:]]
        if size != len(texts[0]):
            raise _fault(
                f"the raw contents of {TEXT_INPUT} have {len(raw[0])} bytes; the length of the "
                "text in four bytes, then the bytes of the text, are needed"
            )
    else:
        texts = list(tensor.contents.bytes_contents)
    if len(texts) != 1:
        raise _fault(f"{TEXT_INPUT} has {len(texts)} values; one is needed")
    try:
        return texts[0].decode()
    except UnicodeDecodeError as error:
        raise _fault(f"{TEXT_INPUT} is not UTF-8: {error}") from error


def _ids(tensor: Any, raw: list[bytes], num_values: int) -> list[int]:
    kind = tensor.datatype
    if kind not in _ID_TYPES:
        raise _fault(f"{IDS_INPUT} is {show(kind)}; {' or '.join(_ID_TYPES)} is allowed")
    if raw:
        dtype = np.dtype(_ID_TYPES[kind])
        if len(raw[0]) != num_values * dtype.itemsize:
            raise _fault(
                f"the raw contents of {IDS_INPUT} have {len(raw[0])} bytes; {num_values} values of "
                f"{kind} have {num_values * dtype.itemsize}"
            )
        ids: list[int] = np.frombuffer(raw[0], dtype).tolist()
    else:
        contents = tensor.contents
        ids = list(contents.int_contents if kind == "INT32" else contents.int64_contents)
    if len(ids) != num_values:
        raise _fault(f"{IDS_INPUT} has {len(ids)} values; its shape says {num_values}")
    return ids


def _fault(message: str) -> InvalidParameter:
    return InvalidParameter(message, param="inputs")
