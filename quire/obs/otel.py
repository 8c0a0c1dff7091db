"""Send RequestSpans with OpenTelemetry: the only file that imports it (`quire-llm[otel]`).

The SDK reads OTEL_* variables (headers, timeouts, sampler, resource, batches). Spans are exported
in a thread of the SDK with a bounded queue. Always holds: a collector that is slow, gone or refuses
spans costs spans and a warning a minute, never a request; closing waits for it a short time only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.obs.spans import RequestSpan

_CLOSE_S = 2.0
_WARN_EVERY_S = 60.0


def otlp_writer(endpoint: str | None, *, version: str, warn: Callable[[str], None]) -> SpanWriter:
    """Return a writer to a collector. endpoint: None: as OTEL_* variables say."""
    traces = None
    if endpoint is not None:
        base = endpoint.rstrip("/")
        traces = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=traces)
    processor = BatchSpanProcessor(exporter)
    return SpanWriter(processor, version=version, warn=warn, give_up=exporter.shutdown)


class SpanWriter:
    """Writes spans to `processor`. warn: called with problems of the export. give_up: ends an
    export that does not come to an end."""

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        version: str,
        warn: Callable[[str], None],
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._give_up = give_up
        resource = Resource.create({"service.version": version})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "quire"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", version)
        self._propagator = TraceContextTextMapPropagator()
        library = logging.getLogger("opentelemetry")
        library.propagate = False
        library.handlers = [_Warnings(warn)]

    def write(self, span: RequestSpan) -> None:
        """Hand a span over; it is sent later, or dropped where too many wait."""
        written = self._tracer.start_span(
            span.name,
            context=self._propagator.extract(dict(span.parent)),
            kind=SpanKind.SERVER,
            attributes=dict(span.attributes),
            start_time=span.begin_ns,
        )
        for event in span.events:
            written.add_event(event.name, dict(event.attributes), timestamp=event.at_ns)
        if span.error:
            written.set_attribute("error.type", span.error)
            written.set_status(Status(StatusCode.ERROR, span.error))
        written.end(end_time=span.end_ns)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Send what waits, as far as that takes no longer than `timeout_s`."""
        ending = threading.Thread(target=self._provider.shutdown, name="quire-spans", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            self._give_up()


class _Warnings(logging.Handler):
    """Passes on what the library logs, once a minute at most."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn
        self._last_s = -_WARN_EVERY_S

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        now_s = time.monotonic()
        if now_s >= self._last_s + _WARN_EVERY_S:
            self._last_s = now_s
            self._warn(record.getMessage().splitlines()[0][:300])
