"""python -m bench.router: the router's own cost, and what hedging gains and costs.

    python -m bench.router --part cost       processor time per token, and per request, also alone:
                                             medians of several routers
    python -m bench.router --part hedging    first tokens with one slow replica of four
    python -m bench.router --part decision   a choice among 100 replicas of 1,000,000 known blocks
    python -m bench.router --part prefixes   hit rates and first tokens of shared prefixes by policy
    python -m bench.router --part backlog    how long to stay with a warm cache, in virtual time
    python -m bench.router --part cascade    tokens saved at an equal score, with two real models

Replicas are scripted processes that compute nothing, so that the router is what is measured.
Streams are checked: a number of a wrong answer is not written. `cost` and `hedging` each begin no
further stream after `--seconds`, so that they end on a slow machine too; the number of streams says
how much was measured. Dynamo's selection is compared where
`ai-dynamo-runtime` is installed. Writes bench/results/router.json, and keeps
the parts there that it does not measure, if they are of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.compare import quire_state
from bench.frontend.servers import REPOSITORY, Child, cpu_s_of
from bench.router.backlog import backlog
from bench.router.cascade import cascade
from bench.router.clients import first_token_s
from bench.router.decision import decision
from bench.router.prefixes import prefixes, with_times_of
from bench.router.processes import Router
from quire.bench.machine import machine_card

# Parts without times: they may be measured beside other work, and keep the machine's description.
TIMELESS = ("backlog", "cascade")
PARTS = ("cost", "hedging", "decision", "prefixes", "backlog", "cascade")
REPLICA = "bench.router.scripted_replica"
LONG_TOKENS = 256
COST_RUNS = 5
# Of the requests of the slow replica; 2.5 % of all.
SLOW_SHARE = 0.1


async def load(
    port: int, *, streams: int, rounds: int, num_tokens: int, seconds: float
) -> list[float]:
    """Return the times to the first token of `streams` clients with `rounds` requests each.

    After `seconds` none begins another one; each has at least one.
    """
    end_s = time.monotonic() + seconds

    async def client() -> list[float]:
        times = [await first_token_s(port, num_tokens)]
        while len(times) < rounds and time.monotonic() < end_s:
            times.append(await first_token_s(port, num_tokens))
        return times

    return [
        one for times in await asyncio.gather(*(client() for _ in range(streams))) for one in times
    ]


class Fleet:
    """A router before scripted replicas."""

    def __init__(self, stack: ExitStack, replicas: Sequence[tuple[str, ...]], file: str) -> None:
        ports = [stack.enter_context(Child(REPLICA, *words)).port for words in replicas]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder) / "route.toml"
        path.write_text(file)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.router = stack.enter_context(Router("--config", str(path), *urls, "--port", "0"))

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""

        async def read() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.router.port)
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            text = await reader.read()
            writer.close()
            return text

        found = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)\r?$", asyncio.run(read()).decode())
        return sum(map(float, found))


def cost(rounds: int, seconds: float) -> dict[str, Any]:
    """Return the medians of COST_RUNS routers, since one differs by a quarter from the next."""
    runs = [_cost(rounds, seconds) for _ in range(COST_RUNS)]
    medians = {name: median(one[name] for one in runs) for name in runs[0]}
    return medians | {"us_per_request_by_run": [one["us_per_request"] for one in runs]}


def _cost(rounds: int, seconds: float) -> dict[str, Any]:
    """Return microseconds of processor time per token and per request: requests are measured
    eight at a time, and one at a time: then the router sleeps before each of its steps."""
    with ExitStack() as stack:
        fleet = Fleet(stack, [("--first-ms", "0", "--token-ms", "1")] * 2, "")
        pid, port = fleet.router.pid, fleet.router.port
        asyncio.run(load(port, streams=8, rounds=2, num_tokens=20, seconds=seconds))  # warm

        def cpu_us(streams: int, num_tokens: int, rounds: int) -> tuple[float, int]:
            start_s = cpu_s_of(pid)
            times = asyncio.run(
                load(
                    port, streams=streams, rounds=rounds, num_tokens=num_tokens, seconds=seconds / 3
                )
            )
            return (cpu_s_of(pid) - start_s) * 1e6 / len(times), len(times)

        # Tokens come in their own time, so a long stream takes as long as many short ones.
        request_us, num_requests = cpu_us(8, 1, rounds)
        stream_us, num_streams = cpu_us(8, 1 + LONG_TOKENS, max(rounds // 10, 1))
        lone_us, num_lone = cpu_us(1, 1, 4 * rounds)
        return {
            "requests": num_requests,
            "streams": num_streams,
            "lone_requests": num_lone,
            "tokens_of_a_stream": 1 + LONG_TOKENS,
            "us_per_request": request_us,
            "us_per_lone_request": lone_us,
            "us_per_token": (stream_us - request_us) / LONG_TOKENS,
        }


def hedging(rounds: int, seconds: float) -> dict[str, Any]:
    """Return first tokens with and without hedging, what it saves, and its extra work."""
    usual = ("--first-ms", "20", "--token-ms", "1")
    slow = (*usual, "--slow-ms", "400", "--slow-share", str(SLOW_SHARE))
    result: dict[str, Any] = {"replicas": 4, "slow_replicas": 1, "slow_share": SLOW_SHARE}
    for name, file in (("off", ""), ("on", "[hedging]\n")):
        with ExitStack() as stack:
            fleet = Fleet(stack, [usual, usual, usual, slow], f'policy = "round-robin"\n{file}')
            port = fleet.router.port
            asyncio.run(load(port, streams=4, rounds=60, num_tokens=4, seconds=seconds))  # history
            times = asyncio.run(
                load(port, streams=4, rounds=rounds, num_tokens=16, seconds=seconds / 2)
            )
            result[name] = first_tokens(times)
            if file:
                hedged = fleet.metric("quire_router_hedged_tokens_total")
                base = fleet.metric("quire_router_hedge_base_tokens_total")
                result[name] |= {"extra_prompt_share": hedged / base}
    result["saved"] = {
        at: result["off"][at] - result["on"][at] for at in ("p95_ms", "p99_ms", "mean_ms")
    }
    return result


def first_tokens(times_s: Sequence[float]) -> dict[str, Any]:
    """Return percentiles of times in milliseconds."""
    ordered = sorted(times_s)

    def at_ms(share: float) -> float:
        return ordered[int(share * (len(ordered) - 1))] * 1000

    return {
        "requests": len(ordered),
        "mean_ms": fmean(ordered) * 1000,
        "p50_ms": at_ms(0.5),
        "p95_ms": at_ms(0.95),
        "p99_ms": at_ms(0.99),
        "max_ms": at_ms(1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument(
        "--rounds", type=int, default=250, help="requests of each client; sessions; tasks"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="cost, hedging: begin no stream after so long"
    )
    parser.add_argument(
        "--hits-only",
        action="store_true",
        help="prefixes: leave the times out, or as they were, on a machine with other work",
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench/results/router.json")
    arguments = parser.parse_args()
    machine = machine_card()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if known.get("machine", {}).get("cpu") != machine["cpu"]:
        known = {}  # parts of a file are of one machine
    parts = arguments.part or PARTS
    times = [one for one in parts if one not in TIMELESS]
    if arguments.hits_only:
        times = [one for one in times if one != "prefixes"]
    if known and not times:
        machine = known["machine"]
    result: dict[str, Any] = {"bench": "router", "machine": machine, "quire": quire_state()}
    result |= {part: known[part] for part in PARTS if part in known}
    seconds = arguments.seconds
    measures = {
        "cost": lambda rounds: cost(rounds, seconds),
        "hedging": lambda rounds: hedging(rounds, seconds),
        "decision": decision,
        "prefixes": prefixes,
        "backlog": backlog,
        "cascade": cascade,
    }
    for part in parts:
        found = measures[part](arguments.rounds)
        if part == "prefixes" and arguments.hits_only:
            found = with_times_of(known.get(part, {}), found, known.get("quire", ""))
        result[part] = found
        print(part, json.dumps(result[part]))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
