"""python -m bench.fleet: many streams through `quire route` while replicas die at random.

Replicas are servers of the built-in model on this machine. A schedule drawn from a seed kills them,
stops them, drains them and kills their engines; all are started again. Before, each request is sent
alone to one replica; every answer through the router must have the same bytes. How long streams
were interrupted, and in which phase, is shown by kind of fault; what happens until the next fault
counts as its own. `false_alarms` are replicas that the router gave up for their silence while no
fault was theirs, with the reasons in its log; `detections` are those with a fault, by that log, and
the late ones with what the router knew of all replicas then. The router's processor time per
request and per streamed token is taken without faults, before: of eight requests at a time as in
bench.router, of one at a time, and of an idle router, which is no request's. With `--beside smg`
the same replicas, requests and schedule follow behind that gateway, and its broken streams are
counted. Both come before replicas and clients at the processors, as one on a machine of its own
does: their nice value is -5 where that is allowed, and is in the result. On a machine with few
cores a thousand streams are silent for seconds without any fault. `floor_s` is what it can do at
all: as many new streams as a failed replica hands over begin at once at the others, which stream as
many as they have, without a router or a failure. A quiet run of fewer streams is `--streams 300
--minutes 5 --beside smg --max-minutes 16`. The time with faults is shortened, for both gateways
alike, where all would not fit into `--max-minutes`. Adds the run to bench/results/fleet.json, where
it replaces the one of as many streams, and exits with 1 if an answer through the router was wrong,
lost or repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.compare import quire_state
from bench.fleet.clients import CASES, Case, Clients, answers_alone, first_events_s
from bench.fleet.detections import detections
from bench.fleet.false_alarms import false_alarms
from bench.fleet.faults import KINDS, Faults
from bench.fleet.interruptions import LIMIT_S, interruptions, is_counter
from bench.fleet.processes import Front, Replicas, Router, Smg
from bench.frontend.servers import REPOSITORY
from quire.bench.machine import machine_card

# Without faults: requests of one token, and rounds of streams.
SHORT_REQUESTS = 400
SHORT_AT_ONCE = 8
QUIET_ROUNDS = 1
FLOOR_ROUNDS = 2
IDLE_S = 3.0
# After the last fault: its replica returns, and open answers end.
TAIL_S = 60.0
MIN_FAULTS_S = 20.0
# Routes that a gateway for several engines has.
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions")
_NAMES = [case.name for case in CASES]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=1000, help="open at once")
    parser.add_argument("--minutes", type=float, default=10.0, help="with faults")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7, help="of the schedule of faults")
    parser.add_argument("--pause-seconds", type=float, default=6.0, help="mean time between faults")
    parser.add_argument("--stall-seconds", type=float, default=2.0, help="of the router")
    parser.add_argument("--policy", default="least-tokens", help="of the router")
    parser.add_argument(
        "--limit-seconds", type=float, default=600.0, help="an answer that takes longer is lost"
    )
    parser.add_argument("--cases", help=f"as in seed,tools (default: {','.join(_NAMES)})")
    parser.add_argument(
        "--max-minutes", type=float, help="of the whole run; the time with faults is shortened"
    )
    parser.add_argument("--beside", choices=("smg",), help="another gateway, afterwards")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench/results/fleet.json")
    args, began_s = parser.parse_args(), time.monotonic()
    names = args.cases.split(",") if args.cases else _NAMES
    if unknown := set(names) - set(_NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(_NAMES)}")
    result = run(
        streams=args.streams,
        seconds=60 * args.minutes,
        num_replicas=args.replicas,
        seed=args.seed,
        pause_s=args.pause_seconds,
        stall_s=args.stall_seconds,
        policy=args.policy,
        limit_s=args.limit_seconds,
        cases=[case for case in CASES if case.name in names],
        beside=args.beside,
        until_s=None if args.max_minutes is None else began_s + 60 * args.max_minutes,
    )
    write(args.out, result)
    shown = (
        "done",
        "num_wrong",
        "wrong",
        "faults",
        "detections",
        "false_alarms",
        "interruptions",
        "floor_s",
        "slow_reads",
        "silences_s",
        "router",
        "beside",
    )
    print(json.dumps({name: result[name] for name in shown if name in result}, indent=1))
    sys.exit(1 if result["wrong"] else 0)


def write(path: Path, result: dict[str, Any]) -> None:
    """Add a run to the file; another gateway's counts of the run before stay until there are new
    ones."""
    known = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    runs = known.get("runs", {str(known["streams"]): known} if "streams" in known else {})
    before = runs.get(str(result["streams"]), {})
    beside = {**before.get("beside", {}), **result.get("beside", {})}
    runs[str(result["streams"])] = {**result, **({"beside": beside} if beside else {})}
    ordered = dict(sorted(runs.items(), key=lambda pair: int(pair[0])))
    cards = [run["machine"] for run in ordered.values()]
    busiest = max(cards, key=lambda card: card["load_at_start"] or 0.0)  # marks all rows
    found = {"bench": "fleet", "machine": busiest, "runs": ordered}
    path.write_text(json.dumps(found, indent=1) + "\n")


def run(
    *,
    streams: int,
    seconds: float,
    num_replicas: int,
    seed: int,
    pause_s: float,
    stall_s: float,
    policy: str = "least-tokens",
    limit_s: float = 600.0,
    max_faults: int | None = None,
    short_requests: int = SHORT_REQUESTS,
    cases: Sequence[Case] = CASES,
    beside: str | None = None,
    until_s: float | None = None,
) -> dict[str, Any]:
    """Run all parts and return the result. max_faults: end after so many, whatever the time.
    until_s: when all is to be over, by time.monotonic()."""
    other: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Replicas(num_replicas, Path(folder), max_streams=streams) as replicas,
    ):
        cases = answers_alone(replicas.ports[0], cases)
        floor_s = _floor_s(replicas, cases, streams, limit_s)
        flags = ("--policy", policy, "--stall-seconds", str(stall_s), "--probe-seconds", "0.25")
        with Router(replicas.file, "--max-open-requests", str(2 * streams + 64), *flags) as router:
            cost, quiet = _cost(router, cases, streams, short_requests, limit_s)
            if until_s is not None:
                seconds = _seconds(seconds, until_s - time.monotonic(), 1 + (beside is not None))
                limit_s = min(limit_s, max(seconds, TAIL_S))
            clients = Clients(router.port, cases, limit_s=limit_s)
            faults = Faults(
                replicas, router, seed=seed, pause_s=pause_s, counters=lambda: _counters(router)
            )
            asyncio.run(_under_faults(clients, faults, streams, seconds, max_faults))
            metrics, log = router.metrics(), router.log()
        if beside == "smg":
            schedule = (seed, pause_s, seconds, max_faults)
            try:
                with Smg(replicas.all) as smg:
                    other = {beside: _beside(smg, replicas, cases, streams, limit_s, schedule)}
            except SystemExit as error:  # the router's own result counts without it
                other = {beside: {"failed": str(error)}}
    all_ = interruptions(metrics)
    floor = {"streams": len(floor_s), **_spread(floor_s), **_share_of_floor(all_, floor_s)}
    return {
        "bench": "fleet",
        "machine": machine_card(),
        "quire": quire_state(),
        "replicas": num_replicas,
        "streams": streams,
        "seconds": seconds,
        "policy": policy,
        "stall_s": stall_s,
        "done": {
            "answers": clients.num_done,
            "refused": clients.num_refused,
            "by_case": dict(clients.done),
        },
        "num_wrong": clients.num_wrong,
        "wrong": clients.wrong,
        "faults": faults.summary(),
        "detections": detections(log, faults.injected),
        "false_alarms": false_alarms(log, faults.injected),
        "interruptions": {
            "all": all_,
            **{kind: interruptions(faults.counted[kind]) for kind in KINDS},
        },
        "floor_s": floor,
        "slow_reads": router.num_slow_reads,
        "silences_s": {
            "without_faults": _spread(quiet.silences_s),
            "with_faults": _spread(clients.silences_s),
        },
        "router": {"nice": router.nice, **cost, **_resumed(metrics)},
        **({"beside": other} if other else {}),
    }


def _floor_s(
    replicas: Replicas, cases: Sequence[Case], streams: int, limit_s: float
) -> list[float]:
    """Return how long streams take to begin that come at once, as many as a failed replica hands
    over, at the others with theirs, without a router or a failure."""
    num_new = max(streams // len(replicas.all), 1)
    ports = replicas.ports[1:] or replicas.ports
    num_open = max(streams - num_new, 1)
    return [
        first_s
        for _ in range(FLOOR_ROUNDS)
        for first_s in asyncio.run(
            first_events_s(ports, cases, num_open=num_open, num_new=num_new, limit_s=limit_s)
        )
    ]


def _share_of_floor(found: Mapping[str, Any], floor_s: Sequence[float]) -> dict[str, float | None]:
    """Return the share of new streams that begin within LIMIT_S, and the ratio to it of the share
    of interrupted streams that go on within LIMIT_S."""
    share = sum(one <= LIMIT_S for one in floor_s) / max(len(floor_s), 1)
    went_on = found["share_within_3_s"]
    ratio = None if went_on is None or not share else round(went_on / share, 4)
    return {"share_within_3_s": round(share, 4), "interrupted_share_ratio": ratio}


def _beside(
    front: Front,
    replicas: Replicas,
    cases: Sequence[Case],
    streams: int,
    limit_s: float,
    schedule: tuple[int, float, float, int | None],
) -> dict[str, Any]:
    """Return what another gateway does with the same requests and faults.

    Its answers are compared with its own without faults, since it may write them anew.
    """
    seed, pause_s, seconds, max_faults = schedule
    known = [case for case in cases if case.path in OPENAI_PATHS]
    known = answers_alone(front.port, known)
    steady = Clients(front.port, known, limit_s=limit_s)
    asyncio.run(steady.run(len(known), lambda done: done < 1))
    clients = Clients(front.port, known, limit_s=limit_s)
    faults = Faults(replicas, front, seed=seed, pause_s=pause_s)
    asyncio.run(_under_faults(clients, faults, streams, seconds, max_faults))
    return {
        "nice": front.nice,
        "answers": clients.num_done,
        "by_case": dict(clients.done),
        "refused": clients.num_refused,
        "broken": clients.num_wrong,
        "broken_without_faults": steady.num_wrong,
        "examples": clients.wrong[:5],
        "faults": faults.summary(),
        "silences_s": _spread(clients.silences_s),
    }


def _seconds(wanted_s: float, left_s: float, num_runs: int) -> float:
    """Return the time with faults of each run. Raises SystemExit where none is left."""
    found_s = min(wanted_s, left_s / num_runs - TAIL_S)
    if found_s < MIN_FAULTS_S:
        raise SystemExit(
            f"{left_s:.0f} s are left of --max-minutes for {num_runs} runs with faults, of "
            f"{MIN_FAULTS_S + TAIL_S:g} s each at least; allow more"
        )
    return found_s


def _spread(times_s: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum."""
    ordered = sorted(times_s) or [0.0]
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(part * (len(ordered) - 1))], 3) for name, part in at.items()}


async def _under_faults(
    clients: Clients, faults: Faults, streams: int, seconds: float, max_faults: int | None
) -> None:
    """Stream while faults happen; all replicas are back at the end."""
    injecting = asyncio.ensure_future(faults.run(seconds, max_faults))
    try:
        await clients.run(streams, lambda _: not injecting.done())
        await injecting
    finally:
        injecting.cancel()
        await asyncio.gather(injecting, return_exceptions=True)
        await faults.count()
        await faults.end()


def _cost(
    router: Router, cases: list[Case], streams: int, short_requests: int, limit_s: float
) -> tuple[dict[str, Any], Clients]:
    """Return the router's processor time per request and per streamed token, in microseconds, and
    the clients of the streams without faults."""
    warm = Clients(router.port, cases, limit_s=limit_s)
    asyncio.run(warm.run(min(streams, 32), lambda done: done < 1))
    before_s = router.cpu_s()
    time.sleep(IDLE_S)
    idle_share = (router.cpu_s() - before_s) / IDLE_S

    def short_s(count: int, at_once: int) -> float:
        """Return the processor time of a short request, without that of an idle router."""
        began_s, before_s = time.monotonic(), router.cpu_s()
        asyncio.run(short.short_requests(count, at_once))
        used_s = router.cpu_s() - before_s - idle_share * (time.monotonic() - began_s)
        return used_s / max(count, 1)

    short = Clients(router.port, cases, limit_s=limit_s)
    lone_s = short_s(short_requests // 4, 1)
    request_s = short_s(short_requests, SHORT_AT_ONCE)
    tokens, before_s = router.metrics()["quire_router_streamed_tokens_total"], router.cpu_s()
    quiet = Clients(router.port, cases, limit_s=limit_s)
    asyncio.run(quiet.run(streams, lambda done: done < QUIET_ROUNDS))
    quiet_s = router.cpu_s() - before_s
    tokens = router.metrics()["quire_router_streamed_tokens_total"] - tokens
    per_token_s = max(quiet_s - request_s * quiet.num_done, 0.0) / max(tokens, 1.0)
    result = {
        "cpu_us_per_request": round(1e6 * request_s, 1),
        "requests_at_once": SHORT_AT_ONCE,
        "cpu_us_per_lone_request": round(1e6 * lone_s, 1),
        "idle_cpu_share": round(idle_share, 4),
        "cpu_us_per_streamed_token": round(1e6 * per_token_s, 1),
        "streamed_tokens_without_faults": int(tokens),
        "wrong_without_faults": [*warm.wrong, *short.wrong, *quiet.wrong],
    }
    return result, quiet


def _counters(router: Router) -> dict[str, float]:
    """Return what the router counts of interrupted streams."""
    return {name: value for name, value in router.metrics().items() if is_counter(name)}


def _resumed(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return what the router counted."""
    prefix = "quire_router_resume_seconds_bucket"
    buckets = {
        name.split('"')[1]: int(value) for name, value in metrics.items() if name.startswith(prefix)
    }
    return {
        "resumed_streams": int(metrics.get("quire_router_resumed_streams_total", 0)),
        "broken_streams": int(_sum(metrics, "quire_router_broken_streams_total")),
        "retries": int(_sum(metrics, "quire_router_retries_total")),
        "resume_seconds_at_most": buckets,
        "resume_mean_s": round(
            metrics.get("quire_router_resume_seconds_sum", 0.0)
            / max(metrics.get("quire_router_resume_seconds_count", 0.0), 1.0),
            4,
        ),
    }


def _sum(metrics: Mapping[str, float], family: str) -> float:
    return sum(value for name, value in metrics.items() if name.partition("{")[0] == family)


if __name__ == "__main__":
    main()
