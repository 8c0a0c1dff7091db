"""Checks of a server's capacity: throughput, KV memory, prefix cache, and cost.

Pure functions of a Situation. docs/doctor.md has the thresholds and the reasons for them.
"""

from __future__ import annotations

from quire.doctor.finding import Finding, Lever, Verdict, ok
from quire.doctor.latency_checks import BLOCKS_SHORT, DEVICE_BUSY, PREEMPTION_SHARE
from quire.doctor.levers import (
    chosen,
    fewer_slots,
    int8_blocks,
    more_blocks,
    more_slots,
    overlap,
    replica,
)
from quire.doctor.situation import MIN_FINISHED, MIN_STEPS, Situation

# KV blocks of live requests from which on the next request preempts or waits.
BLOCKS_FULL = 0.9
# Preemptions per request at which much is computed twice.
MANY_PREEMPTIONS = 0.5
# Hit rate below which evictions are worth a look, and the fewest looked up tokens to say so.
HIT_SHARE, MIN_QUERIED_TOKENS = 0.3, 1000
# Share of blocks in use or cached from which on old prefixes are evicted.
POOL_FULL = 0.95
# Requests that wait behind a batch of less than this share of the slots.
SMALL_BATCH = 0.5
# Busy share below which the device mostly waits.
DEVICE_IDLE = 0.5


def check_throughput(situation: Situation) -> Finding:
    """Find out why a server with waiting requests computes less than it could."""
    rate = situation.window.count("quire_generated_tokens_total") / situation.window.seconds
    found = f"{rate:,.0f} tokens/s"
    if situation.steps < MIN_STEPS or not situation.pending:
        return ok("throughput", f"{found}; no request was pending at both readings")
    evidence = {
        "quire_batch_rows": f"{situation.rows.mean:.3g} requests a step",
        "quire_device_busy_seconds_total": f"{100 * situation.busy_share:.0f} % of the time",
    }
    if situation.busy_share < DEVICE_BUSY:
        return Finding(
            check="throughput",
            verdict=Verdict.WARNING,
            found=f"{found}; the device waits for the host, although requests are pending",
            action="leave the engine a core of its own: stop other load, or lower --threads",
            evidence=evidence,
            levers=chosen(overlap(situation)),
            metric="output_tokens_per_s",
        )
    engine = situation.engine
    if engine is None or not situation.waiting:
        return ok("throughput", found, **evidence)
    if situation.rows.mean < SMALL_BATCH * engine.slots:
        evidence["quire_waiting_requests"] = f"{situation.waiting:.0f} at both readings"
        is_short = situation.committed_share >= BLOCKS_SHORT
        levers = (more_blocks(situation), int8_blocks(situation)) if is_short else ()
        cause = (
            "KV blocks" if is_short else "admission (--max-long-prompts, tenants, --step-budget)"
        )
        return Finding(
            check="throughput",
            verdict=Verdict.WARNING,
            found=f"{found}; small batches while requests wait, limited by {cause}",
            action="let more requests into a step",
            evidence=evidence,
            levers=chosen(*levers),
            metric="output_tokens_per_s",
        )
    if situation.slots_are_full:
        return Finding(
            check="throughput",
            verdict=Verdict.WARNING,
            found=f"{found}; all {engine.slots} slots are taken and requests wait",
            action="let more requests into a step",
            evidence=evidence,
            levers=chosen(*(more_slots(situation, by) for by in (2, 4))),
            metric="output_tokens_per_s",
        )
    return ok("throughput", found, **evidence)


def check_memory(situation: Situation) -> Finding:
    """Find a KV cache that is too small for its requests."""
    used, share = situation.used_share, situation.preemption_share
    preemptions = situation.preemptions
    found = f"{100 * used:.0f} % of KV blocks used, {preemptions:.0f} preemptions"
    total = situation.window.last.value("quire_kv_blocks")
    evidence = {
        "quire_kv_blocks_used": (
            f"{situation.window.most('quire_kv_blocks_used'):.0f} of {total:.0f} blocks"
        ),
        "quire_preemptions_total": f"{preemptions:.0f} for {situation.finished:.0f} choices",
    }
    preempts = preemptions > 0 and share > PREEMPTION_SHARE
    if used < BLOCKS_FULL and not preempts:
        return ok("KV memory", found, **evidence)
    if preempts:
        by_reason = situation.window.by_label("quire_preemptions_by_reason_total", "reason")
        reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in by_reason.items())
        evidence["quire_preemptions_by_reason_total"] = reasons or "-"
    many = preemptions > 0 and share > MANY_PREEMPTIONS
    levers: tuple[Lever | None, ...] = (more_blocks(situation), int8_blocks(situation))
    if preempts:
        levers = (*levers, fewer_slots(situation))
    return Finding(
        check="KV memory",
        verdict=Verdict.PROBLEM if many else Verdict.WARNING,
        found=found + ("; preempted requests are computed again" if preempts else ""),
        action="give the KV cache more memory, or let fewer requests run",
        evidence=evidence,
        levers=(*chosen(*levers), replica(situation)),
        metric="preemptions_per_100" if preempts else "ttft_p95_ms",
    )


def check_prefixes(situation: Situation) -> Finding:
    """Find a prefix cache that loses prefixes before they are used again."""
    queried, share = situation.queried_tokens, situation.hit_share
    if queried < MIN_QUERIED_TOKENS:
        return ok("prefix cache", f"fewer than {MIN_QUERIED_TOKENS} prompt tokens were looked up")
    found = f"{100 * share:.0f} % of prompt tokens were cached"
    evidence = {
        "quire_prefix_queried_tokens_total": f"{queried:.0f}",
        "quire_prefix_hit_tokens_total": f"{share * queried:.0f}",
    }
    last = situation.window.last
    names = ("quire_kv_blocks_used", "quire_kv_blocks_cached")
    blocks = last.value("quire_kv_blocks")
    filled = sum(map(last.value, names)) / blocks if blocks else 0.0
    if share >= HIT_SHARE or filled < POOL_FULL:
        if share < HIT_SHARE:
            found += "; none was evicted, so prompts do not begin alike"
        return ok("prefix cache", found, **evidence)
    evidence["quire_kv_blocks_cached"] = f"{100 * filled:.0f} % of blocks used or cached"
    return Finding(
        check="prefix cache",
        verdict=Verdict.WARNING,
        found=f"{found}, and the pool is full: old prefixes are evicted",
        action=(
            "if prompts begin alike: --kv-tier-path DIR keeps evicted blocks on disk, "
            f"{more_blocks(situation).text} in memory"
        ),
        evidence=evidence,
        note="how often evicted prefixes would have been used again is not known: not simulated",
    )


def check_cost(situation: Situation) -> Finding:
    """Find a device that is mostly idle under its traffic; each token then costs more."""
    share = situation.busy_share
    found = f"the device is busy {100 * share:.0f} % of the time"
    if situation.finished < MIN_FINISHED or situation.steps < MIN_STEPS:
        return ok("cost", f"{found}; too little traffic to judge")
    evidence = {"quire_device_busy_seconds_total": f"{100 * share:.0f} % of the time"}
    if situation.misses_goals:
        return ok("cost", f"{found}; goals are missed already", **evidence)
    if share >= DEVICE_IDLE or situation.pending:
        return ok("cost", found, **evidence)
    return Finding(
        check="cost",
        verdict=Verdict.WARNING,
        found=f"{found}: most of it is paid for and idle",
        action="send this server more of the load, or take a smaller device",
        evidence=evidence,
        metric="capacity",
    )
