"""RequestSpan: a request as OpenTelemetry describes it, without OpenTelemetry.

Attributes have the names of the GenAI semantic conventions
(opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans) and `quire.` before own ones. Always
holds: no attribute and no event has a prompt, an answer or a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.base.sampling_params import SamplingParams
from quire.base.timeline import EventKind, TimelineReport
from quire.obs.timeline import explain

Value = str | bool | int | float | Sequence[str]
# Events of a span: the chunks of a prompt beyond this are left out.
MAX_CHUNKS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """A moment of a span, in nanoseconds of the system's clock."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpan:
    """One request. parent: `traceparent` and `tracestate` of the client, where it sent them.
    error: the code of the error that ended it, "" for none."""

    name: str
    begin_ns: int
    end_ns: int
    parent: Mapping[str, str]
    attributes: Mapping[str, Value]
    events: Sequence[SpanEvent]
    error: str = ""


def sampling_attributes(sampling: SamplingParams) -> dict[str, Value]:
    """Return the attributes of sampling parameters; stop strings are texts and are left out."""
    attributes: dict[str, Value] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": sampling.n,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def span_events(reports: Sequence[TimelineReport], offset_ns: int) -> Iterator[SpanEvent]:
    """Yield queue, prefill, first token and preemptions of each stream.

    offset_ns: the system's clock less the engine's.
    """
    for report in reports:
        zero_ns = offset_ns + round(report.arrival_ms * 1e6)

        def at(ms: float, zero_ns: int = zero_ns) -> int:
            return zero_ns + round(ms * 1e6)

        timeline = explain(report, shows_others=False)
        stream: dict[str, Value] = {"quire.stream": report.stream}
        for wait in timeline["queue"]["spans"]:
            waited: dict[str, Value] = {"quire.ms": wait["ms"], "quire.reason": wait["reason"]}
            yield SpanEvent(name="quire.queue", at_ns=at(wait["at_ms"]), attributes=stream | waited)
        for chunk in timeline["prefill"]["chunks"][:MAX_CHUNKS]:
            of_chunk: dict[str, Value] = {"quire.ms": chunk["ms"], "quire.tokens": chunk["tokens"]}
            yield SpanEvent(
                name="quire.prefill", at_ns=at(chunk["at_ms"]), attributes=stream | of_chunk
            )
        if not math.isnan(report.first_token_ms):
            first_ms = report.first_token_ms - report.arrival_ms
            yield SpanEvent(name="quire.first_token", at_ns=at(first_ms), attributes=stream)
        for event in timeline["events"]:
            if event["event"] == EventKind.PREEMPTED:
                why: dict[str, Value] = {"quire.for": event["for"], "quire.blocks": event["blocks"]}
                yield SpanEvent(
                    name="quire.preemption", at_ns=at(event["at_ms"]), attributes=stream | why
                )
