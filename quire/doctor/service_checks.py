"""Checks of a server's service: health, traffic, errors, refusals, and parts that failed.

Pure functions of a Situation. docs/doctor.md has the thresholds and the reasons for them.
"""

from __future__ import annotations

from quire.doctor.finding import Finding, ok, problem, warning
from quire.doctor.situation import MIN_FINISHED, MIN_STEPS, Situation

# Shares of requests that may end in an error, or in a disconnect of the client.
ERROR_SHARE, DISCONNECT_SHARE = 0.01, 0.1
# Errors of the server itself, not of a request.
_SERVER_ERRORS = ("WorkerError", "StepRowError", "DeviceLost", "QuireError")
_REFUSALS = {
    "overloaded": "raise --max-queued-requests or --max-queued-tokens, or add a server",
    "queue_timeout": "raise --queue-timeout, or add a server",
    "deadline_missed": "relax the clients' ttft_slo_ms and deadline_ms, or add a server",
    "tenant_limit": "raise the limits of the tenant in the --tenants file",
    "context_length_exceeded": "raise --max-model-len, or shorten the clients' prompts",
    "shutting_down": "the server drains or stops; send requests to another one",
}


def check_health(situation: Situation) -> Finding:
    """Check what /health says."""
    health = situation.health
    state = str(health.get("state", "unknown"))
    if health.get("ok"):
        return ok("health", state)
    reason = str(health.get("reason") or "no reason given")
    action = {
        "starting": "wait until the model is loaded",
        "paused": "POST /admin/resume ends the pause",
        "draining": "POST /admin/resume takes requests again",
        "restarting": "wait until the engine is loaded again; its log says why it died",
    }.get(state, "restart the server; its log says why")
    return problem("health", f"{state}: {reason}", action, **{"/health": state})


def check_traffic(situation: Situation) -> Finding:
    """Say how much traffic there was, and whether it is enough for the other checks."""
    window = situation.window
    rate, finished = situation.arrivals / window.seconds, situation.finished
    if finished < MIN_FINISHED:
        pending = situation.pending
        state = f"{pending:.0f} requests were pending at both readings" if pending else "idle"
        return ok(
            "traffic",
            f"too little to judge: {finished:.0f} choices ended and {situation.steps:.0f} steps ran"
            f" in {window.seconds:.3g} s ({state}); at least {MIN_FINISHED} choices and {MIN_STEPS}"
            " steps are needed. Read again under load, or with a larger --seconds",
        )
    return ok(
        "traffic",
        f"{rate:.3g} requests/s of {situation.prompt_tokens:.0f} + {situation.output_tokens:.0f} "
        f"tokens; {finished:.0f} choices ended in {window.seconds:.3g} s",
    )


def check_errors(situation: Situation) -> Finding:
    """Check errors, timeouts, slow readers and disconnects."""
    window = situation.window
    kinds = window.by_label("quire_errors_total", "kind")
    rows, disconnects = (
        window.count("quire_row_errors_total"),
        window.count("quire_disconnects_total"),
    )
    ended = situation.finished + sum(kinds.values())
    evidence = {f"quire_errors_total {kind}": f"{count:.0f}" for kind, count in kinds.items()}
    own = sum(kinds.get(kind, 0.0) for kind in _SERVER_ERRORS) + rows
    if own:
        action = "the server's log has the cause of each"
        return problem("errors", f"{own:.0f} requests failed in the server", action, **evidence)
    errors = sum(kinds.values())
    if errors > ERROR_SHARE * ended:
        action = "the kinds say what clients do wrong; the log has the messages"
        found = f"{errors:.0f} of {ended:.0f} requests ended in an error"
        return warning("errors", found, action, **evidence)
    if disconnects > max(DISCONNECT_SHARE * ended, 1.0):
        evidence["quire_disconnects_total"] = f"{disconnects:.0f}"
        action = "clients or a proxy give up early: compare their time limits with TTFT"
        return warning(
            "errors", f"{disconnects:.0f} clients disconnected early", action, **evidence
        )
    return ok("errors", f"{errors:.0f} of {ended:.0f} requests", **evidence)


def check_refusals(situation: Situation) -> Finding:
    """Check requests that were refused before anything was computed."""
    reasons = situation.window.by_label("quire_refused_requests_total", "reason")
    if not reasons:
        return ok("refusals", "none")
    counts = ", ".join(f"{count:.0f} {reason}" for reason, count in reasons.items())
    main = max(reasons, key=lambda reason: reasons[reason])
    evidence = {
        f"quire_refused_requests_total {reason}": f"{count:.0f}"
        for reason, count in reasons.items()
    }
    action = _REFUSALS.get(main, "the log has the messages")
    return warning("refusals", f"refused: {counts}", action, **evidence)


def check_parts(situation: Situation) -> Finding:
    """Check counters since the start that should be 0: KV tier, log, API processes."""
    last = situation.window.last
    if failures := last.value("quire_tier_failures_total"):
        action = "check the disk of --kv-tier-path; a restart uses the tier again"
        return problem(
            "parts",
            "the KV tier is out of use",
            action,
            quire_tier_failures_total=f"{failures:.0f}",
        )
    for name, found, action in (
        (
            "quire_tier_bad_blocks_total",
            "KV blocks came back corrupt from the tier (they were computed again)",
            "check the disk of --kv-tier-path",
        ),
        (
            "quire_api_process_restarts_total",
            "API processes ended and were replaced",
            "the log has the reason of each; memory limits are the usual one",
        ),
        (
            "quire_log_lines_dropped_total",
            "log lines were dropped",
            "read the log faster, or raise --log-level",
        ),
    ):
        if count := last.value(name):
            return warning("parts", f"{count:.0f} {found}", action, **{name: f"{count:.0f}"})
    return ok("parts", "KV tier, log and API processes without failures")
