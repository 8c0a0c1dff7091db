"""Run the prompts of a request at once in the engine and merge their deltas into one stream.

Knows no JSON and no HTTP. Always holds: each choice is counted once in the metrics, under its
finish reason, or under "abort" if the client disconnected or an error ended the request; leaving
the stream closes every generator of the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from msgspec import structs

from quire.api.engine_protocol import Engine
from quire.api.generation.prompt_admission import PromptAdmission, senders
from quire.api.generation.usage import (
    PLAIN_USAGE,
    Timings,
    Usage,
    UsageOptions,
    speeds_of,
    timings_of,
)
from quire.api.http.errors import row_failure
from quire.base.cache_usage import CacheUsage, for_strangers
from quire.base.errors import OverloadedError, RequestError, ShuttingDown
from quire.base.rare_records import PooledSums
from quire.base.records import FinishReason
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.engine.client.interleaving import MAX_RUNS, SHORT_RUNS, interleaved
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.output.token_text import TokenText
from quire.obs.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a request. echo: text that precedes its choices. first: its first token, with a
    log-probability of NaN, if the echo has log-probabilities. terms: None: the request's."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    echo: str = ""
    first: TokenText | None = None
    text_rules: TextRules = PLAIN_TEXT
    terms: SchedulingParams | None = None


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
    pooled: PooledSums | None = None  # of its prompt


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
        usage_options: UsageOptions = PLAIN_USAGE,
    ) -> None:
        self.prompts = prompts
        self._cache_salt, self._terms = cache_salt, terms
        self._usage_options = usage_options
        self._engine = engine
        self._metrics = metrics
        self._request_id = request_id
        self._last: dict[tuple[int, int], TextDelta] = {}
        self._before: dict[tuple[int, int], TextDelta] = {}  # of what the client had
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
            if self._is_one:
                async with aclosing(self._stream(0, self.prompts[0])) as stream:
                    async for delta in stream:
                        self._count(0, delta)
                        yield 0, delta
                return
            async with aclosing(self._merged()) as merged:
                async for prompt, delta in merged:
                    self._count(prompt, delta)
                    yield prompt, delta
        except (RequestError, OverloadedError):
            refused = self._last == self._before
            raise
        finally:
            if not refused:
                self._count_unended()

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
            timings=self.timings if self._usage_options.timings else None,
            accepted_drafts=sum(delta.accepted_drafts for delta in self._last.values()),
            rejected_drafts=sum(delta.rejected_drafts for delta in self._last.values()),
            has_prediction=bool(self._terms.speculation and self._terms.speculation.prediction_ids),
        )
        if self._usage_options.speeds:
            usage = replace(usage, speeds=speeds_of(usage, self.timings))
        if self._num_open == 0:  # read by the answer, the log and /v1/requests
            self._final = usage
        return usage

    @property
    def timings(self) -> Timings | None:
        """Times so far; None before there are any."""
        return timings_of(delta.times for delta in self._last.values())

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

    @property
    def _is_one(self) -> bool:
        """Whether one request to the engine gives all deltas, as they are."""
        return len(self.prompts) == 1

    def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        admission = PromptAdmission(self._engine.card.queue_timeout_s)
        most = SHORT_RUNS if self.prompts[0].sampling.pooling else MAX_RUNS
        sends = senders(self._run, self.prompts, self._terms)
        return interleaved([admission.run(send) for send in sends], max_runs=most)

    async def _run(self, at: int, prompt: Prompt) -> AsyncGenerator[tuple[int, TextDelta], None]:
        first = self._first_stream(at)
        async with aclosing(self._stream(at, prompt)) as deltas:
            async for delta in deltas:
                yield at, structs.replace(delta, index=delta.index - first) if first else delta

    def _first_stream(self, at: int) -> int:
        # All prompts have one seed; different stream numbers give equal prompts different answers.
        return sum(before.sampling.num_sequences for before in self.prompts[:at])

    def _stream(self, at: int, prompt: Prompt) -> AsyncGenerator[TextDelta, None]:
        """Return the deltas of the engine."""
        return self._engine.generate(
            prompt.token_ids,
            prompt.sampling,
            request_id=self._id_of(at),
            first_stream=self._first_stream(at),
            cache_salt=self._cache_salt,
            terms=prompt.terms or self._terms,
            text_rules=prompt.text_rules,
        )

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
        self._ended(prompt, delta, delta.finish_reason)
        if delta.finish_reason is FinishReason.ERROR:
            raise row_failure(self.prompts[prompt].sampling, delta.error)
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
                    self._ended(at, delta, FinishReason.ABORT)

    def _ended(self, prompt: int, delta: TextDelta, reason: FinishReason) -> None:
        self._metrics.choice(
            finish_reason=reason.value,
            times=delta.times,
            prompt_tokens=delta.num_prompt_tokens if delta.index == 0 else 0,
            output_tokens=delta.num_output_tokens,
            terms=self._terms,
        )
