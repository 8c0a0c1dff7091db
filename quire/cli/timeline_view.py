"""Draw the timeline of a request for a terminal of 80 columns, in plain characters.

Input: the JSON of GET /v1/requests/{id}/timeline. Knows no server.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from quire.obs.timeline import CAUSE_WORDS, WAIT_WORDS, Cause

WIDTH = 80
_BAR = 50
_NUM_GAPS = 8
_LABELS = 14
_MAX_EVENTS = 12

Json = Mapping[str, Any]


def drawn(timeline: Json) -> list[str]:
    """Return the lines of a timeline, at most 80 columns each."""
    lines = [f"request {timeline['id']} ({timeline['state']})"]
    streams = timeline["streams"]
    for one in streams:
        if len(streams) > 1:
            lines += ["", f"stream {one['stream']} of prompt {one['prompt']}"]
        lines += _stream(one)
    return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    """Return a line in parts of at most 80 columns; further ones are indented as its text is."""
    indent = " " * min(len(line) - len(line.lstrip()), _LABELS)
    if line.startswith("  "):
        indent = " " * (_LABELS + 2)
    parts = textwrap.wrap(
        line, WIDTH, subsequent_indent=indent or "  ", drop_whitespace=False, break_on_hyphens=False
    )
    return [part.rstrip() for part in parts] or [""]


def _stream(one: Json) -> list[str]:
    cached = f", {one['cached_tokens']} cached" if one["cached_tokens"] else ""
    lines = [
        f"{one['prompt_tokens']} prompt tokens{cached}, {one['completion_tokens']} output tokens, "
        f"{_ms(one['total_ms'])}, finish: {one['finish_reason'] or 'still running'}",
        "",
        *_bars(one),
        "",
        *_queue(one),
        *_cache(one),
        *_prefill(one),
        *_gaps(one),
        *_events(one),
    ]
    if one["steps_missing"]:
        lines.append("The first steps are kept no more; raise --timeline-steps to keep more.")
    return lines


def _bars(one: Json) -> list[str]:
    """Draw queue, prefill, decoding and time without a slot below each other on one scale."""
    total = max(one["total_ms"], 1e-9)
    first = one["first_token_ms"]
    waits = [(span["at_ms"], span["at_ms"] + span["ms"]) for span in one["queue"]["spans"]]
    chunks = [(chunk["at_ms"], chunk["at_ms"] + chunk["ms"]) for chunk in one["prefill"]["chunks"]]
    rows: list[tuple[str, str, list[tuple[float, float]], float]] = [
        ("queue", ".", waits, sum(end - begin for begin, end in waits)),
        ("prefill", "=", chunks, one["prefill"]["ms"]),
    ]
    if first is not None:
        gaps = [(gap["at_ms"], gap["at_ms"] + gap["ms"]) for gap in one["gaps"]]
        decode_ms = sum(end - begin for begin, end in gaps)
        rows.append(("decode", "#", gaps, decode_ms))
        slow = [(begin, end) for begin, end in gaps if end - begin >= 3 * _median(gaps)]
        if slow:
            rows.append(("slow gaps", "!", slow, sum(end - begin for begin, end in slow)))
    lines = [
        f"{name:<10}|{_bar(spans, total, mark)}| {_ms(ms):>12}" for name, mark, spans, ms in rows
    ]
    if first is not None:
        at = min(int(first / total * _BAR), _BAR - 1)
        lines.append(" " * 11 + " " * at + f"^ first token at {_ms(first)}")
    return lines


def _bar(spans: Sequence[tuple[float, float]], total: float, mark: str) -> str:
    cells = [" "] * _BAR
    for begin, end in spans:
        first = min(max(int(begin / total * _BAR), 0), _BAR - 1)
        last = min(max(int(end / total * _BAR), first + 1), _BAR)
        cells[first:last] = mark * (last - first)
    return "".join(cells)


def _median(gaps: Sequence[tuple[float, float]]) -> float:
    lengths = sorted(end - begin for begin, end in gaps)
    return lengths[len(lengths) // 2] if lengths else 0.0


def _queue(one: Json) -> list[str]:
    queue = one["queue"]
    lines = [f"{'queue':<{_LABELS}}{_ms(queue['ms'])}"]
    lines += [f"  {_ms(why['ms']):>12}  {why['description']}" for why in queue["reasons"]]
    if queue["overtaken_by"]:
        count = queue["overtaken_by"]
        lines.append(f"{'':<{_LABELS}}{count} later requests were admitted before it")
    return lines


def _cache(one: Json) -> list[str]:
    cache = one["cache"]
    text = f"{cache['cached_tokens']} of {one['prompt_tokens']} prompt tokens found"
    lines = [f"{'prefix cache':<{_LABELS}}{text}"]
    miss = cache["first_miss"]
    if miss is not None:
        lines.append(f"  {'token ' + str(miss['token']):>12}  {miss['description']}")
    return lines


def _prefill(one: Json) -> list[str]:
    chunks = one["prefill"]["chunks"]
    if not chunks:
        return []
    tokens = sum(chunk["tokens"] for chunk in chunks)
    steps = "1 step" if len(chunks) == 1 else f"{len(chunks)} steps"
    lines = [f"{'prefill':<{_LABELS}}{_ms(one['prefill']['ms'])}: {tokens} tokens in {steps}"]
    totals: dict[str, float] = {}
    for chunk in chunks:
        for part in chunk["causes"]:
            totals[part["cause"]] = totals.get(part["cause"], 0.0) + part["ms"]
    return lines + _causes([{"cause": cause, "ms": ms} for cause, ms in totals.items()])


def _gaps(one: Json) -> list[str]:
    gaps = one["gaps"]
    if not gaps:
        return []
    total = sum(gap["ms"] for gap in gaps)
    lines = [f"{'gaps':<{_LABELS}}{len(gaps)} between tokens, {_ms(total)} in all"]
    lines += _causes(one["causes"])
    slowest = sorted(gaps, key=lambda gap: -gap["ms"])[:_NUM_GAPS]
    lines.append("slowest gaps")
    for gap in sorted(slowest, key=lambda gap: gap["at_ms"]):
        causes = ", ".join(f"{part['cause']} {_ms(part['ms'])}" for part in gap["causes"][:3])
        lines.append(f"  {_ms(gap['ms']):>12}  token {gap['token']}: {causes}")
    return lines


def _causes(causes: Sequence[Json]) -> list[str]:
    total = sum(part["ms"] for part in causes) or 1.0
    return [
        f"  {_ms(part['ms']):>12}  {part['ms'] / total:4.0%}  {CAUSE_WORDS[Cause(part['cause'])]}"
        for part in sorted(causes, key=lambda part: -part["ms"])
    ]


def _events(one: Json) -> list[str]:
    shown = [event for event in one["events"] if event["event"] != "admitted"]
    if not shown:
        return []
    lines = ["events"]
    for event in shown[:_MAX_EVENTS]:
        detail = f" for {_for(event['for'])}, blocks {event['blocks']}" if "for" in event else ""
        if not detail and "blocks" in event:
            detail = f" ({event['blocks']} blocks)"
        lines.append(f"  {_ms(event['at_ms']):>12}  {event['event'].replace('_', ' ')}{detail}")
    left = len(shown) - _MAX_EVENTS + one["dropped_events"]
    if left > 0:
        lines.append(f"  {'':>12}  and {left} more")
    return lines


def _for(reason: str) -> str:
    words = {
        "answer": "another request's next token",
        "prompt": "another request's prompt",
        "turn": "a request that ranks before it",
        "ceiling": "its tenant's ceiling",
    }
    return words.get(reason, WAIT_WORDS.get(reason, reason))


def _ms(ms: float) -> str:
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:.1f} ms" if ms < 1000 else f"{ms:,.0f} ms"
