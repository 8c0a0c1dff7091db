"""A trace of many shared prefixes over simulated replicas, routed by each policy.

Sessions of several turns begin with one of some system prompts; each turn has the turns before it
as its beginning. Replicas have less cache than all prompts need, so that spreading a prefix costs
room. The oracle is one unbounded cache for all replicas: what it would find is the most that any
choice could. Every policy gets the same sessions at the same times, with empty caches.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.frontend.servers import Child
from bench.router.clients import first_token_s
from bench.router.processes import Router
from bench.router.simulated_replica import BLOCK_SIZE, PrefixCache
from quire.router.block_hashes import block_hashes

NUM_REPLICAS = 4
NUM_SYSTEMS, SYSTEM_TOKENS = 32, (1000, 4000)
TURNS, TURN_TOKENS, OUTPUT_TOKENS = 4, (64, 400), 8
# Blocks of a replica: a third of what all system prompts have.
CACHE_BLOCKS = NUM_SYSTEMS * sum(SYSTEM_TOKENS) // 2 // BLOCK_SIZE // 3 + 3000
TOKENS_PER_S = 40_000.0
ARRIVALS_PER_S = 8.0
THINK_S = 0.2
KV_EVENTS = "[kv-events]\ntokenize-ms = 100\nmin-prompt-tokens = 0\n"

Send = Callable[[list[int]], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Session:
    """begin_s: when its first turn comes. turns: what each adds to the prompt."""

    begin_s: float
    turns: list[list[int]]

    def prompts(self) -> list[list[int]]:
        """Return the prompt of each turn, with the answers to those before it."""
        found, prompt = list[list[int]](), list[int]()
        for turn in self.turns:
            prompt = prompt + turn
            found.append(prompt)
            prompt = prompt + list(range(OUTPUT_TOKENS))
        return found


def sessions(
    count: int,
    seed: int,
    *,
    arrivals_per_s: float = ARRIVALS_PER_S,
    hot_share: float = 0.0,
) -> list[Session]:
    """Draw sessions. hot_share: of them, on the first system prompt beside its usual share."""
    drawn = random.Random(seed)

    def text(bounds: tuple[int, int]) -> list[int]:
        return [drawn.randrange(1000, 100_000) for _ in range(drawn.randint(*bounds))]

    systems = [text(SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
    found, now_s = [], 0.0
    for _ in range(count):
        now_s += drawn.expovariate(arrivals_per_s)
        turns = [text(TURN_TOKENS) for _ in range(TURNS)]
        is_hot = hot_share > 0 and drawn.random() < hot_share
        turns[0] = (systems[0] if is_hot else drawn.choice(systems)) + turns[0]
        found.append(Session(now_s, turns))
    return found


def oracle_share(trace: list[Session]) -> float:
    """Return the share of prompt tokens that one unbounded cache would find."""
    cache, num_tokens, num_found = PrefixCache(2**40), 0, 0
    for session in trace:
        for prompt in session.prompts():
            found, _ = cache.use(block_hashes(array("i", prompt), BLOCK_SIZE))
            num_tokens += len(prompt)
            num_found += min(found * BLOCK_SIZE, len(prompt) - 1)
    return num_found / num_tokens


async def drive(trace: list[Session], send: Send) -> list[float]:
    """Return the times to the first token of all turns."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def run(session: Session) -> list[float]:
        await asyncio.sleep(max(session.begin_s - (loop.time() - start_s), 0.0))
        times = []
        for prompt in session.prompts():
            times.append(await send(prompt))
            await asyncio.sleep(THINK_S)
        return times

    return [one for times in await asyncio.gather(*map(run, trace)) for one in times]


def prefixes(rounds: int) -> dict[str, Any]:
    """Return hit rates and first tokens by policy. rounds: sessions."""
    trace = sessions(rounds, seed=3)
    oracle = oracle_share(trace)
    result: dict[str, Any] = {
        "replicas": NUM_REPLICAS,
        "requests": sum(len(one.turns) for one in trace),
        "cache_blocks_per_replica": CACHE_BLOCKS,
        "oracle_hit_share": oracle,
    }
    ways = {
        "warm-cache, KV events": 'policy = "warm-cache"\n',
        "warm-cache, history": 'policy = "warm-cache"\n',
        "round-robin": 'policy = "round-robin"\n',
        "power-of-two": 'policy = "power-of-two"\n',
    }
    for name, file in ways.items():
        with ExitStack() as stack:
            replicas = _Replicas(stack)
            text = file + (replicas.kv_events if "events" in name else "")
            folder = stack.enter_context(TemporaryDirectory())
            path = Path(folder) / "route.toml"
            path.write_text(text)
            words = ("--config", str(path), *replicas.urls, "--port", "0")
            router = stack.enter_context(Router(*words))
            port = router.port
            times = asyncio.run(
                drive(trace, lambda prompt, to=port: first_token_s(to, OUTPUT_TOKENS, prompt))  # type: ignore[misc]
            )
            result[name] = _row(times, replicas, oracle)
            print(name, json.dumps(result[name]), flush=True)
    if find_spec("dynamo") is None:
        result["dynamo"] = "not installed (pip install ai-dynamo-runtime)"
    else:
        with ExitStack() as stack:
            replicas = _Replicas(stack)
            result["dynamo"] = _row(asyncio.run(_dynamo(trace, replicas)), replicas, oracle)
            print("dynamo", json.dumps(result["dynamo"]), flush=True)
    return result


def with_times_of(before: dict[str, Any], found: dict[str, Any], run: str) -> dict[str, Any]:
    """Return results with the times of an earlier run of the same trace, or none. run: of that, by
    its commit."""
    kept = {"times_of_run": before.get("times_of_run", run)}
    for name, row in found.items():
        if isinstance(row, dict):
            old = before.get(name)
            old = old if isinstance(old, dict) else {}
            hits = {key: value for key, value in row.items() if not key.startswith("ttft")}
            row = {**{key: old[key] for key in row if key in old}, **hits}
        kept[name] = row
    return kept


class _Replicas:
    """Simulated replicas with KV events at free ports."""

    def __init__(self, stack: ExitStack) -> None:
        self.event_ports = [_free_pair() for _ in range(NUM_REPLICAS)]
        self.ports = [
            stack.enter_context(
                Child(
                    "bench.router.simulated_replica",
                    *("--tokens-per-s", str(TOKENS_PER_S), "--cache-blocks", str(CACHE_BLOCKS)),
                    *("--events", str(events)),
                )
            ).port
            for events in self.event_ports
        ]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def kv_events(self) -> str:
        """The table of the router's file."""
        lines = [KV_EVENTS]
        for url, events in zip(self.urls, self.event_ports, strict=True):
            lines.append(f'[kv-events.replicas."{url}"]')
            lines.append(f'endpoint = "tcp://127.0.0.1:{events}"')
            lines.append(f'replay-endpoint = "tcp://127.0.0.1:{events + 1}"')
        return "\n".join(lines) + "\n"

    def hit_share(self) -> float:
        """Return the share of prompt tokens that were cached."""
        stats = [asyncio.run(_stats(port)) for port in self.ports]
        return sum(one["cached_tokens"] for one in stats) / sum(
            one["prompt_tokens"] for one in stats
        )


def _row(times_s: list[float], replicas: _Replicas, oracle: float) -> dict[str, float]:
    ordered, share = sorted(times_s), replicas.hit_share()
    return {
        "hit_share": share,
        "of_oracle": share / oracle,
        "ttft_p50_ms": median(ordered) * 1000,
        "ttft_p95_ms": ordered[int(0.95 * (len(ordered) - 1))] * 1000,
        "ttft_mean_ms": sum(ordered) / len(ordered) * 1000,
    }


async def _dynamo(trace: list[Session], replicas: _Replicas) -> list[float]:
    """Let Dynamo's selection choose; requests go to the replicas without a router."""
    os.environ.setdefault("DYN_LOG", "error")
    from dynamo._core import SelectionService  # type: ignore[import-not-found]

    service = SelectionService()
    for number, (url, events) in enumerate(zip(replicas.urls, replicas.event_ports, strict=True)):
        worker = {
            "worker_id": number,
            "model_name": "scripted",
            "endpoint": url,
            "block_size": BLOCK_SIZE,
            "kv_events_endpoints": {0: f"tcp://127.0.0.1:{events}"},
            "replay_endpoint": f"tcp://127.0.0.1:{events + 1}",
            "total_kv_blocks": CACHE_BLOCKS,
            "max_num_batched_tokens": 8192,
        }
        await service.upsert_worker(worker)

    async def send(prompt: list[int]) -> float:
        start_s = time.monotonic()
        asked = {"model_name": "scripted", "token_ids": prompt}
        chosen = await service.select_and_reserve(asked)
        id_, port = chosen["selection_id"], replicas.ports[chosen["worker_id"]]
        chosen_s = time.monotonic() - start_s
        try:
            first = await first_token_s(
                port, OUTPUT_TOKENS, prompt, lambda: service.prefill_complete(id_)
            )
        finally:
            await service.free_reservation(id_)
        return chosen_s + first

    times = await drive(trace, send)
    service.shutdown()
    return times


async def _stats(port: int) -> dict[str, int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stats HTTP/1.1\r\nhost: a\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    found: dict[str, int] = json.loads(await reader.readexactly(length))
    writer.close()
    return found


def _free_pair() -> int:
    """Return a port that is free, as is the one after it, below those that the system gives out."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
