"""python -m bench.soak: many streams at once for minutes; clients disconnect, stall, send garbage.

A server of the built-in model with many concurrent clients (callers.py). Before, each good request
is sent alone; all answers of good clients must equal those. The time is divided into rounds; after
each the server is left idle, and must hold no more blocks, descriptors and tasks than before the
first. Memory is reported for each round; its growth after the first must stay within a limit.
Writes bench/results/soak.json, and exits with 1 on any failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.compare import quire_state
from bench.frontend.servers import REPOSITORY, Child
from bench.soak.callers import Ask, Callers, whole_text
from bench.soak.holdings import Holdings, idle
from quire.bench.machine import machine_card

NUM_ASKS = 24
WORDS = ("once", "upon", "a", "time", "there", "was", "little", "dog", "who", "liked", "the", "sea")
STALL_S = 4.0
# Growth of the memory of either process from the first round's end to the last's.
MAX_GROWTH_BYTES = 24 << 20


def bodies(seed: int) -> list[dict[str, Any]]:
    """Return requests of several lengths, some greedy, some sampled."""
    chance = random.Random(seed)
    return [
        {
            "prompt": " ".join(chance.choices(WORDS, k=chance.randrange(3, 60))),
            "max_tokens": chance.randrange(4, 48),
            "temperature": chance.choice([0, 0.8, 1.0]),
            "seed": chance.randrange(1000),
            "ignore_eos": True,
        }
        for _ in range(NUM_ASKS)
    ]


async def asked_alone(port: int, bodies: list[dict[str, Any]]) -> list[Ask]:
    """Return each request with its answer when served alone."""
    alone = Callers(port, [], seed=0, stall_s=0.0)
    return [Ask(body, whole_text(await alone.answer(body))) for body in bodies]


async def soak(callers: Callers, streams: int, seconds: float) -> None:
    """Run one round; stalls end with it."""
    end_s = time.monotonic() + seconds
    asyncio.get_running_loop().call_later(seconds, callers.end_stalls)
    await callers.run(streams, lambda _: time.monotonic() < end_s)


def grown(rounds: list[Holdings]) -> list[str]:
    """Return memory that has grown beyond the limit after the first round."""
    problems = []
    for name in ("memory_bytes", "engine_memory_bytes"):
        growth = getattr(rounds[-1], name) - getattr(rounds[0], name)
        if growth > MAX_GROWTH_BYTES:
            problems.append(f"{name} grew by {growth >> 20} MiB after the first round")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=300.0,
        help="an exchange that takes longer is wrong; more where the machine may stand still",
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench/results/soak.json")
    args = parser.parse_args()
    flags = ("--port", "0", "--stall-seconds", "2", "--max-queued-requests", str(2 * args.streams))
    with tempfile.TemporaryDirectory() as folder:
        tasks_file = Path(folder) / "tasks"
        with Child("bench.soak.server", str(tasks_file), *flags) as server:
            asks = asyncio.run(asked_alone(server.port, bodies(args.seed)))
            # Connections, threads and lazily created objects of every kind, before anything is
            # counted.
            asyncio.run(soak(Callers(server.port, asks, seed=-1, stall_s=1.0), 64, 3.0))
            before = idle(server, tasks_file)
            callers = Callers(
                server.port, asks, seed=args.seed, stall_s=STALL_S, limit_s=args.limit_seconds
            )
            rounds: list[Holdings] = []
            for _ in range(args.rounds):
                asyncio.run(soak(callers, args.streams, 60 * args.minutes / args.rounds))
                rounds.append(idle(server, tasks_file, before))
                print(dict(callers.done), rounds[-1], callers.wrong[:3], flush=True)
    wrong = [*callers.wrong, *(one for found in rounds for one in found.beyond(before))]
    wrong += grown(rounds)
    result = {
        "bench": "soak",
        "machine": machine_card(),
        "quire": quire_state(),
        "minutes": args.minutes,
        "streams": args.streams,
        "done": dict(callers.done),
        "wrong": wrong,
        "before": asdict(before),
        "after_rounds": [asdict(found) for found in rounds],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
