"""The series that the API layer counts in: their names, help texts, labels and buckets.

metrics.py says when each is counted; engine_metrics.py has those of the engine. docs/metrics.md
lists all.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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


class Series:
    """All series, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self.first_token = histogram(
            "quire_time_to_first_token_seconds",
            "From arrival to the first token, a choice",
            SECONDS,
        )
        self.per_token = histogram(
            "quire_time_per_output_token_seconds",
            "Mean time between output tokens after the first, a choice",
            TOKEN_SECONDS,
        )
        self.end_to_end = histogram(
            "quire_request_seconds", "From arrival to the last token, a choice", SECONDS
        )
        self.queued = histogram(
            "quire_queue_seconds",
            "From arrival to the first step it was part of, a choice",
            SECONDS,
        )
        self.batch_rows = histogram("quire_batch_rows", "Requests computed in a step", COUNTS)
        self.batch_tokens = histogram("quire_batch_tokens", "Token rows computed in a step", COUNTS)
        self.finished = Counter(
            "quire_requests",
            "Choices that ended, by finish reason",
            ("finish_reason",),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "quire_prompt_tokens", "Prompt tokens of admitted prompts", registry=registry
        )
        self.generated_tokens = Counter(
            "quire_generated_tokens", "Tokens generated and sent", registry=registry
        )
        self.errors = Counter(
            "quire_errors",
            "Requests that ended in an error, by its class",
            ("kind",),
            registry=registry,
        )
        self.timeouts = Counter(
            "quire_timeouts", "Requests ended by their time limit", registry=registry
        )
        self.disconnects = Counter(
            "quire_disconnects",
            "Requests with a client that disconnected before the answer was complete",
            registry=registry,
        )
        self.slow_readers = Counter(
            "quire_slow_readers", "Streams cut because their reader did not read", registry=registry
        )
        self.dropped_lines = Counter(
            "quire_log_lines_dropped",
            "Log lines dropped because the log's reader did not keep up",
            registry=registry,
        )
        self._add_http(registry)

    def _add_http(self, registry: CollectorRegistry) -> None:
        """Add the series of responses, of goodput and of tenants."""
        self.responses = Counter(
            "quire_http_responses",
            "HTTP responses, by route and status",
            ("route", "status"),
            registry=registry,
        )
        self.open = Gauge(
            "quire_open_requests",
            "HTTP requests being answered",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.good_requests = Counter(
            "quire_goodput_requests",
            "Choices that were completed and met each objective they had",
            registry=registry,
        )
        self.good_tokens = Counter(
            "quire_goodput_tokens", "Tokens generated for such choices", registry=registry
        )
        self.missed = Counter(
            "quire_missed_objectives",
            "Objectives of choices that were not met, by their field",
            ("objective",),
            registry=registry,
        )
        self.refused = Counter(
            "quire_refused_requests",
            "Requests refused before anything was computed, by reason",
            ("reason",),
            registry=registry,
        )
        self.tenant_prompt_tokens = Counter(
            "quire_tenant_prompt_tokens",
            "Prompt tokens of admitted prompts, by tenant",
            ("tenant",),
            registry=registry,
        )
        self.tenant_generated_tokens = Counter(
            "quire_tenant_generated_tokens",
            "Tokens generated and sent, by tenant",
            ("tenant",),
            registry=registry,
        )


def restarts_counter() -> Counter:
    """Return the counter of API processes that ended and were replaced, for their supervisor."""
    return Counter(
        "quire_api_process_restarts",
        "API processes that ended by themselves and were replaced",
        registry=None,
    )
