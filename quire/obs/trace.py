"""Read recorded traces: arrival times and lengths of requests, as services publish them.

Three formats are read. Azure's: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake's:
JSON lines with timestamp (milliseconds), input_length, output_length and hash_ids, one per block of
512 prompt tokens: equal ids stand for equal tokens. Recordings of `quire record` (recording.py). A
replay makes up content; lengths and sharing are recorded.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from quire.base.errors import SettingError
from quire.obs.recording import is_recording, read_recording

MOONCAKE_BLOCK_TOKENS = 512
# A made-up trace in Mooncake's format; bench/example_trace.py writes it.
EXAMPLE_TRACE = Path(__file__).with_name("example_trace.jsonl")
_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
_FORMATS = (
    "a CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure), JSON lines with timestamp, "
    "input_length and output_length (Mooncake), and recordings of `quire record` are read"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace. block_ids: blocks of its prompt that others may share; may be empty.

    arrival_s counts from the trace's first request. block_tokens: prompt tokens of each block.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def read_trace(path: Path, *, max_requests: int | None = None) -> list[Arrival]:
    """Return the first requests of a trace, in order of arrival; the format is detected.

    Raises SettingError with the line number where the file has none of the formats.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            first = lines.readline()
            if is_recording(first):
                return _recorded(path, max_requests)
            lines.seek(0)
            if first.lstrip().startswith("{"):
                reader = enumerate(lines, start=1)
                found = [
                    _mooncake(path, number, line)
                    for number, line in islice(reader, max_requests)
                    if line.strip()
                ]
            else:
                table = csv.DictReader(lines)
                if table.fieldnames is not None and _COLUMNS - set(table.fieldnames):
                    raise SettingError(f"{path}: line 1 is no header of a trace; {_FORMATS}")
                rows = enumerate(table, start=2)
                found = [_azure(path, number, row) for number, row in islice(rows, max_requests)]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{path}: the trace cannot be read: {reason}; {_FORMATS}") from error
    if not found:
        raise SettingError(f"{path}: the trace has no requests; {_FORMATS}")
    start_s = min(one.arrival_s for one in found)
    moved = [replace(one, arrival_s=one.arrival_s - start_s) for one in found]
    return sorted(moved, key=lambda one: one.arrival_s)


def _recorded(path: Path, max_requests: int | None) -> list[Arrival]:
    """Return one arrival for each choice; those of one prompt share its blocks."""
    recording = read_recording(path, max_requests=max_requests)
    numbers: dict[int, int] = {}
    return [
        Arrival(
            arrival_s=one.arrival_ms / 1000,
            prompt_tokens=max(one.prompt_tokens, 1),
            output_tokens=max(output_tokens, 1),
            block_ids=tuple(numbers.setdefault(id_, len(numbers)) for id_ in one.block_ids),
            block_tokens=recording.header.block_tokens,
        )
        for one in recording.requests
        for output_tokens in one.output_tokens
    ]


def _azure(path: Path, number: int, row: dict[str, str]) -> Arrival:
    try:
        # Seven digits of a second are written; six are understood.
        moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
        return Arrival(
            arrival_s=(moment - datetime(1970, 1, 1)).total_seconds(),
            prompt_tokens=max(int(row["ContextTokens"]), 1),
            output_tokens=max(int(row["GeneratedTokens"]), 1),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, number) from error


def _mooncake(path: Path, number: int, line: str) -> Arrival:
    try:
        entry = json.loads(line)
        arrival_s = float(entry["timestamp"]) / 1000
        if not math.isfinite(arrival_s):  # NaN and Infinity are read as numbers
            raise _unreadable(path, number)
        return Arrival(
            arrival_s=arrival_s,
            prompt_tokens=max(int(entry["input_length"]), 1),
            output_tokens=max(int(entry["output_length"]), 1),
            block_ids=tuple(int(block_id) for block_id in entry.get("hash_ids", ())),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, number) from error


def _unreadable(path: Path, number: int) -> SettingError:
    return SettingError(f"{path}: line {number} is no request; {_FORMATS}")
