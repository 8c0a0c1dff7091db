"""Metrics of a router in Prometheus' text format, from a registry of its own.

Counters are increased where things happen; gauges of replicas are read when they are scraped. Names
begin with `quire_router_`, so that they stand beside those of the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from quire.router.fleet import Fleet
from quire.router.interruption import PHASES, Interruption

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
_INTERRUPTION_SECONDS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 10.0, 30.0)


class RouterMetrics:
    """Counters of what the router did; gauges are read from the fleet when they are scraped."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.requests = counter("quire_router_requests", "Requests answered", "route", "status")
        self.tokens = counter("quire_router_streamed_tokens", "Tokens of continuable streams")
        self.retries = counter("quire_router_retries", "Requests sent again, unstarted", "reason")
        self.resumed = counter("quire_router_resumed_streams", "Streams continued elsewhere")
        self.resume_retries = counter(
            "quire_router_resume_retries",
            "Attempts to continue a stream elsewhere that came to nothing, or had no replica",
            "reason",
        )
        self.broken = counter("quire_router_broken_streams", "Streams ended by an error", "reason")
        self.faults = counter("quire_router_replica_faults", "Failed exchanges", "replica")
        self.refused = counter("quire_router_refused_requests", "Refused by the router", "code")
        self.slow_clients = counter(
            "quire_router_slow_clients", "Clients that were given up as they read nothing"
        )
        self.hedges = counter("quire_router_hedges", "Requests with a late first token", "outcome")
        self.hedged_tokens = counter("quire_router_hedged_tokens", "Prompt tokens sent twice")
        self.hedgeable_tokens = counter(
            "quire_router_hedge_base_tokens", "Prompt tokens of which hedges may use a share"
        )
        self.longer = counter(
            "quire_router_longer_model", "Prompts sent to a model of longer context", "model"
        )
        self.summaries = counter("quire_router_summaries", "Prompts to be summarized", "outcome")
        self.summary_tokens = counter(
            "quire_router_summary_tokens", "Tokens that summaries of prompts took", "kind"
        )
        self.cascade = counter(
            "quire_router_cascade_decisions", "Decisions of cascades", "cascade", "decision"
        )
        self.cascade_guesses = counter(
            "quire_router_cascade_guesses",
            "Judged answers of small models, by what the classifier had guessed",
            *("cascade", "guess", "outcome"),
        )
        self.cascade_tokens = counter(
            "quire_router_cascade_tokens",
            "Tokens of prompt and output that cascades took",
            *("cascade", "model", "use"),
        )
        self.quota_tokens = counter(
            "quire_router_quota_tokens", "Tokens that quotas were charged", "kind"
        )
        self.prefills = counter("quire_router_prefills", "Prompts for prefill replicas", "outcome")
        self.resume_seconds = Histogram(
            "quire_router_resume_seconds",
            "From the failure of a replica to the next event of a stream",
            buckets=_SECONDS,
            registry=registry,
        )
        self._interruption_seconds = Histogram(
            "quire_router_interruption_seconds",
            "From the last event of a stream before its replica failed to the next one",
            ("cause",),
            buckets=_INTERRUPTION_SECONDS,
            registry=registry,
        )
        self._phase_seconds = Histogram(
            "quire_router_resume_phase_seconds",
            "Parts of an interruption: until it is noted, sent elsewhere, and has output",
            ("phase",),
            buckets=_INTERRUPTION_SECONDS,
            registry=registry,
        )
        registry.register(_FleetCollector(fleet))

    def resumed_after(self, interruption: Interruption, now_s: float) -> None:
        """Note that an interrupted stream has its next event."""
        self.resume_seconds.observe(interruption.resumed_s(now_s))
        self._interruption_seconds.labels(interruption.cause).observe(interruption.whole_s(now_s))
        for phase, seconds in zip(PHASES, interruption.phases_s(now_s), strict=True):
            self._phase_seconds.labels(phase).observe(seconds)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Read a gauge of a feature when metrics are scraped."""
        Gauge(f"quire_router_{name}", text, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges of the replicas, and the hit rate of the policy."""
        up = GaugeMetricFamily(
            "quire_router_replica_available", "Whether it takes requests", labels=("replica",)
        )
        open_ = GaugeMetricFamily(
            "quire_router_replica_open_requests", "Open requests", labels=("replica",)
        )
        backlog = GaugeMetricFamily(
            "quire_router_replica_backlog_tokens",
            "Tokens of open requests that are not computed yet, estimated",
            labels=("replica",),
        )
        for replica in self._fleet.replicas.values():
            names = (replica.name,)
            up.add_metric(names, float(replica.is_up))
            open_.add_metric(names, len(replica.loads))
            backlog.add_metric(names, replica.backlog_tokens)
        held = GaugeMetricFamily(
            "quire_router_held_requests",
            "New requests that wait for streams that continue",
            self._fleet.resumes.num_held,
        )
        yield from (up, open_, backlog, held)
        for count in self._fleet.policy.counts():
            yield GaugeMetricFamily(f"quire_router_{count.name}", count.text, count.value)
