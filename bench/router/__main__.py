"""python -m bench.router: the router's own cost, and what hedging gains and costs.

    python -m bench.router --part cost       processor time per token and per request
    python -m bench.router --part hedging    first tokens with one slow replica of four
    python -m bench.router --part decision   a choice among 100 replicas of 1,000,000 known blocks
    python -m bench.router --part prefixes   hit rates and first tokens of shared prefixes by policy
    python -m bench.router --part cascade    tokens saved at an equal score, with two real models

Replicas are scripted processes that compute nothing, so that the router is what is measured.
Streams are checked: a number of a wrong answer is not written. Dynamo's selection is compared where
`ai-dynamo-runtime` is installed. Writes bench/results/router.json, and keeps
the parts there that it does not measure, if they are of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare import quire_state
from bench.frontend.servers import REPOSITORY, Child, cpu_s_of
from bench.router.cascade import cascade
from bench.router.clients import first_token_s
from bench.router.decision import decision
from bench.router.prefixes import prefixes
from bench.router.processes import Router
from quire.bench.machine import machine_card

PARTS = ("cost", "hedging", "decision", "prefixes", "cascade")
REPLICA = "bench.router.scripted_replica"


async def load(port: int, *, streams: int, rounds: int, num_tokens: int) -> list[float]:
    """Return the times to the first token of `streams` clients with `rounds` requests each."""

    async def client() -> list[float]:
        return [await first_token_s(port, num_tokens) for _ in range(rounds)]

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


def cost(rounds: int) -> dict[str, Any]:
    """Return microseconds of processor time per token and per request."""
    with ExitStack() as stack:
        fleet = Fleet(stack, [("--first-ms", "0", "--token-ms", "1")] * 2, "")
        pid, port = fleet.router.pid, fleet.router.port
        asyncio.run(load(port, streams=8, rounds=2, num_tokens=20))  # warm
        samples = []
        for num_tokens in (1, 257):
            start_s = cpu_s_of(pid)
            asyncio.run(load(port, streams=8, rounds=rounds, num_tokens=num_tokens))
            samples.append((cpu_s_of(pid) - start_s) / (8 * rounds) * 1e6)
        return {
            "streams": 8 * rounds,
            "us_per_request": samples[0],
            "us_per_token": (samples[1] - samples[0]) / 256,
        }


def hedging(rounds: int) -> dict[str, Any]:
    """Return first tokens with and without hedging, and its extra work."""
    usual = ("--first-ms", "20", "--token-ms", "1")
    slow = (*usual, "--slow-ms", "400", "--slow-share", "0.04")
    result: dict[str, Any] = {"replicas": 4, "slow_replicas": 1, "slow_share": 0.04}
    for name, file in (("off", ""), ("on", "[hedging]\n")):
        with ExitStack() as stack:
            fleet = Fleet(stack, [usual, usual, usual, slow], f'policy = "round-robin"\n{file}')
            port = fleet.router.port
            asyncio.run(load(port, streams=4, rounds=60, num_tokens=4))  # history
            times = sorted(asyncio.run(load(port, streams=4, rounds=rounds, num_tokens=16)))
            result[name] = {
                "requests": len(times),
                "p50_ms": median(times) * 1000,
                "p99_ms": times[int(0.99 * (len(times) - 1))] * 1000,
                "max_ms": times[-1] * 1000,
            }
            if file:
                hedged = fleet.metric("quire_router_hedged_tokens_total")
                base = fleet.metric("quire_router_hedge_base_tokens_total")
                result[name] |= {"extra_prompt_share": hedged / base}
    return result


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
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench/results/router.json")
    arguments = parser.parse_args()
    machine = machine_card()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if known.get("machine", {}).get("cpu") != machine["cpu"]:
        known = {}  # parts of a file are of one machine
    result: dict[str, Any] = {"bench": "router", "machine": machine, "quire": quire_state()}
    result |= {part: known[part] for part in PARTS if part in known}
    measures = {
        "cost": cost,
        "hedging": hedging,
        "decision": decision,
        "prefixes": prefixes,
        "cascade": cascade,
    }
    for part in arguments.part or PARTS:
        result[part] = measures[part](arguments.rounds)
        print(part, json.dumps(result[part]))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
