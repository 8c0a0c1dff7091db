"""Trace files: steps, requests and KV tiers of an engine, for Perfetto and chrome://tracing.

The JSON array form of the Trace Event Format (docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): one event a line, and no closing bracket is needed,
so after SIGKILL a file is complete up to its last line. A thread reads the step history
the engine keeps anyway; the engine waits for nothing. Always holds: what the file cannot take (a
full disk, a slow one) is dropped and counted, and the file ends with a whole event.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from quire.base.engine_stats import EngineStats
from quire.base.report import Report
from quire.base.timeline import EventKind
from quire.engine.process.messages import FromEngine, Outputs
from quire.scheduler.request_history import RequestHistory
from quire.scheduler.step_history import StepHistory, copied

# Seconds between looks at the history.
EVERY_S = 0.1
# Largest size of a file; what is beyond is dropped.
MAX_FILE_BYTES = 8 << 30
# Events written between two looks at most; what is beyond is dropped.
MAX_EVENTS = 20_000
_PID = 1
_STEPS = 1
Event = dict[str, Any]

_COUNTERS: tuple[tuple[str, Callable[[EngineStats], dict[str, int]]], ...] = (
    ("requests", lambda stats: {"running": stats.running, "waiting": stats.waiting}),
    (
        "KV blocks",
        lambda stats: {"used": stats.blocks_used, "cached": stats.blocks_cached},
    ),
    ("KV tier blocks", lambda stats: {"used": stats.tier_blocks_used}),
    (
        "KV tier traffic",
        lambda stats: {
            "fetched": stats.tier_fetched_blocks_total,
            "saved": stats.tier_saved_blocks_total,
        },
    ),
)


class TraceFile:
    """Writes what a history gets. num_dropped: events that could not be written, and steps that
    were overwritten before they were read."""

    def __init__(self, descriptor: int, history: StepHistory, report: Report) -> None:
        self._file = descriptor
        self._history = history
        self._report = report
        self._size = 0
        self._last_step = 0
        self._last_end_ms = 0.0
        self._last_ended: RequestHistory | None = None
        self._stats: EngineStats | None = None
        self._shown: dict[str, dict[str, int]] = {}
        self._has_failed = self._has_raised = False
        self._num_unreported = 0
        self.num_dropped = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-trace", daemon=True)
        self._write_bytes(b"[\n")
        self._write(_names())

    def watch(self, emit: Callable[[FromEngine], None]) -> Callable[[FromEngine], None]:
        """Return an `emit` that also notes the engine's counters."""

        def watched(message: FromEngine) -> None:
            if isinstance(message, Outputs):
                self._stats = message.stats
            emit(message)

        return watched

    def start(self) -> None:
        """Write from now on, in a thread."""
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left, as far as that takes no longer than `timeout_s`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def write_new(self) -> None:
        """Write what has happened since the last call."""
        steps, num_lost = self._history.steps_after(self._last_step)
        events = [*self._step_events(steps), *self._request_events(), *self._counter_events()]
        num_lost += max(len(events) - MAX_EVENTS, 0)
        self._drop(num_lost)
        self._write(events[:MAX_EVENTS])

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._try_to_write()
        self._try_to_write()
        end = {"ph": "i", "s": "g", "pid": _PID, "tid": _STEPS, "name": "end of trace"}
        end |= {"ts": _us(self._last_end_ms), "args": {"dropped": self.num_dropped}}
        self._write_bytes(msgspec.json.encode(end) + b"\n]\n")
        with suppress(OSError):
            os.close(self._file)

    def _try_to_write(self) -> None:
        """Write what is new; an event that cannot be made is counted and does not end the trace."""
        try:
            self.write_new()
        except Exception as error:  # noqa: BLE001  the edge of the thread
            self._drop(1)
            if not self._has_raised:
                self._has_raised = True
                self._report("the trace drops events", error=f"{type(error).__name__}: {error}")

    def _step_events(self, steps: list[tuple[int, float, float, int, int]]) -> Iterator[Event]:
        for number, began_ms, ended_ms, rows, tokens in steps:
            begin_ms = max(began_ms, self._last_end_ms)
            yield {
                "ph": "X",
                "pid": _PID,
                "tid": _STEPS,
                "name": "step" if tokens == rows else "step with prefill",
                "ts": _us(begin_ms),
                "dur": max(_us(ended_ms) - _us(begin_ms), 0),
                "args": {"step": number, "rows": rows, "tokens": tokens},
            }
            self._last_step, self._last_end_ms = number, ended_ms

    def _request_events(self) -> Iterator[Event]:
        ended = copied(self._history.ended)
        fresh: list[RequestHistory] = []
        for one in reversed(ended):
            if one is self._last_ended:
                break
            fresh.append(one)
        if ended:
            self._last_ended = ended[-1]
        for one in reversed(fresh):
            yield from _spans_of(one)

    def _counter_events(self) -> Iterator[Event]:
        stats = self._stats
        if stats is None:
            return
        for name, read in _COUNTERS:
            values = read(stats)
            if self._shown.get(name) != values:
                self._shown[name] = values
                yield {
                    "ph": "C",
                    "pid": _PID,
                    "name": name,
                    "ts": _us(stats.last_step_ms),
                    "args": values,
                }

    def _drop(self, count: int) -> None:
        self.num_dropped += count
        self._num_unreported += count

    def _write(self, events: list[Event]) -> None:
        if self._num_unreported:
            args = {"events": self._num_unreported}
            at_us = _us(self._last_end_ms)
            note = {"ph": "i", "s": "g", "pid": _PID, "tid": _STEPS, "name": "dropped"}
            events = [note | {"ts": at_us, "args": args}, *events]
        if not events:
            return
        lines = b"".join(msgspec.json.encode(event) + b",\n" for event in events)
        if self._write_bytes(lines):
            self._num_unreported = 0
        else:
            self._drop(len(events) - (self._num_unreported > 0))

    def _write_bytes(self, content: bytes) -> bool:
        """Write all of `content` or nothing; return whether it is written."""
        try:
            if self._size + len(content) > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, f"a trace has at most {MAX_FILE_BYTES:,} bytes")
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
        except OSError as error:
            self._undo()
            if not self._has_failed:
                self._has_failed = True
                self._report("the trace drops events", error=str(error))
            return False
        self._size += len(content)
        self._has_failed = False
        return True

    def _undo(self) -> None:
        """Cut off what was written in part."""
        with suppress(OSError):
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)


def _names() -> list[Event]:
    def named(kind: str, name: str, **where: int) -> Event:
        return {"ph": "M", "name": kind, "pid": _PID, "args": {"name": name}, **where}

    return [named("process_name", "quire engine"), named("thread_name", "steps", tid=_STEPS)]


def _spans_of(one: RequestHistory) -> Iterator[Event]:
    """Yield a request's spans: nested ones of a track of its own, and its loads from a tier."""
    id_ = hex(one.arrival)
    finish = "" if one.finish_reason is None else one.finish_reason.value
    args = {
        "id": _public_id(one.request_id),
        "prompt_tokens": one.num_prompt_tokens,
        "cached_tokens": one.kv.cached_tokens,
        "finish_reason": finish,
    }
    spans = [("request", one.arrival_ms, one.ended_ms, args), *_phases(one)]
    for name, begin_ms, end_ms, its_args in spans:
        if not (math.isnan(begin_ms) or math.isnan(end_ms)):
            yield from _span("request", id_, name, begin_ms, end_ms, its_args)
    begun_ms: float | None = None
    for event in one.events:
        if event.kind is EventKind.LOAD_BEGUN:
            begun_ms = event.ms
        elif event.kind is EventKind.LOAD_ENDED and begun_ms is not None:
            yield from _span("kv tier", id_, "load", begun_ms, event.ms, {"blocks": event.known})
            begun_ms = None


def _phases(one: RequestHistory) -> Iterator[tuple[str, float, float, Event]]:
    times = one.times
    since_ms, name = one.arrival_ms, "queue"
    for event in one.events:
        if event.kind is EventKind.ADMITTED:
            yield name, since_ms, event.ms, {}
            is_first = math.isnan(times.first_token_ms) or event.ms < times.first_token_ms
            since_ms, name = event.ms, "prefill" if is_first else "decode"
            if is_first and times.first_token_ms <= one.ended_ms:
                next_leave = _next_leave_ms(one, event.ms)
                if times.first_token_ms <= next_leave:
                    yield name, since_ms, times.first_token_ms, {}
                    since_ms, name = times.first_token_ms, "decode"
        elif event.kind in (EventKind.PREEMPTED, EventKind.PAUSED):
            yield name, since_ms, event.ms, {}
            since_ms, name = event.ms, event.kind.value
        elif event.kind is EventKind.RESUMED:
            yield name, since_ms, event.ms, {}
            since_ms, name = event.ms, "queue"
    yield name, since_ms, one.ended_ms, {}


def _next_leave_ms(one: RequestHistory, after_ms: float) -> float:
    leaves = (EventKind.PREEMPTED, EventKind.PAUSED)
    return min(
        (event.ms for event in one.events if event.kind in leaves and event.ms >= after_ms),
        default=math.inf,
    )


def _span(
    category: str, id_: str, name: str, begin_ms: float, end_ms: float, args: Event
) -> Iterator[Event]:
    span: Event = {"pid": _PID, "tid": _STEPS, "cat": category, "id": id_, "name": name}
    yield span | {"ph": "b", "ts": _us(begin_ms), "args": args}
    yield span | {"ph": "e", "ts": _us(end_ms)}


def _public_id(request_id: str) -> str:
    """Return an answer's id without what the engine's clients add to it."""
    return request_id.partition("#")[0].rpartition("/")[2]


def _us(ms: float) -> int:
    return round(ms * 1000.0)
