"""Summarize a simulation: latency, goodput and waits, of all requests and of each tenant.

Metrics are defined as for measured load (quire/obs/timing.py). A latency is from arrival to the
last token; a wait is from arrival to the first step that computes something of the request.
Rejected requests have no wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.obs.report import table
from quire.obs.timing import Goals, RequestTimes, percentiles, rate_summary
from quire.sim.load import TraceRequest
from quire.sim.run import FinishedRequest, Run


def summary_of(run: Run, requests: Sequence[TraceRequest], goals: Goals) -> dict[str, Any]:
    """Return the metrics in seconds; under "tenants" the same for each tenant."""
    found = _times(run.finished, run.refused, goals)
    stats = run.stats
    queried = stats.prefix_queried_tokens_total
    found |= {
        "refusals": run.refusals,
        "steps": stats.steps_total,
        "preemptions": stats.preemptions_total,
        "hit_share": stats.prefix_hit_tokens_total / queried if queried else 0.0,
        "busy_share": run.busy_ms / run.end_ms if run.end_ms else 0.0,
        "end_s": run.end_ms / 1e3,
    }
    if run.stage_busy_ms:
        found["stages"] = {
            "busy_share": [ms / run.end_ms if run.end_ms else 0.0 for ms in run.stage_busy_ms],
            "bubble_share": stats.stage_wait_ms_total / run.busy_ms if run.busy_ms else 0.0,
        }
    if stats.draft_rows_total:
        drafted, accepted = map(sum, (stats.draft_tokens_total, stats.accepted_draft_tokens_total))
        found["drafts"] = {
            "rows": stats.draft_rows_total,
            "drafted": drafted,
            "accepted": accepted,
            "tokens_per_row": 1.0 + accepted / stats.draft_rows_total,
        }
    tenants = sorted({request.tenant for request in requests} - {""})
    found["tenants"] = {
        tenant: _times(
            [one for one in run.finished if one.request.tenant == tenant],
            [one for one in run.refused if one[0].tenant == tenant],
            goals,
        )
        for tenant in tenants
    }
    return found


def _times(
    finished: Sequence[FinishedRequest], refused: Sequence[tuple[TraceRequest, str]], goals: Goals
) -> dict[str, Any]:
    times = [_request_times(one) for one in finished]
    times += [_refused_times(request, kind) for request, kind in refused]
    arrivals_s = [one.sent_s for one in times]
    seconds = max(max(arrivals_s) - min(arrivals_s), 1e-9)
    found = rate_summary(times, offered_per_s=len(times) / seconds, seconds=seconds, goals=goals)
    latencies_s = [one.last_s - one.sent_s for one in times[: len(finished)]]
    waits_s = [(one.first_scheduled_ms - one.request.arrival_ms) / 1e3 for one in finished]
    return found | {
        "ttft_mean_s": _mean([one.ttft_s for one in times[: len(finished)]]),
        "latency_s": percentiles(latencies_s),
        "latency_mean_s": _mean(latencies_s),
        "longest_wait_s": max(waits_s, default=0.0),
    }


def _request_times(one: FinishedRequest) -> RequestTimes:
    return RequestTimes(
        sent_s=one.request.arrival_ms / 1e3,
        first_s=one.first_token_ms / 1e3,
        last_s=one.last_token_ms / 1e3,
        prompt_tokens=one.request.prompt_tokens,
        output_tokens=one.request.output_tokens,
    )


def _refused_times(request: TraceRequest, kind: str) -> RequestTimes:
    sent_s = request.arrival_ms / 1e3
    return RequestTimes(
        sent_s=sent_s,
        first_s=sent_s,
        last_s=sent_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=0,
        error=kind,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def comparison_text(outcome: Mapping[str, Any]) -> str:
    """Return the table of a comparison: a row per policy and speed, and the light tenants."""
    settings = outcome["settings"]
    goals = settings["goals"]
    lines = [
        f"{settings['machine']}: {settings['num_requests']} requests of {settings['trace']}, "
        f"{settings['left_out']} left out; max_tokens {settings['max_tokens']}",
        f"goal: first token within {goals['ttft_s']:g} s, "
        f"{1e3 * goals['tpot_s']:g} ms per output token after it",
        table(_HEADINGS, [_row(one) for one in outcome["runs"]]),
    ]
    if "draft_acceptance" in settings:
        lines += ["", _drafts_text(outcome)]
    if any("stages" in one["summary"] for one in outcome["runs"]):
        lines += ["", _stages_text(outcome)]
    if not outcome.get("complete", True):
        lines.append(_stopped_text(outcome))
    with_flood = [one for one in outcome["runs"] if one["light"] is not None]
    if with_flood:
        lines += ["", _light_text(with_flood)]
    return "\n".join(lines)


def _drafts_text(outcome: Mapping[str, Any]) -> str:
    """Return a table of draft tokens, which count among the steps above."""
    rows = []
    for one in outcome["runs"]:
        found, shown = one["summary"].get("drafts"), ("0", "-", "-")
        if found is not None:
            share = 100 * found["accepted"] / found["drafted"]
            shown = (f"{found['drafted']:,}", f"{share:.0f} %", f"{found['tokens_per_row']:.2f}")
        rows.append((one["policy"], f"{one['speed']:g}", *shown))
    headings = ("policy", "speed", "drafts", "accepted", "tokens per row with drafts")
    return table(headings, rows)


def _stages_text(outcome: Mapping[str, Any]) -> str:
    """Return a table of the stages of a pipeline: when each computes, and how much of its time the
    last one waits for rows."""
    rows = []
    for one in outcome["runs"]:
        found = one["summary"]["stages"]
        busy = (f"{100 * share:.0f} %" for share in found["busy_share"])
        bubble = f"{100 * found['bubble_share']:.0f} %"
        rows.append((one["policy"], f"{one['speed']:g}", *busy, bubble))
    stages = range(len(outcome["runs"][0]["summary"]["stages"]["busy_share"]))
    headings = ("policy", "speed", *(f"stage {stage} busy" for stage in stages), "bubble")
    return table(headings, rows)


def _stopped_text(outcome: Mapping[str, Any]) -> str:
    complete = sum(one["complete"] for one in outcome["runs"])
    text = f"stopped after {complete} of {outcome['num_runs']} runs"
    partial = [one for one in outcome["runs"] if not one["complete"]]
    if not partial:
        return text
    [last] = partial
    finished = last["summary"]["num_requests"]
    return (
        f"{text}; * {last['policy']} at speed {last['speed']:g} is partial: "
        f"{finished} of {outcome['settings']['num_requests']} requests ended"
    )


_HEADINGS = (
    *("policy", "speed", "offered", "refused", "mean", "TTFT mean", "p50", "p99"),
    *("TPOT p99", "goodput", "longest wait", "preempted", "hits", "busy"),
)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    found = one["summary"]
    return (
        one["policy"] + "*" * (not one.get("complete", True)),
        f"{one['speed']:g}",
        f"{found['offered_per_s']:.3g}/s",
        str(found["num_errors"]),
        _seconds(found["latency_mean_s"]),
        _seconds(found["ttft_mean_s"]),
        _seconds(found["ttft_s"].get("p50")),
        _seconds(found["ttft_s"].get("p99")),
        f"{1e3 * found['tpot_s']['p99']:.0f} ms" if found["tpot_s"] else "-",
        f"{found['goodput_per_s']:.3g}/s",
        _seconds(found["longest_wait_s"]),
        str(found["preemptions"]),
        f"{100 * found['hit_share']:.0f} %",
        f"{100 * found['busy_share']:.0f} %",
    )


def _light_text(with_flood: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in with_flood:
        light, alone = one["light"]["beside"], one["light"]["alone"]
        rows.append(
            (
                one["policy"],
                f"{one['speed']:g}",
                *(
                    text
                    for name in ("ttft_s", "latency_s")
                    for text in _beside(light[name].get("p99"), alone[name].get("p99"))
                ),
            )
        )
    headings = (
        *("light tenant", "flood speed", "TTFT p99", "alone", "times"),
        *("latency p99", "alone", "times"),
    )
    return table(headings, rows)


def _beside(loaded: float | None, alone: float | None) -> tuple[str, str, str]:
    times = f"{loaded / alone:.2f}" if loaded is not None and alone else "-"
    return _seconds(loaded), _seconds(alone), times


def _seconds(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"
