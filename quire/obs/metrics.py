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
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from quire.base.engine_stats import EngineStats
from quire.base.records import RequestTimes
from quire.base.scheduling_params import DEFAULT_SCHEDULING, OBJECTIVES, SchedulingParams
from quire.obs.engine_metrics import EngineCollector, TenantCollector
from quire.obs.series import Series, restarts_counter

if TYPE_CHECKING:
    from quire.obs.vllm_metrics import VllmMetrics

# Finish reasons of choices that are as long as they were to be.
_COMPLETED = frozenset({"stop", "length"})

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of one server process. tenants: their names, in the order EngineStats has.

    shared: the folder in which several processes count (shared.py): `text` then shows the sums.
    sees_steps: whether this one observes the engine's steps, as one of them does. restarts: of API
    processes; where there are several, their supervisor counts them with a counter of its own.
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

        self._series = Series(registry)
        self._num_dropped_lines = 0
        self.restarts = restarts_counter()
        registry.register(self.restarts)
        if shared is not None:
            from prometheus_client.multiprocess import MultiProcessCollector  # only these need it

            MultiProcessCollector(self._shown, str(shared))  # type: ignore[no-untyped-call]
        self._shown.register(EngineCollector(lambda: self._stats))
        self._shown.register(TenantCollector(lambda: self._stats, tuple(tenants)))
        self.vllm: VllmMetrics | None = None

    def show_vllm_names(self, model_name: str, block_size: int) -> None:
        """Show metrics by vLLM's names too. block_size: tokens of a KV block."""
        from quire.obs.vllm_metrics import VllmMetrics  # the library has none

        self.vllm = VllmMetrics(self._shown, model_name, block_size)

    def choice(
        self,
        *,
        finish_reason: str,
        times: RequestTimes | None,
        prompt_tokens: int,
        output_tokens: int,
        terms: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> None:
        """Count a choice that ended. `prompt_tokens` is 0 for all but one choice of a prompt."""
        tenant = terms.tenant or "default"
        self._of(self._series.tenant_prompt_tokens, tenant).inc(prompt_tokens)
        self._of(self._series.tenant_generated_tokens, tenant).inc(output_tokens)
        missed: list[str] = []
        if terms is not DEFAULT_SCHEDULING:
            missed = missed_objectives(terms, times, output_tokens, finish_reason)
        for objective in missed:
            self._series.missed.labels(objective).inc()
        if not missed and finish_reason in _COMPLETED:
            self._series.good_requests.inc()
            self._series.good_tokens.inc(output_tokens)
        self._of(self._series.finished, finish_reason).inc()
        self._series.prompt_tokens.inc(prompt_tokens)
        self._series.generated_tokens.inc(output_tokens)
        if times is None:
            return
        _observe_ms(self._series.queued, times.first_scheduled_ms - times.arrival_ms)
        _observe_ms(self._series.first_token, times.first_token_ms - times.arrival_ms)
        _observe_ms(self._series.end_to_end, times.last_token_ms - times.arrival_ms)
        if output_tokens > 1:
            between_ms = (times.last_token_ms - times.first_token_ms) / (output_tokens - 1)
            _observe_ms(self._series.per_token, between_ms)

    def error(self, kind: str) -> None:
        """Count a request that ended in an error of class `kind`."""
        self._series.errors.labels(kind).inc()

    def timeout(self) -> None:
        """Count a request that was ended by its time limit."""
        self._series.timeouts.inc()

    def refused(self, reason: str) -> None:
        """Count a rejected request. `reason`: the error code in its response."""
        self._series.refused.labels(reason).inc()

    def disconnect(self) -> None:
        """Count a client that disconnected before its answer was complete."""
        self._series.disconnects.inc()

    def dropped_lines(self, total: int) -> None:
        """So many log lines of this process have been dropped by now."""
        self._series.dropped_lines.inc(total - self._num_dropped_lines)
        self._num_dropped_lines = total

    def slow_reader(self) -> None:
        """Count a stream that was closed because its client did not read."""
        self._series.slow_readers.inc()

    def opened(self) -> None:
        """Count an HTTP request that arrived."""
        self._series.open.inc()

    def answered(self, *, route: str, status: int) -> None:
        """Count an HTTP request that ended. `route` is a pattern, never a raw path."""
        self._series.open.dec()
        self._of(self._series.responses, route, str(status)).inc()

    def _of(self, counter: Counter, *labels: str) -> Counter:
        """Return a labelled counter, without the library's checks where it counted before."""
        key = (counter, labels)
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = counter.labels(*labels)
        return found

    def see(self, stats: EngineStats) -> None:
        """Take in the engine's latest counters. Each step is observed at most once."""
        self._stats = stats
        if self._sees_steps and stats.steps_total != self._last_step:
            self._last_step = stats.steps_total
            self._series.batch_rows.observe(stats.step_rows)
            self._series.batch_tokens.observe(stats.step_tokens)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        other_names = b"" if self.vllm is None else self.vllm.text()
        return generate_latest(self._shown) + other_names


def missed_objectives(
    terms: SchedulingParams, times: RequestTimes | None, output_tokens: int, finish_reason: str
) -> list[str]:
    """Return the objectives that an ended choice has not met: all, if it was not completed."""
    objectives = [name for name in OBJECTIVES if getattr(terms, name) is not None]
    if not objectives or times is None or finish_reason not in _COMPLETED:
        return objectives
    took_ms = {
        "deadline_ms": times.last_token_ms - times.arrival_ms,
        "ttft_slo_ms": times.first_token_ms - times.arrival_ms,
        "tpot_slo_ms": (times.last_token_ms - times.first_token_ms) / max(output_tokens - 1, 1),
    }
    # What never happened is NaN, and meets nothing.
    return [name for name in objectives if not took_ms[name] <= getattr(terms, name)]


def _observe_ms(histogram: Histogram, duration_ms: float) -> None:
    """Observe milliseconds as seconds; what never happened (NaN) is not observed."""
    if not math.isnan(duration_ms):
        histogram.observe(max(duration_ms, 0.0) / 1e3)
