"""When requests arrive and how long they are: Poisson at a rate, or a recorded trace replayed.

Two public formats are read. Azure's: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
Mooncake's: JSON lines with timestamp (milliseconds), input_length, output_length and hash_ids,
one a block of 512 prompt tokens: equal ids stand for equal tokens, so replaying them meets the
prefix cache as the recorded service's did. Content is made up; lengths and sharing are real.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np

from quire.base.errors import SettingError
from quire.bench.workloads import Ask, Lengths, draw_ids

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace. block_ids: which blocks of its prompt others may share; empty: none.

    arrival_s counts from the trace's first request.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def poisson(
    lengths: Sequence[Lengths],
    *,
    per_s: float,
    seconds: float,
    vocab_size: int,
    rng: np.random.Generator,
) -> list[Ask]:
    """Requests that arrive independently, `per_s` a second on average, within `seconds`.

    Lengths are taken in turn. At least one request. Raises SettingError for a rate of 0 or less.
    """
    if not per_s > 0 or not seconds > 0:
        raise SettingError(f"{per_s} requests a second for {seconds} s; both must be above 0")
    asks: list[Ask] = []
    arrival_s = 0.0
    while arrival_s < seconds:
        one = lengths[len(asks) % len(lengths)]
        ids = draw_ids(one.prompt, vocab_size, rng)
        asks.append(
            Ask(prompt_ids=tuple(ids.tolist()), output_tokens=one.output, arrival_s=arrival_s)
        )
        arrival_s += float(rng.exponential(1 / per_s))
    return asks


def read_trace(path: Path, *, max_requests: int | None = None) -> list[Arrival]:
    """The first requests of a trace, in order of arrival; the format is told by the content.

    Raises SettingError naming the line where the file is neither format.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            first = lines.readline()
            lines.seek(0)
            if first.lstrip().startswith("{"):
                reader = enumerate(lines, start=1)
                found = [
                    _mooncake(path, number, line)
                    for number, line in islice(reader, max_requests)
                    if line.strip()
                ]
            else:
                rows = enumerate(csv.DictReader(lines), start=2)
                found = [_azure(path, number, row) for number, row in islice(rows, max_requests)]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: the trace cannot be read: {error}") from error
    if not found:
        raise SettingError(f"{path}: the trace has no requests")
    start_s = min(one.arrival_s for one in found)
    moved = [replace(one, arrival_s=one.arrival_s - start_s) for one in found]
    return sorted(moved, key=lambda one: one.arrival_s)


def replay(
    trace: Sequence[Arrival],
    *,
    speed: float,
    max_tokens: int,
    vocab_size: int,
    rng: np.random.Generator,
) -> tuple[list[Ask], int]:
    """The trace's requests, `speed` times as fast, and how many were left out.

    A request of more than `max_tokens`, prompt and output, is left out: the model could not hold
    it. Raises SettingError where that leaves none.
    """
    if not speed > 0:
        raise SettingError(f"the speed is {speed}; it must be above 0")
    fit = [one for one in trace if one.prompt_tokens + one.output_tokens <= max_tokens]
    if not fit:
        raise SettingError(
            f"none of the {len(trace)} requests of the trace has at most {max_tokens} tokens; "
            "raise --max-tokens as far as the model's context allows"
        )
    blocks: dict[int, tuple[int, ...]] = {}
    asks = []
    for one in fit:
        ids: list[int] = []
        for block_id in one.block_ids:
            if block_id not in blocks:
                drawn = draw_ids(MOONCAKE_BLOCK_TOKENS, vocab_size, rng)
                blocks[block_id] = tuple(drawn.tolist())
            ids += blocks[block_id]
        if len(ids) < one.prompt_tokens:
            ids += draw_ids(one.prompt_tokens - len(ids), vocab_size, rng).tolist()
        asks.append(
            Ask(
                prompt_ids=tuple(ids[: one.prompt_tokens]),
                output_tokens=one.output_tokens,
                arrival_s=one.arrival_s / speed,
            )
        )
    return asks, len(trace) - len(fit)


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
        return Arrival(
            arrival_s=float(entry["timestamp"]) / 1000,
            prompt_tokens=max(int(entry["input_length"]), 1),
            output_tokens=max(int(entry["output_length"]), 1),
            block_ids=tuple(int(block_id) for block_id in entry.get("hash_ids", ())),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, number) from error


def _unreadable(path: Path, number: int) -> SettingError:
    return SettingError(
        f"{path}: line {number} is no request; a CSV with TIMESTAMP, ContextTokens and "
        "GeneratedTokens (Azure) or JSON lines with timestamp, input_length and output_length "
        "(Mooncake) are read"
    )
