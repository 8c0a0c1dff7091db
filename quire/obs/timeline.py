"""Explain timelines: where the time of a request went, from the report of its scheduler.

Plain arithmetic on a TimelineReport; knows no engine, no clock and no HTTP. Each gap between tokens
is divided among causes that add up to it. Always holds: an explanation has counts and times of
other requests, and none of their ids, texts or tenants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire.base.cache_usage import CacheUsage, Miss, MissReason
from quire.base.timeline import EventKind, HistoryEvent, TimelineReport


class Cause(StrEnum):
    """What a time span went into."""

    STEP = "own_step"  # the step's time without the parts below
    PREFILL = "other_prefill"  # the share of other requests' prefill in its steps
    RECOMPUTE = "recompute"  # computing again what a preemption dropped
    PREEMPTED = "preempted"  # outside a slot, in the queue, after a preemption
    KV_LOAD = "kv_load"  # outside a slot, until blocks came from a tier
    SLOW_READER = "slow_reader"  # outside a slot, because its client did not read
    PASSED_OVER = "passed_over"  # in a slot, in a step without a row of it
    GRAMMAR = "grammar_mask"  # its step waited for grammar masks
    HOST = "host"  # no step was computed


CAUSE_WORDS = {
    Cause.STEP: "its own steps",
    Cause.PREFILL: "prefill of other requests in its steps",
    Cause.RECOMPUTE: "recomputation after a preemption",
    Cause.PREEMPTED: "preempted, waiting for a slot",
    Cause.KV_LOAD: "loading KV blocks from a tier",
    Cause.SLOW_READER: "paused: the client read too slowly",
    Cause.PASSED_OVER: "steps without a token of it",
    Cause.GRAMMAR: "waiting for grammar masks",
    Cause.HOST: "host time between steps",
}
WAIT_WORDS = {
    "step_in_progress": "waiting for the next step to begin",
    "no_slot": "all slots were taken (--max-num-seqs)",
    "no_blocks": "too few KV blocks were free (--kv-cache-memory)",
    "step_budget": "the step's tokens were given to others (--max-num-batched-tokens)",
    "policy_order": "another request was first by --scheduling-policy",
    "tenant_limit": "its tenant ran as many requests as it may (max_running)",
    "tenant_ceiling": "its tenant had as many KV blocks as it may",
    "grammar": "its grammar was being compiled",
    "kv_load": "its KV blocks were being loaded from a tier",
    "length_limit": "--max-long-prompts or --max-short-prompts was reached",
    "group": "another stream of the request computed the prompt",
    "pending_prefix": "another request was computing the same prefix",
    "background": "it is in the background (a line of a batch), and other requests ran",
}
MISS_WORDS = {
    MissReason.FIRST_DIFFERENCE: "the nearest cached prompt goes on with other tokens",
    MissReason.NOT_SEEN: "no cached prompt goes on from there",
    MissReason.NOT_FOUND: "not found in the cache",
    MissReason.EVICTED: "its block was evicted",
    MissReason.OTHER_SALT: "cached under another cache_salt of the same tenant",
    MissReason.SCORED: "log-probabilities of a prompt, or means of its rows, are always computed",
    MissReason.DISABLED: "prefix caching is off (--no-enable-prefix-caching)",
}
PARTIAL_BLOCK = "partial_block"
_PARTIAL_WORDS = "the rest fills no whole block, and only whole blocks are cached"
# Waits for masks below this are noise.
_MIN_MASK_MS = 0.05


@dataclass(slots=True)
class _Span:
    """One step of a request with the time since the one before. parts: milliseconds by cause.

    rows, prefill_tokens: of other requests, too; None where they are not shown.
    """

    from_ms: float
    to_ms: float
    step: int
    own_tokens: int
    samples: int
    rows: int | None
    prefill_tokens: int | None
    prefill_share: float
    parts: dict[Cause, float]


def explain(report: TimelineReport, *, shows_others: bool = True) -> dict[str, Any]:
    """Return the timeline of one stream as JSON; times are milliseconds after its arrival.

    shows_others: whether rows and tokens of other requests are counted, which reveals the lengths
    of their prompts. Their share of its time is given in any case.
    """
    spans = list(_spans(report))
    zero = report.arrival_ms
    if not shows_others:
        for span in spans:
            span.rows = span.prefill_tokens = None
    first, gaps, chunks = _tokens(report, spans)
    end_ms = report.now_ms if math.isnan(report.ended_ms) else report.ended_ms
    return {
        "stream": report.stream,
        "finish_reason": report.finish_reason or None,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "completion_tokens": max(report.output_tokens, 0),
        "total_ms": _round(end_ms - zero),
        "queue": _queue(report),
        "cache": _cache(report),
        "prefill": {
            "ms": _round(sum(span.to_ms - span.from_ms for span in chunks)),
            "chunks": [
                {
                    "at_ms": _round(span.from_ms - zero),
                    "ms": _round(span.to_ms - span.from_ms),
                    "step": span.step,
                    "tokens": span.own_tokens,
                    **_others(span),
                    "causes": _causes(span.parts),
                }
                for span in chunks
            ],
        },
        "first_token_ms": None if first is None else _round(first - zero),
        "gaps": gaps,
        "causes": _causes(_summed(gaps)),
        "events": [_event(event, zero) for event in report.events],
        "dropped_events": report.dropped_events,
        "steps_missing": report.is_cut,
    }


def _queue(report: TimelineReport) -> dict[str, Any]:
    zero = report.arrival_ms
    admitted = [event.ms for event in report.events if event.kind is EventKind.ADMITTED]
    first_ms = admitted[0] if admitted else math.inf
    waits = [wait for wait in report.waits if wait.from_ms < first_ms]
    by_reason: dict[str, float] = {}
    for wait in waits:
        by_reason[wait.reason.value] = by_reason.get(wait.reason, 0.0) + wait.to_ms - wait.from_ms
    return {
        "ms": _round(sum(by_reason.values())),
        "reasons": [
            {"reason": reason, "ms": _round(ms), "description": WAIT_WORDS[reason]}
            for reason, ms in sorted(by_reason.items(), key=lambda item: -item[1])
        ],
        "spans": [
            {
                "at_ms": _round(wait.from_ms - zero),
                "ms": _round(wait.to_ms - wait.from_ms),
                "reason": wait.reason.value,
            }
            for wait in report.waits
        ],
        "overtaken_by": report.overtaken_by,
    }


def _cache(report: TimelineReport) -> dict[str, Any]:
    use = report.cache_use
    return {
        "cached_tokens": report.cached_tokens,
        "host_tokens": use.host_tokens,
        "disk_tokens": use.disk_tokens,
        "first_miss": _first_miss(report, use),
    }


def _first_miss(report: TimelineReport, use: CacheUsage) -> dict[str, Any] | None:
    admitted = any(event.kind is EventKind.ADMITTED for event in report.events)
    if not admitted or report.cached_tokens >= report.prompt_tokens:
        return None
    miss: Miss | None = use.miss
    if miss is None:
        words = _PARTIAL_WORDS
        return {"token": report.cached_tokens, "reason": PARTIAL_BLOCK, "description": words}
    judged = "when asked" if report.is_judged_now else "at admission"
    return {
        "token": miss.token,
        "reason": miss.reason.value,
        "description": MISS_WORDS[miss.reason],
        "judged": judged,
    }


def _event(event: HistoryEvent, zero: float) -> dict[str, Any]:
    found: dict[str, Any] = {"at_ms": _round(event.ms - zero), "event": event.kind.value}
    if event.kind is EventKind.ADMITTED:
        found |= {"step": event.step, "from_token": event.start, "known_tokens": event.known}
    elif event.kind is EventKind.PREEMPTED:
        found |= {"for": event.detail, "blocks": "moved" if event.known else "dropped"}
    elif event.kind in (EventKind.LOAD_BEGUN, EventKind.LOAD_ENDED):
        found["blocks"] = event.known
    return found


def _tokens(
    report: TimelineReport, spans: Sequence[_Span]
) -> tuple[float | None, list[dict[str, Any]], list[_Span]]:
    """Return when the first token came, the gaps between tokens, and the prefill chunks."""
    zero = report.arrival_ms
    first: float | None = None
    if not math.isnan(report.first_token_ms):
        first = report.first_token_ms
    gaps: list[dict[str, Any]] = []
    chunks: list[_Span] = []
    num_first, since_ms = 1, first  # tokens that came with the first
    num_tokens = 0
    parts: dict[Cause, float] = {}
    for span in spans:
        if first is None or span.to_ms <= first:
            if span.own_tokens:
                chunks.append(span)
            if span.samples and first is not None and span.to_ms == first:
                num_first = span.samples
            continue
        num_tokens = num_tokens or num_first
        for cause, ms in span.parts.items():
            parts[cause] = parts.get(cause, 0.0) + ms
        if span.own_tokens > span.samples and gaps and not parts.get(Cause.RECOMPUTE):
            # Tokens that a grammar forced came with the token before.
            gaps[-1]["tokens"] += span.own_tokens - span.samples
            num_tokens += span.own_tokens - span.samples
        if not span.samples or since_ms is None:
            continue
        num_tokens += span.samples
        gaps.append(
            {
                "token": num_tokens,
                "tokens": span.samples,
                "at_ms": _round(since_ms - zero),
                "ms": _round(span.to_ms - since_ms),
                "step": span.step,
                **_others(span),
                "causes": _causes(parts),
            }
        )
        since_ms, parts = span.to_ms, {}
    return first, _with_tokens(gaps, report, num_first), chunks


def _with_tokens(
    gaps: list[dict[str, Any]], report: TimelineReport, num_first: int
) -> list[dict[str, Any]]:
    """Return the gaps that ended with a token: the row of a last step may have failed."""
    if report.is_cut or report.output_tokens < 0:
        return gaps
    kept, left = [], report.output_tokens - num_first
    for gap in gaps:
        if left <= 0:
            break
        behind = max(gap["tokens"] - left, 0)  # a run may go on behind the end
        gap["token"] -= behind
        gap["tokens"] -= behind
        kept.append(gap)
        left -= gap["tokens"]
    return kept


def _others(span: _Span) -> dict[str, Any]:
    return {
        "other_rows": None if span.rows is None else max(span.rows - 1, 0),
        "other_prefill_tokens": span.prefill_tokens,
    }


def _spans(report: TimelineReport) -> Iterator[_Span]:
    """Yield the steps since its first admission, each with its causes."""
    rows = report.rows
    admissions = [event for event in report.events if event.kind is EventKind.ADMITTED]
    if not admissions:
        return
    away = _periods_away(report)
    end_ms = math.inf if math.isnan(report.ended_ms) else report.ended_ms
    before_ms = admissions[0].ms
    again, position = iter(admissions[1:]), 0
    returned: HistoryEvent | None = next(again, None)
    goal = 0  # positions below are computed again
    columns = zip(
        rows.steps.tolist(),
        rows.began_ms.tolist(),
        rows.ended_ms.tolist(),
        rows.rows.tolist(),
        rows.own_tokens.tolist(),
        rows.own_samples.tolist(),
        rows.prefill_tokens.tolist(),
        rows.prefill_share.tolist(),
        strict=True,
    )
    for step, began_ms, ended_ms, num_rows, own, samples, prefill, share in columns:
        if ended_ms > end_ms:
            return
        while returned is not None and step >= returned.step:
            position, goal = returned.start, returned.known
            returned = next(again, None)
        # The sampling row of a resumed request computes its last known token as any step does.
        is_again = bool(own) and position + 1 < goal
        position += own
        from_ms = min(max(before_ms, admissions[0].ms), ended_ms)
        span = _Span(from_ms, ended_ms, step, own, samples, num_rows, prefill, share, {})
        span.parts = _parts(span, began_ms, away, report.mask_waits, is_again=is_again)
        before_ms = ended_ms
        yield span


def _periods_away(report: TimelineReport) -> list[tuple[float, float, Cause]]:
    """Return when it had no slot after its first admission, and why."""
    until_ms = report.now_ms if math.isnan(report.ended_ms) else report.ended_ms
    loads = _loads(report.events, until_ms)
    periods: list[tuple[float, float, Cause]] = []
    since_ms, why = 0.0, None
    was_admitted = False
    for event in (*report.events, None):
        ends = event is None or event.kind in (
            *(EventKind.ADMITTED, EventKind.RESUMED, EventKind.PAUSED),
        )
        if ends and why is not None:
            to_ms = until_ms if event is None else event.ms
            periods += _with_loads(since_ms, to_ms, why, loads)
            why = None
        if event is None:
            continue
        was_admitted = was_admitted or event.kind is EventKind.ADMITTED
        if not was_admitted:
            continue
        if event.kind is EventKind.PREEMPTED or event.kind is EventKind.RESUMED:
            since_ms, why = event.ms, Cause.PREEMPTED
        elif event.kind is EventKind.PAUSED:
            since_ms, why = event.ms, Cause.SLOW_READER
    return periods


def _loads(events: Sequence[HistoryEvent], until_ms: float) -> list[tuple[float, float]]:
    loads: list[tuple[float, float]] = []
    for event in events:
        if event.kind is EventKind.LOAD_BEGUN:
            loads.append((event.ms, until_ms))
        elif event.kind is EventKind.LOAD_ENDED and loads:
            loads[-1] = (loads[-1][0], event.ms)
    return loads


def _with_loads(
    from_ms: float, to_ms: float, why: Cause, loads: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, Cause]]:
    """Yield a period cut by the loads in it."""
    for begin_ms, end_ms in loads:
        begin, end = max(begin_ms, from_ms), min(end_ms, to_ms)
        if begin < end:
            if from_ms < begin:
                yield from_ms, begin, why
            yield begin, end, Cause.KV_LOAD
            from_ms = end
    if from_ms < to_ms:
        yield from_ms, to_ms, why


def _parts(
    span: _Span,
    began_ms: float,
    away: Sequence[tuple[float, float, Cause]],
    mask_waits: Sequence[tuple[float, float]],
    *,
    is_again: bool,
) -> dict[Cause, float]:
    """Divide the time of a span among its causes."""
    parts: dict[Cause, float] = {}
    begin_ms = min(max(began_ms, span.from_ms), span.to_ms)
    host_ms, step_ms = begin_ms - span.from_ms, span.to_ms - begin_ms
    for from_ms, to_ms, cause in away:
        in_host = max(min(to_ms, begin_ms) - max(from_ms, span.from_ms), 0.0)
        in_step = max(min(to_ms, span.to_ms) - max(from_ms, begin_ms), 0.0)
        if in_host + in_step > 0:
            parts[cause] = parts.get(cause, 0.0) + in_host + in_step
            host_ms, step_ms = host_ms - in_host, step_ms - in_step
    parts[Cause.HOST] = max(host_ms, 0.0)
    step_ms = max(step_ms, 0.0)
    if not span.own_tokens:
        parts[Cause.PASSED_OVER] = step_ms
        return parts
    masked = sum(ms for end_ms, ms in mask_waits if span.from_ms < end_ms <= span.to_ms)
    if masked >= _MIN_MASK_MS:
        parts[Cause.GRAMMAR] = min(masked, step_ms)
        step_ms -= parts[Cause.GRAMMAR]
    parts[Cause.PREFILL] = step_ms * min(span.prefill_share, 1.0)
    step_ms -= parts[Cause.PREFILL]
    parts[Cause.RECOMPUTE if is_again else Cause.STEP] = step_ms
    return parts


def _summed(gaps: Sequence[dict[str, Any]]) -> dict[Cause, float]:
    total: dict[Cause, float] = {}
    for gap in gaps:
        for part in gap["causes"]:
            cause = Cause(part["cause"])
            total[cause] = total.get(cause, 0.0) + part["ms"]
    return total


def _causes(parts: dict[Cause, float]) -> list[dict[str, Any]]:
    """Return causes with their milliseconds, the largest first; none of no time."""
    return [
        {"cause": cause.value, "ms": _round(ms)}
        for cause, ms in sorted(parts.items(), key=lambda item: -item[1])
        if _round(ms) > 0
    ]


def _round(ms: float) -> float:
    return round(ms, 3)
