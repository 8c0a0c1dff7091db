"""Run the prompts of a request at once in the engine and merge their deltas into one stream.

Knows no JSON and no HTTP. Always holds: each choice is counted once in the metrics, under its
finish reason, or under "abort" if the client disconnected or an error ended the request; leaving
the stream closes every generator of the engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

from msgspec import structs

from quire.api.engine_protocol import Engine
from quire.api.http.errors import NothingToChoose
from quire.base.cache_usage import CacheUsage, for_strangers
from quire.base.errors import OverloadedError, QuireError, RequestError, ShuttingDown, StepRowError
from quire.base.records import NOTHING_LEFT, FinishReason
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.output.token_text import TokenText
from quire.obs.metrics import Metrics

# Deltas of several prompts that wait for the writer; a slow client stops the engine at this many.
_QUEUED_DELTAS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a request. echo: text that precedes its choices. first: its first token, with a
    log-probability of NaN, if the echo has log-probabilities."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    echo: str = ""
    first: TokenText | None = None
    text_rules: TextRules = PLAIN_TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Milliseconds from a request's arrival in the engine; of several streams the earliest start
    and the latest end. queue and first_token are None before they happen."""

    queue_ms: float | None
    first_token_ms: float | None
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Counts, times and rates of prefill and decoding, with the names and units of llama.cpp.

    cache_n: prompt tokens found in the prefix cache; prompt_n: those computed. Prefill is from the
    first scheduling to the first token, decoding from there to the last token; of several streams,
    from the first of them to the last. A rate over no time is 0.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_uses: tuple[CacheUsage, ...] = ()  # of each prompt, if requested
    timings: Timings | None = None  # if requested
    speeds: Speeds | None = None  # if requested


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions:
    """What usage reports. has_several_users: users share cached prefixes and may not learn of
    each other's prompts, so the details of cached tokens are hidden."""

    has_several_users: bool = False
    timings: bool = False
    speeds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """How much of one prompt is computed: of `total` tokens, `cache` cached, `processed` so far."""

    index: int
    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass(slots=True, kw_only=True)
class Choice:
    """All deltas of one choice joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    output_tokens: int = 0
    token_chars: list[int] = field(default_factory=list)  # if requested
    prompt_logprobs: Sequence[TokenText | None] = ()  # of its prompt


class ChoiceStreams:
    """The answers to the prompts of one request. Iterate `deltas` once; `usage` has the counts."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        prompts: Sequence[Prompt],
        request_id: str,
        *,
        cache_salt: str = "",
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        usage_options: UsageOptions = UsageOptions(),
    ) -> None:
        self.prompts = prompts
        self._cache_salt = cache_salt
        self._terms = terms
        self._usage_options = usage_options
        self._engine = engine
        self._metrics = metrics
        self._request_id = request_id
        self._last: dict[tuple[int, int], TextDelta] = {}
        self._num_open = sum(prompt.sampling.n for prompt in prompts)
        self._cached = [0] * len(prompts)
        self._final: Usage | None = None
        self._cache_uses: dict[int, CacheUsage] = {}

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (index of the prompt, delta) in order of arrival. Raises what `generate` raises.

        A choice that failed, or that the engine aborted, is raised as an error.
        """
        refused = False
        try:
            async with aclosing(self._merged()) as merged:
                async for prompt, delta in merged:
                    self._count(prompt, delta)
                    yield prompt, delta
        except (RequestError, OverloadedError):
            refused = not self._last
            raise
        finally:
            if not refused:
                self._count_unended()

    async def whole(self) -> list[list[Choice]]:
        """Return all choices of each prompt once all have ended."""
        choices = [[Choice() for _ in range(prompt.sampling.n)] for prompt in self.prompts]
        texts: list[list[list[str]]] = [[[] for _ in of_prompt] for of_prompt in choices]
        async with aclosing(self.deltas()) as deltas:
            async for prompt, delta in deltas:
                choice = choices[prompt][delta.index]
                texts[prompt][delta.index].append(delta.text)
                choice.token_ids.extend(delta.token_ids)
                choice.logprobs.extend(delta.logprobs)
                choice.token_chars.extend(delta.token_chars)
                choice.finish_reason = delta.finish_reason
                choice.stop_reason = delta.stop_reason
                choice.seed = delta.seed
                choice.output_tokens = delta.num_output_tokens
                if delta.prompt_logprobs:
                    for each in choices[prompt]:
                        each.prompt_logprobs = delta.prompt_logprobs
        for of_prompt, pieces in zip(choices, texts, strict=True):
            for choice, text in zip(of_prompt, pieces, strict=True):
                choice.text = "".join(text)
        return choices

    @property
    def usage(self) -> Usage:
        """Token counts so far. Prompt tokens count once a prompt, however many choices it has;
        tokens of sequences that best_of discards count as completion tokens."""
        if self._final is not None:
            return self._final
        usage = Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(
                delta.num_output_tokens + delta.num_unseen_tokens for delta in self._last.values()
            ),
            cached_tokens=sum(self._cached),
            cache_uses=tuple(use for _, use in sorted(self._cache_uses.items())),
            timings=self._timings() if self._usage_options.timings else None,
        )
        if self._usage_options.speeds:
            usage = replace(usage, speeds=self._speeds(usage))
        if self._num_open == 0:  # read by the answer, the log and /v1/requests
            self._final = usage
        return usage

    def _timings(self) -> Timings | None:
        times = [delta.times for delta in self._last.values() if delta.times is not None]
        if not times:
            return None
        arrival_ms = min(each.arrival_ms for each in times)

        def first(moments_ms: Iterable[float]) -> float | None:
            happened = [moment_ms for moment_ms in moments_ms if not math.isnan(moment_ms)]
            return round(min(happened) - arrival_ms, 3) if happened else None

        return Timings(
            queue_ms=first(each.first_scheduled_ms for each in times),
            first_token_ms=first(each.first_token_ms for each in times),
            total_ms=round(max(each.last_token_ms for each in times) - arrival_ms, 3),
        )

    @property
    def prefill_ms(self) -> float:
        """Milliseconds from the first scheduling to the first token; 0 before there is one."""
        timings = self._timings()
        if timings is None or timings.queue_ms is None or timings.first_token_ms is None:
            return 0.0
        return max(timings.first_token_ms - timings.queue_ms, 0.0)

    def _speeds(self, usage: Usage) -> Speeds:
        timings = self._timings()
        queue_ms = first_ms = total_ms = 0.0
        if timings is not None:
            total_ms = 0.0 if math.isnan(timings.total_ms) else timings.total_ms
            queue_ms = timings.queue_ms or 0.0
            first_ms = total_ms if timings.first_token_ms is None else timings.first_token_ms
        prompt_n = usage.prompt_tokens - usage.cached_tokens
        prompt_ms, predicted_ms = max(first_ms - queue_ms, 0.0), max(total_ms - first_ms, 0.0)
        return Speeds(
            cache_n=usage.cached_tokens,
            prompt_n=prompt_n,
            prompt_ms=round(prompt_ms, 3),
            prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
            prompt_per_second=_ratio(1e3 * prompt_n, prompt_ms),
            predicted_n=usage.completion_tokens,
            predicted_ms=round(predicted_ms, 3),
            predicted_per_token_ms=_ratio(predicted_ms, usage.completion_tokens),
            predicted_per_second=_ratio(1e3 * usage.completion_tokens, predicted_ms),
        )

    @property
    def first_token_ms(self) -> float | None:
        """Milliseconds from arrival in the engine to the first token; None before there is one."""
        timings = self._timings()
        return None if timings is None else timings.first_token_ms

    @property
    def more_waits(self) -> bool:
        """Whether the next delta, or the end, is available without waiting."""
        if self._num_open == 0:
            return True
        return len(self.prompts) == 1 and self._engine.num_waiting(self._request_id) > 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """The finish reason of each choice that has begun, in order; "open" for a running one."""
        last = [delta for _, delta in sorted(self._last.items(), key=lambda item: item[0])]
        return tuple(str(delta.finish_reason or "open") for delta in last)

    @property
    def finish_reasons(self) -> str:
        """The distinct finish reasons so far, for a log line."""
        reasons = {str(delta.finish_reason or "open") for delta in self._last.values()}
        return ",".join(sorted(reasons)) or "none"

    def _id_of(self, at: int) -> str:
        return self._request_id if len(self.prompts) == 1 else f"{self._request_id}.{at}"

    def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        runs = [self._run(at, prompt) for at, prompt in enumerate(self.prompts)]
        return runs[0] if len(runs) == 1 else _interleaved(runs)

    async def _run(self, at: int, prompt: Prompt) -> AsyncGenerator[tuple[int, TextDelta], None]:
        # All prompts have one seed; different stream numbers give equal prompts different answers.
        first = sum(before.sampling.num_sequences for before in self.prompts[:at])
        stream = self._engine.generate(
            prompt.token_ids,
            prompt.sampling,
            request_id=self._id_of(at),
            first_stream=first,
            cache_salt=self._cache_salt,
            terms=self._terms,
            text_rules=prompt.text_rules,
        )
        async with aclosing(cast(AsyncGenerator[TextDelta, None], stream)) as deltas:
            async for delta in deltas:
                yield at, structs.replace(delta, index=delta.index - first) if first else delta

    def _count(self, prompt: int, delta: TextDelta) -> None:
        self._last[prompt, delta.index] = delta
        if delta.index == 0:
            self._cached[prompt] = delta.cached_tokens
            if delta.cache_use is not None:
                use = delta.cache_use
                self._cache_uses[prompt] = (
                    for_strangers(use, self._engine.card.block_size)
                    if self._usage_options.has_several_users
                    else use
                )
        if delta.finish_reason is None:
            return
        self._num_open -= 1
        self._ended(delta.index, delta, delta.finish_reason)
        if delta.finish_reason is FinishReason.ERROR:
            raise _failure(self.prompts[prompt].sampling, delta.error)
        if delta.finish_reason is FinishReason.ABORT:
            raise ShuttingDown("the engine ended this request before it was complete; try again")

    def _count_unended(self) -> None:
        for at, prompt in enumerate(self.prompts):
            for index in range(prompt.sampling.n):
                delta = self._last.get((at, index))
                if delta is None:
                    self._metrics.choice(
                        finish_reason=FinishReason.ABORT.value,
                        times=None,
                        prompt_tokens=0,
                        output_tokens=0,
                        terms=self._terms,
                    )
                elif delta.finish_reason is None:
                    self._ended(index, delta, FinishReason.ABORT)

    def _ended(self, index: int, delta: TextDelta, reason: FinishReason) -> None:
        self._metrics.choice(
            finish_reason=reason.value,
            times=delta.times,
            prompt_tokens=delta.num_prompt_tokens if index == 0 else 0,
            output_tokens=delta.num_output_tokens,
            terms=self._terms,
        )


def _ratio(amount: float, divisor: float) -> float:
    return round(amount / divisor, 3) if divisor > 0 else 0.0


def _failure(sampling: SamplingParams, message: str | None) -> QuireError:
    """Return the error of a failed row: the request's fault if it may have left no token."""
    reason = message or "the engine could not compute this request"
    bans = (
        sampling.structured_outputs is not None
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.no_repeat_ngram_size
        or sampling.min_tokens
        or -math.inf in sampling.logit_bias.values()
    )
    is_own = bans and reason.startswith(NOTHING_LEFT)
    return NothingToChoose(reason) if is_own else StepRowError(reason)


async def _interleaved(
    runs: Sequence[AsyncGenerator[tuple[int, TextDelta], None]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the items of all runs in order of arrival. The first error ends all runs."""
    queue: asyncio.Queue[tuple[int, TextDelta] | None] = asyncio.Queue(_QUEUED_DELTAS)

    async def feed(run: AsyncIterator[tuple[int, TextDelta]]) -> None:
        async with aclosing(cast(AsyncGenerator[tuple[int, TextDelta], None], run)) as items:
            async for item in items:
                await queue.put(item)

    async def feed_all() -> None:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(feed(run))

    feeding = asyncio.ensure_future(feed_all())
    feeding.add_done_callback(lambda _: _wake(queue))
    try:
        while not (feeding.done() and queue.empty()):
            item = await queue.get()
            if item is not None:
                yield item
        _raise_first(feeding)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


def _wake(queue: asyncio.Queue[tuple[int, TextDelta] | None]) -> None:
    if not queue.full():
        queue.put_nowait(None)


def _raise_first(feeding: asyncio.Future[None]) -> None:
    """Raise the first error of a TaskGroup."""
    error = feeding.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
