"""Spans of requests: what they hold, that they need the extra, and that exporting harms nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from quire.api import request_spans
from quire.api.request_spans import RequestSpans, check_spans, open_spans, wants_spans
from quire.base.errors import SettingError
from quire.base.timeline import TimelineReport
from quire.config.server_config import ServerConfig
from quire.obs.spans import RequestSpan
from tests.unit.api.fake_engine import Site
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "secret words"}], "temperature": 0.5, "seed": 3}
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


class KeptSpans:
    """A SpanSink that keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[RequestSpan] = []
        self.num_closed = 0

    def write(self, span: RequestSpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        self.num_closed += 1


def preempted_report() -> TimelineReport:
    harness = Harness(Setup(num_blocks=6, prefix_caching=False, max_num_seqs=2))
    harness.add(make_request("first", [1] * 10, max_tokens=12))
    harness.add(make_request("asked", [2] * 4, max_tokens=12))
    harness.drain()
    return harness.timelines(["asked"])[0]


def spans_of(
    *bodies: dict[str, Any], reports: tuple[TimelineReport, ...] = ()
) -> list[RequestSpan]:
    """Return the spans of requests that are sent one after the other."""

    async def story() -> list[RequestSpan]:
        site, sink = Site(), KeptSpans()
        site.engine.reports = reports
        spans = watch(site, sink)
        for body in bodies:
            await site.post(CHAT, body, headers=TRACEPARENT)
        await spans.close()
        assert sink.num_closed == 1
        return sink.spans

    return asyncio.run(story())


def watch(site: Site, sink: Any) -> RequestSpans:
    spans = RequestSpans(site.server_state, sink)
    site.server_state.on_begin, site.server_state.requests.on_end = spans.begin, spans.ended
    return spans


def test_a_span_has_the_attributes_of_generation_and_no_texts() -> None:
    span, streamed = spans_of({**BODY, "max_tokens": 9}, {**BODY, "stream": True})
    assert span.name == "chat fake"
    attributes = dict(span.attributes)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.time_to_first_chunk": 0.002,
        "http.route": CHAT,
    }
    assert {name: attributes[name] for name in expected} == expected
    assert attributes["gen_ai.usage.input_tokens"] > 2
    assert dict(streamed.attributes)["gen_ai.request.stream"] is True
    assert span.begin_ns <= span.end_ns
    assert dict(span.parent) == TRACEPARENT
    assert "secret" not in repr((span, streamed))


def test_a_span_has_events_for_queue_prefill_first_token_and_preemption() -> None:
    (span,) = spans_of(BODY, reports=(preempted_report(),))
    names = [event.name for event in span.events]
    assert {"quire.queue", "quire.prefill", "quire.first_token", "quire.preemption"} <= set(names)
    preemption = next(event for event in span.events if event.name == "quire.preemption")
    assert preemption.attributes["quire.for"] == "answer"


def test_a_request_that_fails_has_a_span_with_the_error() -> None:
    (span,) = spans_of({**BODY, "temperature": "hot"})
    assert span.error == "invalid_value"


def test_spans_are_off_unless_they_are_asked_for() -> None:
    plain, given = ServerConfig(), ServerConfig(otlp_endpoint="http://localhost:4318")
    assert not wants_spans(plain, {})
    assert wants_spans(given, {})
    assert wants_spans(plain, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"})
    assert not wants_spans(given, {"OTEL_SDK_DISABLED": "true"})
    traces_off = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}
    assert not wants_spans(plain, traces_off)
    with pytest.raises(SettingError, match="http:// or https://"):
        ServerConfig(otlp_endpoint="collector:4318")


def test_without_the_extra_the_setting_is_refused_and_a_variable_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name.split('.')[0]!r}")

    monkeypatch.setattr(request_spans, "find_spec", missing)
    with pytest.raises(SettingError, match=r"pip install 'quire-llm\[otel\]'"):
        check_spans(ServerConfig(otlp_endpoint="http://localhost:4318"))

    async def story() -> None:
        site = Site()
        state, environment = site.server_state, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
        assert open_spans(state, state.config, state.log, environment) is None
        assert "quire-llm[otel]" in site.log.getvalue()

    asyncio.run(story())


# ---- with OpenTelemetry


def test_opentelemetry_gets_the_span_with_its_parent_and_events() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from quire.obs.otel import SpanWriter

    kept = InMemorySpanExporter()
    writer = SpanWriter(SimpleSpanProcessor(kept), version="1", warn=lambda reason: None)
    for span in spans_of(BODY, {**BODY, "temperature": "hot"}, reports=(preempted_report(),)):
        writer.write(span)
    finished = kept.get_finished_spans()
    good, failed = sorted(finished, key=lambda span: span.status.status_code is StatusCode.ERROR)
    assert good.name == "chat fake"
    assert format(good.context.trace_id, "032x") == TRACE_ID
    assert good.parent is not None
    assert format(good.parent.span_id, "016x") == PARENT_ID
    assert good.resource.attributes["service.name"] == "quire"
    assert good.events[0].name == "quire.queue"
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "invalid_value"
    writer.close()


class SlowCollector:
    """Accepts connections and answers nothing until it vanishes."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.accepted: list[socket.socket] = []
        self.has_connection = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                self.accepted.append(self.listening.accept()[0])
                self.has_connection.set()
        except OSError:  # closed
            self.has_connection.set()

    def vanish(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for connection in self.accepted:
            connection.close()


def test_a_slow_and_vanishing_collector_costs_spans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from quire.obs.otel import otlp_writer

    for name, value in (
        ("OTEL_BSP_SCHEDULE_DELAY", "10"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "64"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "60"),
    ):
        monkeypatch.setenv(name, value)
    collector, warnings = SlowCollector(), list[str]()
    writer = otlp_writer(collector.url, version="1", warn=warnings.append)

    async def story() -> int:
        site = Site()
        watch(site, writer)
        statuses = [(await site.post(CHAT, BODY)).status for _ in range(80)]
        assert collector.has_connection.wait(60)  # an export hangs
        statuses += [(await site.post(CHAT, BODY)).status for _ in range(80)]
        collector.vanish()
        statuses += [(await site.post(CHAT, BODY)).status for _ in range(8)]
        return statuses.count(200)

    assert asyncio.run(story()) == 168
    assert len(warnings) <= 1  # of the dropped spans; at most one a minute
    writer.close(timeout_s=0.1)
