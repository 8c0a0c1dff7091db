"""Recordings: what is written is read again; damaged files are refused with their line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from quire.base.errors import InvalidParameter, SettingError
from quire.base.grammar import choice, json_object, regex, structural_tag
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import SchedulingParams
from quire.obs import recording
from quire.obs.recording import (
    DroppedRequests,
    RecordedRequest,
    RecordingHeader,
    encode_line,
    read_recording,
)
from quire.obs.request_fields import (
    CONTENT,
    sampling_fields,
    sampling_of,
    scheduling_fields,
    scheduling_of,
)
from quire.obs.trace import read_trace

HEADER = RecordingHeader(
    quire_recording=1,
    created="2026-01-31T12:00:00Z",
    model="tiny",
    fingerprint="fp_1",
    block_tokens=16,
    content=False,
)
LATE = RecordedRequest(
    arrival_ms=7_500.0,
    prompt_tokens=40,
    output_tokens=(5, 7),
    finish_reasons=("stop", "length"),
    block_ids=(91, 92),
    sampling={"n": 2},
)
EARLY = RecordedRequest(
    arrival_ms=7_000.0,
    prompt_tokens=20,
    output_tokens=(3,),
    finish_reasons=("abort",),
    block_ids=(91,),
    ttft_ms=12.5,
    total_ms=20.0,
)
WITH_IDS = structs.replace(
    EARLY, prompt_ids=tuple(range(20)), output_ids=((4, 5, 6),), block_ids=()
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(*lines: Any) -> Path:
        path = tmp_path / "recording.jsonl"
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else encode_line(line) for line in lines)
        )
        return path

    return write


def test_requests_are_read_in_order_of_arrival(write: Any) -> None:
    path = write(HEADER, LATE, b"\n", DroppedRequests(dropped=2), EARLY, DroppedRequests(dropped=1))
    found = read_recording(path)
    assert found.header == HEADER
    assert found.num_dropped == 3
    assert found.requests == (
        structs.replace(EARLY, arrival_ms=0.0),
        structs.replace(LATE, arrival_ms=500.0),
    )
    assert len(read_recording(path, max_requests=1).requests) == 1


def test_a_recording_is_a_trace_with_an_arrival_for_each_choice(write: Any) -> None:
    arrivals = read_trace(write(HEADER, LATE, EARLY))
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in arrivals] == [
        (0.0, 20, 3),
        (0.5, 40, 5),
        (0.5, 40, 7),
    ]
    assert [one.block_ids for one in arrivals] == [(0,), (0, 1), (0, 1)]
    assert {one.block_tokens for one in arrivals} == {16}


_LINE = encode_line(EARLY)
_OLD = encode_line(HEADER).replace(b":1,", b":7,", 1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((b"",), "is no recording"),
        ((b"\xff\xfe",), "is no recording"),
        ((b'{"timestamp": 69}\n',), "is no recording"),
        ((_OLD, EARLY), "of version 7; this release reads version 1"),
        ((b'{"quire_recording":1}\n', EARLY), "line 1 is no header"),
        ((HEADER,), "has no requests"),
        ((HEADER, EARLY, _LINE[:-9]), "line 3 is incomplete, so the file was cut short"),
        ((HEADER, b"[]\n"), "line 2 is no recorded request"),
        ((HEADER, b"[" * 100_000 + b"\n"), "line 2 is no recorded request"),
        ((HEADER, _LINE.replace(b"[3]", b"[-3]")), r"line 2 is no recorded request.*output_tokens"),
        ((HEADER, _LINE.replace(b"7000.0", b"1e999")), "line 2 is no recorded request"),
        ((HEADER, _LINE.replace(b'"ttft_ms"', b'"more"')), "line 2 is no recorded request.*more"),
        ((HEADER, _LINE.replace(b"[3]", b"[3,4]")), "line 2 contradicts itself"),
        ((HEADER, _LINE.replace(b"[3]", b"[]")), "line 2 contradicts itself"),
        ((HEADER, _LINE.replace(b"[91]", b"[91,92]")), "more blocks than its prompt has tokens"),
        ((structs.replace(HEADER, content=True), EARLY), "line 2 has no token ids"),
        (
            (
                structs.replace(HEADER, content=True),
                structs.replace(WITH_IDS, output_ids=((4,),)),
            ),
            "line 2 contradicts itself",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(write: Any, lines: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_recording(write(*lines))


def test_a_line_without_end_is_not_read_into_memory(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_LINE_BYTES", 500)
    with pytest.raises(SettingError, match="line 2 has more than 500 bytes"):
        read_recording(write(HEADER, b"x" * 5_000 + b"\n"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        read_recording(tmp_path / "none")


RARE = SamplingParams(
    n=2,
    temperature=0.5,
    top_p=0.9,
    seed=7,
    max_tokens=9,
    stop=("END", "\n"),
    stop_token_ids=(3,),
    logit_bias={5: -math.inf, 6: 1.5},
    bad_words=("no",),
    allowed_token_ids=(6, 7),
    logprobs=2,
)
GRAMMARS = (
    json_object(whitespace=""),
    json_object(whitespace="[ ]?"),
    regex("[0-9]+"),
    choice(("yes", "no")),
    structural_tag({"type": "structural_tag", "format": {"type": "any_text"}}),
)


@pytest.mark.parametrize(
    "sampling",
    [
        RARE,
        SamplingParams(use_beam_search=True, n=2, best_of=4, early_stopping="never"),
        *(SamplingParams(seed=1, structured_outputs=grammar) for grammar in GRAMMARS),
    ],
)
def test_parameters_are_the_same_after_a_recording(sampling: SamplingParams) -> None:
    line = encode_line(structs.replace(EARLY, sampling=sampling_fields(sampling, content=True)))
    again = recording._decode_request(line).sampling
    assert sampling_of(again) == sampling


def test_without_content_no_field_quotes_a_text() -> None:
    fields = sampling_fields(RARE, content=False)
    assert not CONTENT & fields.keys()
    assert fields == {
        **{"n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 9, "logprobs": 2}
    }


def test_scheduling_parameters_are_kept_without_the_tenant() -> None:
    terms = SchedulingParams(tenant="acme", priority=3, ttft_slo_ms=200.0)
    assert scheduling_fields(terms) == {"priority": 3, "ttft_slo_ms": 200.0}
    assert scheduling_of(scheduling_fields(terms)) == SchedulingParams(
        priority=3, ttft_slo_ms=200.0
    )


@pytest.mark.parametrize("read", [sampling_of, scheduling_of])
def test_unknown_parameters_are_refused_by_name(read: Any) -> None:
    with pytest.raises(InvalidParameter, match="'tenant_of' is no"):
        read({"tenant_of": 1})


def test_a_damaged_bias_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="logit_bias"):
        sampling_of({"logit_bias": [["x", 1]]})
