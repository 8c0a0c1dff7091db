"""Spans of generation requests: collected here, sent by OpenTelemetry (obs/otel.py) if it is used.

Off unless --otlp-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT is given. A span is made when its request
has ended, from its state and the engine's timeline. Always holds: requests are never delayed or
failed by this; of the tasks that ask for timelines at most MAX_PENDING run, and further spans have
no events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

from starlette.requests import Request

from quire.api.generation.choice_streams import ChoiceStreams
from quire.api.server_state import OpenRequest, ServerState
from quire.base.clock import Clock
from quire.base.errors import QuireError, SettingError
from quire.base.log import Log
from quire.base.version import installed_version
from quire.config.server_config import ServerConfig
from quire.obs.spans import RequestSpan, SpanEvent, Value, sampling_attributes, span_events

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MAX_PENDING = 256
_EXTRA = "install it: pip install 'quire-llm[otel]'"
_OPERATIONS = {"/v1/chat/completions": "chat"}


class SpanSink(Protocol):
    """Takes spans (obs/otel.py)."""

    def write(self, span: RequestSpan) -> None:
        """Take a span; must not block."""

    def close(self) -> None:
        """Send what waits, for a short time."""


def wants_spans(config: ServerConfig, environment: Mapping[str, str]) -> bool:
    """Return whether spans are to be sent: by the setting, or by OpenTelemetry's variables."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if config.otlp_endpoint is not None:
        return True
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    return exporter == "otlp" and any(environment.get(name) for name in ENDPOINT_VARIABLES)


def has_opentelemetry() -> bool:
    """Return whether the extra `otel` is installed."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def check_spans(config: ServerConfig) -> None:
    """Raise SettingError if spans are asked for by the setting and cannot be sent."""
    if config.otlp_endpoint is not None and not has_opentelemetry():
        raise SettingError(
            f"otlp_endpoint is {config.otlp_endpoint} and OpenTelemetry is not installed; {_EXTRA}"
        )


def open_spans(
    server_state: ServerState, config: ServerConfig, log: Log, environment: Mapping[str, str]
) -> RequestSpans | None:
    """Return what makes spans, where they are wanted and can be sent."""
    if not wants_spans(config, environment):
        return None
    if not has_opentelemetry():
        given = next(name for name in ENDPOINT_VARIABLES if environment.get(name))
        log.warning(
            "no spans are sent",
            reason=f"{given} is set and OpenTelemetry is not installed; {_EXTRA}",
        )
        return None
    from quire.obs.otel import otlp_writer  # the optional extra

    def warn(reason: str) -> None:
        log.warning("spans are not sent", reason=reason)

    sink = otlp_writer(config.otlp_endpoint, version=installed_version(), warn=warn)
    return RequestSpans(server_state, sink)


class RequestSpans:
    """Makes the spans of one server process."""

    def __init__(self, server_state: ServerState, sink: SpanSink) -> None:
        self._server_state = server_state
        self._sink = sink
        self._clock = Clock()
        self._open: dict[str, Request] = {}
        self._pending: set[asyncio.Task[None]] = set()

    def begin(self, open_: OpenRequest, request: Request) -> None:
        """Follow a request that begins now."""
        self._open[open_.id] = request

    def ended(self, open_: OpenRequest) -> None:
        """Make the span of a request that has ended."""
        request = self._open.pop(open_.id, None)
        if request is None:
            return
        end_ns = time.time_ns()
        answers = getattr(request.state, "answers", None)
        if not isinstance(answers, ChoiceStreams) or len(self._pending) >= MAX_PENDING:
            self._sink.write(self._span(open_, request, end_ns, ()))
            return
        task = asyncio.ensure_future(self._write(open_, request, end_ns))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """Write the spans of ended requests, and send what waits for a short time."""
        if self._pending:
            await asyncio.wait(set(self._pending), timeout=1.0)
        await asyncio.to_thread(self._sink.close)

    async def _write(self, open_: OpenRequest, request: Request, end_ns: int) -> None:
        events: Sequence[SpanEvent] = ()
        engine = self._server_state.loaded_engine
        if engine is not None:
            try:
                answer = await engine.timelines(open_.id)
            except QuireError:  # it is gone; the span goes without events
                pass
            else:
                offset_ns = time.time_ns() - round(self._clock.now_ms() * 1e6)
                events = await asyncio.to_thread(
                    lambda: tuple(span_events(answer.reports, offset_ns))
                )
        self._sink.write(self._span(open_, request, end_ns, events))

    def _span(
        self, open_: OpenRequest, request: Request, end_ns: int, events: Sequence[SpanEvent]
    ) -> RequestSpan:
        operation = _OPERATIONS.get(open_.route, "text_completion")
        engine = self._server_state.loaded_engine
        model = "" if engine is None else engine.card.name
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": open_.id,
            "gen_ai.request.stream": open_.is_stream,
            "http.route": open_.route,
            "quire.tenant": request.state.tenant.name,
        }
        answers = getattr(request.state, "answers", None)
        if isinstance(answers, ChoiceStreams):
            attributes |= _of_answers(answers)
        if open_.requester.name:
            attributes["quire.request_name"] = open_.requester.name
        headers = request.headers
        sent = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return RequestSpan(
            name=f"{operation} {model}".strip(),
            begin_ns=round(open_.created_s * 1e9),
            end_ns=end_ns,
            parent=sent,
            attributes=attributes,
            events=events,
            error=open_.error or "",
        )


def _of_answers(answers: ChoiceStreams) -> dict[str, Value]:
    usage, timings = answers.usage, answers.timings
    attributes: dict[str, Value] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": answers.reasons,
        **sampling_attributes(answers.prompts[0].sampling),
    }
    if timings is not None and timings.first_token_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = timings.first_token_ms / 1e3
    return attributes
