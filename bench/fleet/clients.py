"""The clients of a fleet: streams and whole answers, each compared with the answer alone.

Requests have seeds, penalties, grammars, log-probabilities, tools and stop strings. What names an
answer (id, time, number of cached tokens) may differ; every other byte may not. Knows HTTP and no
part of quire.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.soak.callers import Broken, body_of

_MAX_KEPT = 20
_AGAIN_S = 0.5
_NAMES = re.compile(
    rb'"created":\d+|(?:cmpl|chatcmpl|gen|call)[-_][0-9a-f]{24}|"cached_tokens":\d+'
)
_COMMENT = re.compile(rb"(?m)^:[^\n]*\n\n")
_PLAIN: dict[str, Any] = {
    "model": "box",
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
}
_CHAT: dict[str, Any] = {
    "model": "box",
    "messages": [{"role": "user", "content": "Write of a dog"}],
    "max_tokens": 300,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "remember",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 60}},
            "required": ["place"],
        },
    },
}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and its answer alone once it is known."""

    name: str
    path: str
    body: dict[str, Any]
    answer: bytes = b""


CASES = (
    Case("seed", "/v1/completions", {**_PLAIN, **_STREAM, "seed": 1}),
    Case(
        "logprobs",
        "/v1/completions",
        {**_PLAIN, **_STREAM, "seed": 2, "logprobs": 3, "temperature": 1.4},
    ),
    Case(
        "penalties",
        "/v1/completions",
        {**_PLAIN, **_STREAM, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.6}
        | {"presence_penalty": 0.4, "dry_multiplier": 0.8, "min_tokens": 380},
    ),
    Case(
        "stop",
        "/v1/completions",
        {**_PLAIN, **_STREAM, "seed": 4, "stop": ["the end of", "zebra", "\n\n\n"]},
    ),
    Case(
        "grammar",
        "/v1/completions",
        {**_PLAIN, **_STREAM, "seed": 5, "logprobs": 0}
        | {"structured_outputs": {"regex": "([A-Z][a-z]{2,8} [a-z ]{20,60}\\. ){12}"}},
    ),
    Case("chat", "/v1/chat/completions", {**_CHAT, **_STREAM, "seed": 7, "ignore_eos": True}),
    Case(
        "tools",
        "/v1/chat/completions",
        {**_CHAT, **_STREAM, "seed": 8, "tools": [_TOOL], "tool_choice": "required"},
    ),
    Case(
        "tokens",
        "/generate",
        {"tokens": [5, 9, 11, 40], "seed": 9, "max_tokens": 400, "logprobs": 2}
        | {**_STREAM, "ignore_eos": True, "frequency_penalty": 0.9},
    ),
    Case("whole", "/v1/completions", {**_PLAIN, "seed": 10, "max_tokens": 120, "n": 2}),
    Case("greedy", "/v1/completions", {**_PLAIN, **_STREAM, "temperature": 0, "seed": 11}),
)


def normal(raw: bytes) -> bytes:
    """Leave out what names an answer, and comments, which keep slow streams open."""
    return _COMMENT.sub(b"", _NAMES.sub(b"", raw))


def answers_alone(port: int, cases: Sequence[Case]) -> list[Case]:
    """Return the cases with their answers, each sent alone."""

    async def ask() -> list[bytes]:
        return [await exchange(port, case.path, case.body) for case in cases]

    answers = asyncio.run(ask())
    return [
        Case(case.name, case.path, case.body, normal(answer))
        for case, answer in zip(cases, answers, strict=True)
    ]


class Clients:
    """limit_s: an answer that takes longer is wrong. wrong: the first failures, in words;
    num_wrong: all of them. silences_s: of each stream, the longest time between two pieces."""

    def __init__(self, port: int, cases: Sequence[Case], *, limit_s: float) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_wrong = 0
        self.silences_s: list[float] = []
        self.num_refused = 0
        self._port = port
        self._cases = cases
        self._limit_s = limit_s

    @property
    def num_done(self) -> int:
        """Answers so far."""
        return self.done.total()

    async def run(self, num_clients: int, go_on: Callable[[int], bool]) -> None:
        """Run all clients, each as long as go_on(number of its answers) holds."""
        await asyncio.gather(*(self._client(number, go_on) for number in range(num_clients)))

    async def short_requests(self, count: int, at_once: int = 1) -> None:
        """Send requests of one token, so many at a time."""
        body = {"prompt": "Once", "max_tokens": 1, "seed": 1}

        async def send(number: int) -> None:
            for _ in range(number, count, at_once):
                await exchange(self._port, "/v1/completions", body)

        await asyncio.gather(*map(send, range(at_once)))

    async def _answer(self, case: Case) -> bytes:
        """Return the answer; a refused request is sent again, as its client would."""
        while True:
            try:
                return await exchange(self._port, case.path, case.body, self.silences_s)
            except Refused:
                self.num_refused += 1
                await asyncio.sleep(_AGAIN_S)

    async def _client(self, number: int, go_on: Callable[[int], bool]) -> None:
        num_done = 0
        while go_on(num_done):
            case = self._cases[(number + num_done) % len(self._cases)]
            try:
                async with asyncio.timeout(self._limit_s):
                    raw = normal(await self._answer(case))
                if raw != case.answer:
                    raise Broken(_difference(raw, case.answer))
            except (Broken, OSError, TimeoutError, ValueError, LookupError) as error:
                self.num_wrong += 1
                self.wrong = [*self.wrong, f"{case.name}: {error!r}"][:_MAX_KEPT]
            num_done += 1
            self.done[case.name] += 1


async def first_events_s(
    ports: Sequence[int], cases: Sequence[Case], *, num_open: int, num_new: int, limit_s: float
) -> list[float]:
    """Return the times to the first event of num_new streams that begin at once on servers that
    stream num_open others; all are ended then."""
    cases = [case for case in cases if case.body.get("stream")]
    firsts_s, opened_s = list[float](), list[float]()
    tasks = list[asyncio.Task[None]]()

    async def stream(number: int, times_s: list[float] | None) -> None:
        while True:
            case, port = cases[number % len(cases)], ports[number % len(ports)]
            await exchange(port, case.path, case.body, firsts_s=times_s)
            number, times_s = number + 1, None

    async def begin(count: int, times_s: list[float]) -> None:
        first = len(tasks)
        tasks.extend(asyncio.create_task(stream(first + at, times_s)) for at in range(count))
        end_s = time.monotonic() + limit_s
        while len(times_s) < count:
            failed = next((one for one in tasks if one.done()), None)
            if failed is not None:
                failed.result()
            if time.monotonic() > end_s:
                raise SystemExit(f"{count - len(times_s)} streams did not begin in {limit_s:g} s")
            await asyncio.sleep(0.01)

    try:
        await begin(num_open, opened_s)
        await begin(num_new, firsts_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return firsts_s


class Refused(Exception):
    """A request was refused with 503 and was not begun."""


async def exchange(
    port: int,
    path: str,
    body: dict[str, Any],
    silences_s: list[float] | None = None,
    firsts_s: list[float] | None = None,
) -> bytes:
    """Return the body of the answer to one POST. Raises Refused, and Broken where it is no 200.

    silences_s: gets the longest time between two pieces of a stream. firsts_s: gets the time from
    the connection's begin to the first event.
    """
    began_s = time.monotonic()
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        longest_s = last_s = 0.0
        pieces = list[bytes]()
        while piece := await reader.read(1 << 16):
            now_s = time.monotonic()
            longest_s = max(longest_s, now_s - last_s) if last_s else 0.0
            last_s = now_s
            pieces.append(piece)
            if firsts_s is not None and b"data: " in piece:
                firsts_s.append(now_s - began_s)
                firsts_s = None
        raw = b"".join(pieces)
        if silences_s is not None and body.get("stream") and len(pieces) > 2:
            silences_s.append(longest_s)
        if raw.startswith(b"HTTP/1.1 503"):
            raise Refused
        return body_of(raw)
    finally:
        writer.transport.abort()


def _difference(got: bytes, wanted: bytes) -> str:
    at = next(
        (at for at, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]),
        min(len(got), len(wanted)),
    )
    shown = slice(max(at - 60, 0), at + 120)
    return f"byte {at} of {len(wanted)}: {got[shown]!r} came, alone it was {wanted[shown]!r}"
