"""Recordings of a server's requests: the format that `quire record` writes, and its reader.

JSON lines. The first is a RecordingHeader with the format's version; each other is a
RecordedRequest, written when the request has ended, or DroppedRequests. A recording without content
has lengths, times and sampling parameters. Equal `block_ids` stand for equal blocks of prompt
tokens with equal tokens before them; they are digests under a key that is discarded, so no token
can be guessed from them. A recording with content also has the token ids of prompts and outputs.

Always holds: a file is read line by line, within bounds on each line and number; one that is cut
short, damaged or of another version raises SettingError with the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from quire.base.errors import SettingError

VERSION = 1
MAX_LINE_BYTES = 64 << 20
MAX_REQUESTS = 10_000_000
# A server sends an empty line after so many seconds without another; a recording without any line
# for IDLE_S has failed.
HEARTBEAT_S = 15.0
IDLE_S = 4 * HEARTBEAT_S
_MARK = b'{"quire_recording":'
_DROPPED = b'{"dropped":'

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
TokenIds = tuple[Count, ...]


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line. created: UTC, as in 2026-01-31T12:00:00Z. fingerprint: of the answers, as in
    `system_fingerprint`. block_tokens: prompt tokens per block id. content: requests have token
    ids."""

    quire_recording: int
    created: str
    model: str
    fingerprint: str
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    content: bool


class RecordedRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One prompt and its choices. arrival_ms: on a clock that only differences are taken of.

    output_tokens, finish_reasons: of each choice; "abort" if the client disconnected, "error"
    if the server failed. ttft_ms, total_ms: from arrival to the first and the last token.
    sampling, scheduling: the parameters that are not defaults. first_stream: above 0 for further
    prompts of one request. prompt_ids, output_ids: in a recording with content.
    """

    arrival_ms: Milliseconds
    prompt_tokens: Count
    output_tokens: TokenIds
    finish_reasons: tuple[str, ...]
    block_ids: tuple[BlockId, ...] = ()
    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds | None = None
    sampling: dict[str, Any] = {}
    scheduling: dict[str, Any] = {}
    first_stream: Count = 0
    prompt_ids: TokenIds | None = None
    output_ids: tuple[TokenIds, ...] | None = None


class DroppedRequests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many requests are missing: the reader of the recording was too slow, or the server refused
    them for another reason than their fields."""

    dropped: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording that was read. requests: in order of arrival, the first at 0 ms."""

    header: RecordingHeader
    requests: tuple[RecordedRequest, ...]
    num_dropped: int


Line = RecordingHeader | RecordedRequest | DroppedRequests
_encoder = msgspec.json.Encoder()
_decode_header = msgspec.json.Decoder(RecordingHeader).decode
_decode_request = msgspec.json.Decoder(RecordedRequest).decode
_decode_dropped = msgspec.json.Decoder(DroppedRequests).decode


def encode_line(line: Line) -> bytes:
    """Return a line of a recording with its line end."""
    return _encoder.encode(line) + b"\n"


def num_dropped_of(line: bytes) -> int:
    """Return how many requests a line says were dropped; 0 for any other line."""
    return _decode_dropped(line).dropped if line.startswith(_DROPPED) else 0


def is_recording(first_line: str) -> bool:
    """Return whether a file that begins with this line is a recording."""
    return first_line.startswith(_MARK.decode())


def read_recording(path: Path, *, max_requests: int | None = None) -> Recording:
    """Read a recording, or the first requests of it. Raises SettingError with the line."""
    try:
        with path.open("rb") as file:
            header = _header(path, file)
            limit = MAX_REQUESTS if max_requests is None else max_requests
            requests: list[RecordedRequest] = []
            num_dropped = 0
            for number, line in _lines(path, file):
                if len(requests) >= limit:
                    if max_requests is None:
                        raise SettingError(
                            f"{path} has more than {MAX_REQUESTS} requests; use a part of it with "
                            "--max-requests"
                        )
                    break
                found = _request(path, number, line, header)
                if isinstance(found, DroppedRequests):
                    num_dropped += found.dropped
                else:
                    requests.append(found)
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read: {error.strerror}; `quire record URL FILE` writes a recording"
        ) from error
    if not requests:
        raise SettingError(f"{path} has no requests; record while requests are sent")
    start_ms = min(one.arrival_ms for one in requests)
    moved = [msgspec.structs.replace(one, arrival_ms=one.arrival_ms - start_ms) for one in requests]
    moved.sort(key=lambda one: one.arrival_ms)
    return Recording(header=header, requests=tuple(moved), num_dropped=num_dropped)


def _header(path: Path, file: BinaryIO) -> RecordingHeader:
    line = file.readline(MAX_LINE_BYTES)
    if not line.startswith(_MARK):
        raise SettingError(f"{path} is no recording; `quire record URL FILE` writes one")
    version = re.match(rb"\s*(\d{1,9})\b", line.removeprefix(_MARK))
    if version is not None and int(version[1]) != VERSION:
        raise SettingError(
            f"{path} is a recording of version {int(version[1])}; this release reads version "
            f"{VERSION}: use the release that wrote it"
        )
    try:
        return _decode_header(line)
    except msgspec.MsgspecError as error:
        raise SettingError(f"{path}: line 1 is no header of a recording: {error}") from error


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 1
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise SettingError(f"{path}: line {number} has more than {MAX_LINE_BYTES} bytes")
        if not line.endswith(b"\n"):
            raise SettingError(
                f"{path}: line {number} is incomplete, so the file was cut short; remove that "
                "line, or give --max-requests to read those before it"
            )
        if line.strip():
            yield number, line


def _request(
    path: Path, number: int, line: bytes, header: RecordingHeader
) -> RecordedRequest | DroppedRequests:
    try:
        if line.startswith(_DROPPED):
            return _decode_dropped(line)
        found = _decode_request(line)
    except msgspec.MsgspecError as error:
        raise SettingError(f"{path}: line {number} is no recorded request: {error}") from error
    counts = [len(found.finish_reasons)]
    if header.content:
        if found.prompt_ids is None or found.output_ids is None:
            raise SettingError(f"{path}: line {number} has no token ids, but the header says so")
        counts.append(len(found.output_ids))
        counts += [0] * (len(found.prompt_ids) != found.prompt_tokens)
        lengths = tuple(len(ids) for ids in found.output_ids)
        counts += [0] * (lengths != found.output_tokens)
    if not found.output_tokens or any(count != len(found.output_tokens) for count in counts):
        raise SettingError(
            f"{path}: line {number} contradicts itself: its numbers of tokens and of choices must "
            "match; the file was changed"
        )
    if len(found.block_ids) * header.block_tokens > found.prompt_tokens:
        raise SettingError(f"{path}: line {number} has more blocks than its prompt has tokens")
    return found
