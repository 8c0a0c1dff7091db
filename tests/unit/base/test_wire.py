"""Wire: records round-trip; anything else is rejected, and nothing is executed."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from quire.base.errors import InvalidParameter
from quire.base.records import (
    FinishReason,
    Int32s,
    RequestOutput,
    RequestTimes,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.base.sampling_params import SamplingParams
from quire.base.wire import Wire, WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    ids: Int32s


def test_arrays_round_trip_with_dtype_shape_and_bits() -> None:
    result = StepResult(
        step=7,
        token_counts=np.array([1, 0], np.int32),
        token_ids=np.array([3], np.int32),
        logprobs=np.array([np.nan], np.float32),
        top_ids=np.array([[1, -1]], np.int32),
        top_logprobs=np.array([[-0.5, np.nan]], np.float32),
    )
    wire = Wire(StepResult)
    back = wire.decode(wire.encode(result))
    for name in ("token_counts", "token_ids", "logprobs", "top_ids", "top_logprobs"):
        one, other = getattr(result, name), getattr(back, name)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_an_output_round_trips() -> None:
    output = RequestOutput(
        request_id="a/0",
        token_ids=(1, 2),
        logprobs=(TokenLogprobs(token_id=2, logprob=-0.25, top=((2, -0.25), (5, -3.5))),),
        finish_reason=FinishReason.STOP,
        stop_id=2,
        times=RequestTimes(
            arrival_ms=1.0, first_scheduled_ms=2.0, first_token_ms=3.0, last_token_ms=4.0
        ),
    )
    wire = Wire(RequestOutput)
    assert wire.decode(wire.encode(output)) == output


def test_sampling_parameters_are_checked_on_arrival() -> None:
    wire = Wire(SamplingParams)
    params = SamplingParams(logit_bias={7: 1.5}, stop=("x",), seed=-(2**63))
    assert wire.decode(wire.encode(params)) == params
    frame = msgspec.msgpack.encode(("SamplingParams", {"temperature": -1.0}))
    with pytest.raises((WireError, InvalidParameter)):
        wire.decode(frame)


def test_an_unknown_record_is_rejected_in_both_directions() -> None:
    with pytest.raises(WireError, match="StepPlan is not a record of this wire"):
        Wire(StepResult).encode(StepPlan(step=1))
    with pytest.raises(WireError, match="a frame holds a 'StepPlan'; known here: StepResult"):
        Wire(StepResult).decode(Wire(StepPlan).encode(StepPlan(step=1)))


@pytest.mark.parametrize(
    "payload",
    [
        ("<f4", (2,), b"12345678"),  # another dtype
        ("|O", (1,), b"12345678"),  # objects
        ("<i4", (3,), b"12345678"),  # a shape that its bytes do not fill
        ("<i4", (-1, 3), b"12345678"),
        ("<i4", "2", b"12345678"),
        "12345678",
        None,
    ],
)
def test_an_unexpected_array_is_rejected(payload: object) -> None:
    with pytest.raises(WireError):
        Wire(Arrays).decode(msgspec.msgpack.encode(("Arrays", {"ids": payload})))


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x00", pickle.dumps(1), b"\x92\xa6Arrays"])
def test_bytes_that_are_no_frame_are_rejected(frame: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        Wire(Arrays).decode(frame)


def test_only_sendable_fields_are_sent() -> None:
    with pytest.raises((WireError, NotImplementedError)):
        Wire(Arrays).encode(Arrays(ids=object()))  # type: ignore[arg-type]
