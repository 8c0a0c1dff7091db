"""Metrics of a server in Prometheus' text format, from a registry of its own.

Two sources: the API layer counts requests (`request`, `error`, ...), and the engine's counters are
read from the EngineStats of its latest step (`see`). Independent of HTTP server and engine. Always
holds: a name ends in its unit (`_seconds`, `_tokens`) and, for counters, `_total`; counters only
grow. docs/metrics.md lists the names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.base.records import EngineStats, RequestTimes
from quire.base.scheduling_params import DEFAULT_SCHEDULING, OBJECTIVES, SchedulingParams
from quire.obs.engine_metrics import EngineCollector, TenantCollector

# A tiny model answers in a millisecond, a long prompt on a CPU takes minutes.
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# Finish reasons of choices that are as long as they were to be.
_COMPLETED = frozenset({"stop", "length"})

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of one server process. tenants: their names, in the order EngineStats has.

    shared: the folder in which several processes count (shared.py): `text` then shows the sums.
    sees_steps: whether this one observes the engine's steps, as one of them does. restarts: of API
    processes; where there are several, their keeper counts them with a counter of its own.
    """

    def __init__(
        self,
        tenants: Sequence[str] = (),
        *,
        shared: Path | None = None,
        sees_steps: bool = True,
    ) -> None:
        registry = CollectorRegistry()
        self._shown = registry if shared is None else CollectorRegistry()
        self._sees_steps = sees_steps
        self._stats = EngineStats()
        self._last_step = 0
        self._labelled: dict[tuple[Counter, tuple[str, ...]], Counter] = {}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._first_token = histogram(
            "quire_time_to_first_token_seconds",
            "From arrival to the first token, a choice",
            SECONDS,
        )
        self._per_token = histogram(
            "quire_time_per_output_token_seconds",
            "Mean time between output tokens after the first, a choice",
            TOKEN_SECONDS,
        )
        self._end_to_end = histogram(
            "quire_request_seconds", "From arrival to the last token, a choice", SECONDS
        )
        self._queued = histogram(
            "quire_queue_seconds",
            "From arrival to the first step it was part of, a choice",
            SECONDS,
        )
        self._batch_rows = histogram("quire_batch_rows", "Requests computed in a step", COUNTS)
        self._batch_tokens = histogram(
            "quire_batch_tokens", "Token rows computed in a step", COUNTS
        )
        self._make_counters(registry)
        self._make_promises(registry)
        self.restarts = restarts_counter()
        registry.register(self.restarts)
        if shared is not None:
            from prometheus_client.multiprocess import MultiProcessCollector  # only these need it

            MultiProcessCollector(self._shown, str(shared))  # type: ignore[no-untyped-call]
        self._shown.register(EngineCollector(lambda: self._stats))
        self._shown.register(TenantCollector(lambda: self._stats, tuple(tenants)))

    def _make_counters(self, registry: CollectorRegistry) -> None:
        self._finished = Counter(
            "quire_requests",
            "Choices that ended, by finish reason",
            ("finish_reason",),
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "quire_prompt_tokens", "Prompt tokens of admitted prompts", registry=registry
        )
        self._generated_tokens = Counter(
            "quire_generated_tokens", "Tokens generated and sent", registry=registry
        )
        self._errors = Counter(
            "quire_errors",
            "Requests that ended in an error, by its class",
            ("kind",),
            registry=registry,
        )
        self._timeouts = Counter(
            "quire_timeouts", "Requests ended by their time limit", registry=registry
        )
        self._disconnects = Counter(
            "quire_disconnects",
            "Requests with a client that disconnected before the answer was complete",
            registry=registry,
        )
        self._slow_readers = Counter(
            "quire_slow_readers", "Streams cut because their reader did not read", registry=registry
        )
        self._dropped_lines = Counter(
            "quire_log_lines_dropped",
            "Log lines dropped because the log's reader did not keep up",
            registry=registry,
        )
        self._num_dropped_lines = 0
        self._responses = Counter(
            "quire_http_responses",
            "HTTP responses, by route and status",
            ("route", "status"),
            registry=registry,
        )
        self._open = Gauge(
            "quire_open_requests",
            "HTTP requests being answered",
            registry=registry,
            multiprocess_mode="livesum",
        )

    def _make_promises(self, registry: CollectorRegistry) -> None:
        self._good_requests = Counter(
            "quire_goodput_requests",
            "Choices that were completed and met each objective they had",
            registry=registry,
        )
        self._good_tokens = Counter(
            "quire_goodput_tokens", "Tokens generated for such choices", registry=registry
        )
        self._missed = Counter(
            "quire_missed_objectives",
            "Objectives of choices that were not met, by their field",
            ("objective",),
            registry=registry,
        )
        self._refused = Counter(
            "quire_refused_requests",
            "Requests refused before anything was computed, by reason",
            ("reason",),
            registry=registry,
        )
        self._tenant_prompt_tokens = Counter(
            "quire_tenant_prompt_tokens",
            "Prompt tokens of admitted prompts, by tenant",
            ("tenant",),
            registry=registry,
        )
        self._tenant_generated_tokens = Counter(
            "quire_tenant_generated_tokens",
            "Tokens generated and sent, by tenant",
            ("tenant",),
            registry=registry,
        )

    def choice(
        self,
        *,
        finish_reason: str,
        times: RequestTimes | None,
        prompt_tokens: int,
        output_tokens: int,
        terms: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> None:
        """A choice ended. `prompt_tokens` is 0 for all but one choice of a prompt."""
        tenant = terms.tenant or "default"
        self._of(self._tenant_prompt_tokens, tenant).inc(prompt_tokens)
        self._of(self._tenant_generated_tokens, tenant).inc(output_tokens)
        missed = missed_objectives(terms, times, output_tokens, finish_reason)
        for objective in missed:
            self._missed.labels(objective).inc()
        if not missed and finish_reason in _COMPLETED:
            self._good_requests.inc()
            self._good_tokens.inc(output_tokens)
        self._of(self._finished, finish_reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._generated_tokens.inc(output_tokens)
        if times is None:
            return
        _observe_ms(self._queued, times.first_scheduled_ms - times.arrival_ms)
        _observe_ms(self._first_token, times.first_token_ms - times.arrival_ms)
        _observe_ms(self._end_to_end, times.last_token_ms - times.arrival_ms)
        if output_tokens > 1:
            between_ms = (times.last_token_ms - times.first_token_ms) / (output_tokens - 1)
            _observe_ms(self._per_token, between_ms)

    def error(self, kind: str) -> None:
        """Count a request that ended in an error of class `kind`."""
        self._errors.labels(kind).inc()

    def timeout(self) -> None:
        """Count a request that was ended by its time limit."""
        self._timeouts.inc()

    def refused(self, reason: str) -> None:
        """Count a rejected request. `reason`: the error code in its response."""
        self._refused.labels(reason).inc()

    def disconnect(self) -> None:
        """Count a client that disconnected before its answer was complete."""
        self._disconnects.inc()

    def dropped_lines(self, total: int) -> None:
        """So many log lines of this process have been dropped by now."""
        self._dropped_lines.inc(total - self._num_dropped_lines)
        self._num_dropped_lines = total

    def slow_reader(self) -> None:
        """Count a stream that was closed because its client did not read."""
        self._slow_readers.inc()

    def opened(self) -> None:
        """Count an HTTP request that arrived."""
        self._open.inc()

    def answered(self, *, route: str, status: int) -> None:
        """Count an HTTP request that ended. `route` is a pattern, never a raw path."""
        self._open.dec()
        self._of(self._responses, route, str(status)).inc()

    def _of(self, counter: Counter, *labels: str) -> Counter:
        """A labelled counter, found without its library's checks where it has counted before."""
        key = (counter, labels)
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = counter.labels(*labels)
        return found

    def see(self, stats: EngineStats) -> None:
        """The engine's latest counters. Each step is observed at most once."""
        self._stats = stats
        if self._sees_steps and stats.steps_total > self._last_step:
            self._last_step = stats.steps_total
            self._batch_rows.observe(stats.step_rows)
            self._batch_tokens.observe(stats.step_tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._shown)


def restarts_counter() -> Counter:
    """API processes that ended and were replaced; counted by the process that replaces them."""
    return Counter(
        "quire_api_process_restarts",
        "API processes that ended by themselves and were replaced",
        registry=None,
    )


def missed_objectives(
    terms: SchedulingParams, times: RequestTimes | None, output_tokens: int, finish_reason: str
) -> list[str]:
    """Which of its objectives a choice that ended has not met: all, where it was not completed."""
    asked = [name for name in OBJECTIVES if getattr(terms, name) is not None]
    if not asked or times is None or finish_reason not in _COMPLETED:
        return asked
    took_ms = {
        "deadline_ms": times.last_token_ms - times.arrival_ms,
        "ttft_slo_ms": times.first_token_ms - times.arrival_ms,
        "tpot_slo_ms": (times.last_token_ms - times.first_token_ms) / max(output_tokens - 1, 1),
    }
    # What never happened is NaN, and meets nothing.
    return [name for name in asked if not took_ms[name] <= getattr(terms, name)]


def _observe_ms(histogram: Histogram, duration_ms: float) -> None:
    """Observe milliseconds as seconds; what never happened (NaN) is not observed."""
    if not math.isnan(duration_ms):
        histogram.observe(max(duration_ms, 0.0) / 1e3)
