"""`quire replay`: send the requests of a recording again, at their arrival times.

To a server of Quire over HTTP (`POST /generate`), or to an engine in this process. Where the
recording has token ids, every token that a client received is compared: on one model they are
equal, bit for bit, whatever the batch, the load and the machine's speed. Without token ids prompts
are made up so that equal blocks stay equal, and outputs have the recorded lengths.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from quire.base.errors import QuireError, SettingError, WorkerError
from quire.base.server_url import reason_of
from quire.bench.http_load import Refused, address_of, events, exchange, why_unusable
from quire.bench.workloads import draw_ids
from quire.engine.library.async_llm import AsyncLLM
from quire.obs.recording import RecordedRequest, Recording
from quire.obs.report import Progress, table
from quire.obs.request_fields import CONTENT, body_fields, sampling_of, scheduling_of
from quire.obs.timing import percentiles

MAX_DIFFERENCES = 10  # that are listed; all are counted
_SHARES = (50, 90, 95, 99)
# Finish reasons of choices that may lack tokens.
_CUT = frozenset({"abort", "error"})
# What ends one request of a run; the others go on.
_FAILURES = (
    *(QuireError, OSError, Refused, ValueError, LookupError, TypeError, AttributeError),
    asyncio.IncompleteReadError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """One request to send. expected: the recorded tokens of each choice, None without content.
    was_cut: of each choice, whether the client left or it failed, so that tokens may be missing."""

    number: int
    arrival_s: float
    prompt_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    scheduling: Mapping[str, Any]
    first_stream: int
    expected: tuple[tuple[int, ...], ...] | None
    was_cut: tuple[bool, ...]


class Sender(Protocol):
    """An engine to send requests to. is_exact: requests keep their `first_stream`."""

    fingerprint: str
    vocab_size: int
    is_exact: bool

    def send(self, request: ReplayRequest) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """Yield (choice, token ids) as they arrive. Raises QuireError, OSError or Refused."""


class HttpSender:
    """A server of Quire, asked over `POST /generate`, and for embeddings over `/v1/embeddings`.
    Raises WorkerError if it lists no model."""

    is_exact = False  # the field is not part of the API

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        self._address = address_of(url)
        self._api_key = api_key
        self._timeout_s = timeout_s
        entry = asyncio.run(self._model(url))
        self.fingerprint = str(entry.get("system_fingerprint", ""))
        self.vocab_size = entry["vocab_size"]

    async def send(self, request: ReplayRequest) -> AsyncIterator[tuple[int, Sequence[int]]]:
        if "pooling" in request.sampling:
            await self._embed(request)
            yield 0, ()
            return
        body = {
            "tokens": list(request.prompt_ids),
            **body_fields(request.sampling),
            **request.scheduling,
        }
        # The best of several sequences are known at the end, so a server does not stream them.
        body["stream"] = not sampling_of(request.sampling).is_ranked
        lines = exchange(self._address, "POST", "/generate", body, api_key=self._api_key)
        async with asyncio.timeout(self._timeout_s):
            if not body["stream"]:
                whole = json.loads(b"".join([line async for line in lines]))
                for choice in whole["choices"]:
                    yield int(choice["index"]), choice["tokens"]
                return
            async for event in events(lines):
                if event is None:
                    return
                if event.get("error"):
                    raise Refused(f"the answer broke off: {str(event['error'])[:200]}")
                for choice in event["choices"]:
                    yield int(choice["index"]), choice["tokens"]
        raise Refused("the stream ended before [DONE]")

    async def _embed(self, request: ReplayRequest) -> None:
        """Send an embedding; its vector is not compared."""
        ids, form = list(request.prompt_ids), {"encoding_format": "base64"}
        body = {"input": ids, **form, **request.scheduling}
        lines = exchange(self._address, "POST", "/v1/embeddings", body, api_key=self._api_key)
        async with asyncio.timeout(self._timeout_s):
            async for _ in lines:
                pass

    async def _model(self, url: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(30):
                lines = exchange(self._address, "GET", "/v1/models", None, api_key=self._api_key)
                body = b"".join([line async for line in lines])
            entry: dict[str, Any] = json.loads(body)["data"][0]
            if type(entry["vocab_size"]) is not int:
                raise ValueError("its vocab_size is no number")
            return entry
        except (OSError, ValueError, LookupError, TypeError, Refused) as error:
            has_key = bool(self._api_key)
            raise WorkerError(
                why_unusable(url, error, has_key=has_key)
                or f"{url} is no server of Quire ({reason_of(error)}); recordings are replayed to "
                "Quire only, `quire bench serve --trace` sends their lengths to any server"
            ) from error


class LocalSender:
    """An engine in this process, which has started."""

    is_exact = True

    def __init__(self, llm: AsyncLLM) -> None:
        self._client = llm.client
        self.fingerprint = llm.client.card.fingerprint
        self.vocab_size = llm.client.card.vocab_size

    async def send(self, request: ReplayRequest) -> AsyncIterator[tuple[int, Sequence[int]]]:
        stream = self._client.generate(
            request.prompt_ids,
            sampling_of(request.sampling),
            request_id=f"replay-{request.number}",
            first_stream=request.first_stream,
            terms=scheduling_of(request.scheduling),
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise WorkerError(delta.error)
                yield delta.index - request.first_stream, delta.token_ids


def replay_requests(
    recording: Recording, *, speed: float, vocab_size: int, seed: int = 0
) -> Iterator[ReplayRequest]:
    """Yield the requests of a recording, `speed` times as fast."""
    if not 0 < speed < float("inf"):
        raise SettingError(f"the speed is {speed}; it must be above 0")
    blocks: dict[int, list[int]] = {}
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> list[int]:
        ids: list[int] = draw_ids(count, vocab_size, rng).tolist()
        return ids

    for number, one in enumerate(recording.requests, start=1):
        prompt_ids = one.prompt_ids
        if prompt_ids is None:
            shared: list[int] = []
            for block_id in one.block_ids:
                if block_id not in blocks:
                    blocks[block_id] = drawn(recording.header.block_tokens)
                shared += blocks[block_id]
            prompt_ids = (*shared, *drawn(max(one.prompt_tokens, 1) - len(shared)))
        yield ReplayRequest(
            number=number,
            arrival_s=one.arrival_ms / 1e3 / speed,
            prompt_ids=prompt_ids,
            sampling=_sampling(one),
            scheduling=one.scheduling,
            first_stream=one.first_stream,
            expected=one.output_ids,
            was_cut=tuple(reason in _CUT for reason in one.finish_reasons),
        )


def _sampling(one: RecordedRequest) -> dict[str, Any]:
    """Return the fields to send: those recorded, with the lengths of the recording."""
    if "pooling" in one.sampling:  # it ends with its prompt
        return {**one.sampling, "max_tokens": 0}
    longest = max(*one.output_tokens, 1)
    if one.prompt_ids is None:
        kept = {name: value for name, value in one.sampling.items() if name not in CONTENT}
        return {**kept, "max_tokens": longest, "min_tokens": 0, "ignore_eos": True}
    if all(reason in _CUT for reason in one.finish_reasons):
        # The client left: compute what it received, and no more. Which tokens may end an answer
        # depends on min_tokens, so it stays as far as it was reached.
        least = min(one.sampling.get("min_tokens", 0), longest)
        return {**one.sampling, "max_tokens": longest, "min_tokens": least}
    return dict(one.sampling)


def differences(request: ReplayRequest, output_ids: Mapping[int, Sequence[int]]) -> list[str]:
    """Return how the tokens of each choice differ from the recorded ones; none: equal."""
    found = []
    for index, (was, is_cut) in enumerate(
        zip(request.expected or (), request.was_cut, strict=False)
    ):
        now = list(output_ids.get(index, ()))
        if is_cut:
            now = now[: len(was)]
        if now != list(was):
            pairs = zip(was, now, strict=False)
            same = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
            same = min(len(was), len(now)) if same is None else same
            found.append(
                f"request {request.number}, choice {index}: {len(was)} tokens were recorded, "
                f"{len(now)} came; they are equal up to token {same}"
            )
    return found


async def replay(
    recording: Recording, sender: Sender, *, speed: float, progress: Progress | None = None
) -> dict[str, Any]:
    """Send all requests and return the result, ready for JSON.

    Failed requests count as errors; the others go on.
    """
    progress = progress or Progress()
    run = _Run(sender, begin_s=time.perf_counter())
    tasks: set[asyncio.Task[None]] = set()
    for request in replay_requests(recording, speed=speed, vocab_size=sender.vocab_size):
        await asyncio.sleep(max(run.begin_s + request.arrival_s - time.perf_counter(), 0))
        task = asyncio.create_task(run.one(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        progress.say(f"{request.number} of {len(recording.requests)} requests sent")
    while tasks:
        await asyncio.gather(*tasks)
    progress.clear()
    return {
        "model": recording.header.model,
        "speed": speed,
        "content": recording.header.content,
        "same_fingerprint": sender.fingerprint == recording.header.fingerprint,
        "num_requests": len(recording.requests),
        "num_dropped": recording.num_dropped,
        "num_errors": run.num_errors,
        "errors": sorted(run.errors)[:MAX_DIFFERENCES],
        "num_compared": run.num_compared,
        "num_different": run.num_different,
        "differences": run.differences,
        "output_tokens": run.num_tokens,
        "recorded": _recorded_times(recording),
        "replayed": {
            "ttft_ms": percentiles(run.ttft_ms, _SHARES),
            "tpot_ms": percentiles(run.tpot_ms, _SHARES),
        },
    }


class _Run:
    """The answers of one run, as counts; tokens are compared and then forgotten."""

    def __init__(self, sender: Sender, *, begin_s: float) -> None:
        self.begin_s = begin_s
        self._sender = sender
        self.num_errors = self.num_compared = self.num_different = self.num_tokens = 0
        self.errors: set[str] = set()
        self.differences: list[str] = []
        self.ttft_ms: list[float] = []
        self.tpot_ms: list[float] = []

    async def one(self, request: ReplayRequest) -> None:
        """Send one request; times count from its arrival, so that a slow client counts too."""
        output_ids: dict[int, list[int]] = {}
        first_s = last_s = 0.0
        try:
            sent = cast(AsyncGenerator[tuple[int, Sequence[int]], None], self._sender.send(request))
            async with aclosing(sent) as received:
                async for index, token_ids in received:
                    if token_ids:
                        last_s = time.perf_counter() - self.begin_s
                        first_s = first_s or last_s
                        output_ids.setdefault(index, []).extend(token_ids)
        except _FAILURES as error:
            self.num_errors += 1
            if len(self.errors) < MAX_DIFFERENCES:
                self.errors.add(f"request {request.number}: {error or repr(error)}")
            return
        num_tokens = sum(map(len, output_ids.values()))
        self.num_tokens += num_tokens
        if num_tokens:
            self.ttft_ms.append(1e3 * (first_s - request.arrival_s))
        if num_tokens > 1 and len(output_ids) == 1:
            self.tpot_ms.append(1e3 * (last_s - first_s) / (num_tokens - 1))
        if request.expected is None or (request.first_stream and not self._sender.is_exact):
            return
        self.num_compared += 1
        found = differences(request, output_ids)
        self.num_different += bool(found)
        self.differences += found[: max(MAX_DIFFERENCES - len(self.differences), 0)]


def _recorded_times(recording: Recording) -> dict[str, dict[str, float]]:
    requests = recording.requests
    return {
        "ttft_ms": percentiles(
            [one.ttft_ms for one in requests if one.ttft_ms is not None], _SHARES
        ),
        "tpot_ms": percentiles(
            [
                (one.total_ms - one.ttft_ms) / (one.output_tokens[0] - 1)
                for one in requests
                if one.total_ms is not None
                and one.ttft_ms is not None
                and len(one.output_tokens) == 1
                and one.output_tokens[0] > 1
            ],
            _SHARES,
        ),
    }


def is_equal(outcome: Mapping[str, Any]) -> bool:
    """Return whether no request failed and no compared token differs."""
    return not outcome["num_errors"] and not outcome["num_different"]


def replay_text(outcome: Mapping[str, Any]) -> str:
    """Return a table of times, and whether the tokens are equal."""
    rows = [
        (
            f"{name.upper().removesuffix('_MS')} {run}",
            *(_milliseconds(outcome[run][name], f"p{share}") for share in _SHARES),
        )
        for name in ("ttft_ms", "tpot_ms")
        for run in ("recorded", "replayed")
    ]
    lines = [
        f"{outcome['num_requests']} requests of {outcome['model']} at speed "
        f"{outcome['speed']:g}; {outcome['output_tokens']} tokens generated, "
        f"{outcome['num_errors']} requests failed",
        table(("", *(f"p{share}" for share in _SHARES)), rows),
    ]
    if outcome["num_dropped"]:
        lines.append(f"{outcome['num_dropped']} requests are missing in the recording")
    if not outcome["content"]:
        lines.append("tokens: not recorded; `quire record --content` records them")
    elif outcome["num_different"]:
        lines.append(
            f"tokens: {outcome['num_different']} of {outcome['num_compared']} requests differ"
            + ("" if outcome["same_fingerprint"] else "; this is not the model that was recorded")
        )
    else:
        lines.append(f"tokens: every token of {outcome['num_compared']} requests is equal")
    lines += [f"  {difference}" for difference in outcome["differences"]]
    lines += [f"error: {error}" for error in outcome["errors"]]
    return "\n".join(lines)


def _milliseconds(found: Mapping[str, float], share: str) -> str:
    return f"{found[share]:.1f} ms" if share in found else "-"
