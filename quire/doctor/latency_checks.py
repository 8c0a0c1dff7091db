"""Checks of a server's latency: TTFT, TPOT and their tails, each with its cause.

Pure functions of a Situation. docs/doctor.md has the thresholds and the reasons for them.
"""

from __future__ import annotations

from quire.doctor.finding import Finding, Lever, Verdict, ok
from quire.doctor.levers import (
    chosen,
    fewer_slots,
    int8_blocks,
    larger_steps,
    more_blocks,
    more_slots,
    one_long_prompt,
    overlap,
    quantize,
    replica,
    smaller_steps,
    tpot_target,
)
from quire.doctor.situation import MIN_FINISHED, Situation, time_text, times_text

# From this share of TTFT on, queueing is its cause; below it, computing the prompt.
QUEUE_SHARE = 0.5
# Committed KV blocks from which on new requests wait for memory.
BLOCKS_SHORT = 0.9
# Share of the time from which on the device itself is the limit.
DEVICE_BUSY = 0.8
# Share of prompt tokens in steps from which on prefill disturbs decoding.
PREFILL_SHARE = 0.5
# Share of steps with large batches from which on slots are full at times.
LARGE_BATCH_SHARE = 0.1
# Preemptions per request that are too many.
PREEMPTION_SHARE = 0.05
# A batch of so many rows can be made smaller to make its steps shorter.
LARGE_BATCH_ROWS = 4
# A 99th percentile beyond the goal is a tail if it is so many times the median.
TAIL_RATIO = 3.0

TTFT, TPOT = "quire_time_to_first_token_seconds", "quire_time_per_output_token_seconds"
_TOO_FEW = f"fewer than {MIN_FINISHED} choices ended between the readings"


def check_ttft(situation: Situation) -> Finding:
    """Compare the 95th percentile of TTFT with the goal, and find out where the time goes."""
    ttft, goal_s = situation.ttft, situation.goals.ttft_s
    evidence = {TTFT: times_text(ttft)}
    if ttft.num < MIN_FINISHED:
        return _still_waiting(situation) or ok("TTFT", _TOO_FEW)
    p95_s = ttft.quantile(0.95)
    if p95_s <= goal_s:
        return ok("TTFT", f"p95 {time_text(p95_s)}, goal {time_text(goal_s)}", **evidence)
    queued = situation.queued
    share = min(queued.total / ttft.total, 1.0) if ttft.total else 0.0
    evidence["quire_queue_seconds"] = (
        f"mean {time_text(queued.mean)} of {time_text(ttft.mean)} to the first token"
    )
    begin = f"p95 {time_text(p95_s)}, goal {time_text(goal_s)}: "
    if share >= QUEUE_SHARE:
        return _queueing(situation, f"{begin}{100 * share:.0f} % is queueing", evidence)
    evidence["quire_prompt_tokens_total"] = f"{situation.prompt_tokens:.0f} tokens a prompt"
    evidence["quire_prefix_hit_tokens_total"] = f"{100 * situation.hit_share:.0f} % found cached"
    return Finding(
        check="TTFT",
        verdict=Verdict.PROBLEM,
        found=f"{begin}{100 - 100 * share:.0f} % is prefill, the computation of the prompt",
        action="shorten prompts, let them begin alike (prefix cache), or take a faster device",
        evidence=evidence,
        levers=chosen(larger_steps(situation), quantize(situation), replica(situation)),
        metric="ttft_p95_ms",
    )


def _still_waiting(situation: Situation) -> Finding | None:
    """Return a finding where requests wait longer than the goal, although none has ended."""
    engine = situation.engine
    waited_s = 0.0 if engine is None else engine.oldest_wait_ms / 1e3
    if not situation.waiting or waited_s <= situation.goals.ttft_s:
        return None
    found = f"the oldest request in the queue has waited {time_text(waited_s)}"
    evidence = {"quire_waiting_requests": f"{situation.waiting:.0f} at both readings"}
    return _queueing(situation, found, evidence)


def _queueing(situation: Situation, begin: str, evidence: dict[str, str]) -> Finding:
    """Return the finding of a long queue, with what the requests in it wait for."""
    window, engine = situation.window, situation.engine
    evidence["quire_waiting_requests"] = (
        f"{window.first.value('quire_waiting_requests'):.0f}, then "
        f"{window.last.value('quire_waiting_requests'):.0f}"
    )
    levers: tuple[Lever, ...]
    if situation.slots_are_full and engine is not None:
        cause = f"for one of the {engine.slots} slots"
        running = window.most("quire_running_requests")
        evidence["quire_running_requests"] = f"{running:.0f} of {engine.slots} slots"
        levers = chosen(*(more_slots(situation, by) for by in (2, 4)), replica(situation))
        action = "let more requests run at once, or add a server"
    elif situation.committed_share >= BLOCKS_SHORT or situation.preemptions:
        cause = "for KV blocks"
        evidence["quire_kv_blocks_used"] = _blocks(situation)
        levers = chosen(more_blocks(situation), int8_blocks(situation), replica(situation))
        action = "give the KV cache more memory, or add a server"
    elif situation.busy_share >= DEVICE_BUSY:
        cause = "for room in steps; the device is busy"
        evidence["quire_device_busy_seconds_total"] = f"{100 * situation.busy_share:.0f} %"
        levers = chosen(larger_steps(situation), replica(situation))
        action = "this is more load than the device computes: add a server"
    elif situation.large_batch_share >= LARGE_BATCH_SHARE and engine is not None:
        cause = f"in bursts, for one of the {engine.slots} slots"
        evidence["quire_batch_rows"] = (
            f"large batches in {100 * situation.large_batch_share:.0f} % of steps"
        )
        levers = chosen(*(more_slots(situation, by) for by in (2, 4)), replica(situation))
        action = "let more requests run at once, or spread arrivals"
    else:
        cause = "although slots, KV blocks and the device are free: admission holds them back"
        evidence["quire_device_busy_seconds_total"] = f"{100 * situation.busy_share:.0f} %"
        levers = ()
        action = (
            "look at --max-long-prompts, --max-short-prompts, limits in the --tenants file, and "
            "at GET /admin for a pause"
        )
        if engine is None:
            action += "; /v1/engine was not readable, so full slots cannot be excluded"
    return Finding(
        check="TTFT",
        verdict=Verdict.PROBLEM,
        found=f"{begin} {cause}",
        action=action,
        evidence=evidence,
        levers=levers,
        metric="ttft_p95_ms",
    )


def check_tpot(situation: Situation) -> Finding:
    """Compare the 95th percentile of TPOT with the goal, and find the cause."""
    tpot, goal_s = situation.tpot, situation.goals.tpot_s
    if tpot.num < MIN_FINISHED:
        return ok("TPOT", _TOO_FEW)
    p95_s = tpot.quantile(0.95)
    evidence = {TPOT: times_text(tpot)}
    if p95_s <= goal_s:
        return ok("TPOT", f"p95 {time_text(p95_s)}, goal {time_text(goal_s)}", **evidence)
    evidence["quire_batch_rows"] = f"{situation.rows.mean:.3g} requests a step"
    evidence["quire_device_busy_seconds_total"] = (
        f"{time_text(situation.step_ms / 1e3)} a step, {100 * situation.busy_share:.0f} % busy"
    )
    cause, action, levers = _slow_tokens(situation, evidence)
    return Finding(
        check="TPOT",
        verdict=Verdict.PROBLEM,
        found=f"p95 {time_text(p95_s)}, goal {time_text(goal_s)}: {cause}",
        action=action,
        evidence=evidence,
        levers=(*levers, replica(situation)),
        metric="tpot_p95_ms",
    )


def _slow_tokens(
    situation: Situation, evidence: dict[str, str]
) -> tuple[str, str, tuple[Lever, ...]]:
    """Return the cause of slow tokens, what to do, and levers."""
    if situation.preemption_share > PREEMPTION_SHARE:
        evidence["quire_preemptions_total"] = _preemptions(situation)
        levers = chosen(more_blocks(situation), int8_blocks(situation), fewer_slots(situation))
        return "preempted requests wait in the middle", "relieve the KV cache", levers
    if situation.prefill_share >= PREFILL_SHARE:
        share = f"{100 * situation.prefill_share:.0f} % of tokens in steps are of prompts"
        evidence["quire_batch_tokens"] = share
        levers = chosen(*_calmer_prefill(situation))
        return "prefill of other prompts makes steps long", "bound prefill in steps", levers
    if situation.pending and situation.busy_share < DEVICE_BUSY:
        levers = chosen(overlap(situation))
        return "the host is slow between steps", "leave the engine a core of its own", levers
    if situation.rows.mean >= LARGE_BATCH_ROWS:
        levers = chosen(fewer_slots(situation), quantize(situation))
        return "a step computes many requests", "compute fewer requests in a step", levers
    levers = chosen(quantize(situation))
    return "each step takes that long, however few requests", "read fewer bytes a step", levers


def _calmer_prefill(situation: Situation) -> tuple[Lever | None, ...]:
    return (tpot_target(situation), smaller_steps(situation), one_long_prompt(situation))


def check_tails(situation: Situation) -> Finding:
    """Find a 99th percentile that misses a goal which the 95th meets."""
    for name, times, goal_s, metric in (
        ("TPOT", situation.tpot, situation.goals.tpot_s, "tpot_p99_ms"),
        ("TTFT", situation.ttft, situation.goals.ttft_s, "ttft_p99_ms"),
    ):
        if times.num < MIN_FINISHED or times.quantile(0.95) > goal_s:
            continue
        p50_s, p99_s = times.quantile(0.5), times.quantile(0.99)
        if p99_s <= goal_s or p99_s < TAIL_RATIO * p50_s:
            continue
        evidence = {TPOT if name == "TPOT" else TTFT: times_text(times)}
        cause, levers = _tail_cause(situation, name, evidence)
        return Finding(
            check="tail",
            verdict=Verdict.WARNING,
            found=f"{name} p99 {time_text(p99_s)} is {p99_s / p50_s:.0f} times the median: {cause}",
            action="calm what disturbs the slowest requests",
            evidence=evidence,
            levers=(*levers, replica(situation)),
            metric=metric,
        )
    if situation.ttft.num < MIN_FINISHED:
        return ok("tail", _TOO_FEW)
    return ok("tail", "no 99th percentile far beyond its goal and median")


def _tail_cause(
    situation: Situation, name: str, evidence: dict[str, str]
) -> tuple[str, tuple[Lever, ...]]:
    if situation.preemptions:
        evidence["quire_preemptions_total"] = _preemptions(situation)
        return "preemption", chosen(more_blocks(situation), fewer_slots(situation))
    if name == "TTFT":
        evidence["quire_queue_seconds"] = times_text(situation.queued)
        return "bursts of arrivals", chosen(more_slots(situation, 2), larger_steps(situation))
    evidence["quire_batch_tokens"] = (
        f"{100 * situation.prefill_share:.0f} % of tokens in steps are of prompts"
    )
    return "prefill of long prompts", chosen(*_calmer_prefill(situation))


def _blocks(situation: Situation) -> str:
    total = situation.window.last.value("quire_kv_blocks")
    used = situation.window.most("quire_kv_blocks_used")
    return f"{used:.0f} of {total:.0f}, {100 * situation.committed_share:.0f} % with reservations"


def _preemptions(situation: Situation) -> str:
    return f"{situation.preemptions:.0f} for {situation.finished:.0f} choices that ended"
