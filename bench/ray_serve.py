"""What Ray Serve, its HAProxy and the router add to a streamed token.

A cluster of one node runs `quire.deploy.ray:build_app` with the built-in model. Streams are read in
pairs: from the engine's own port, and through Serve's port. Both must have the same text, or the
run is refused. Beside the wall time per token stands the processor time that HAProxy and the actor
with the router took, so that the load of the machine matters less.

Run: python -m bench.ray_serve [--streams 4] [--tokens 400] [--pairs 9]
     [--out bench/results/ray-serve.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.compare import quire_state
from bench.frontend.servers import REPOSITORY, cpu_s_of
from quire.bench.machine import machine_card

PROMPT = "Once upon a time"
READY_S = 120.0


def free_port() -> int:
    """Return a port that nothing uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def stream(port: int, num_tokens: int) -> str:
    """Return the text of one streamed answer. Raises SystemExit where it does not end."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    raw = json.dumps({**body, "seed": 1}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    answer = whole(await reader.read())
    writer.close()
    if b"data: [DONE]" not in answer:
        raise SystemExit(f"a stream did not end: {answer[-300:]!r}")
    found = re.findall(r'"text":("(?:[^"\\]|\\.)*")', answer.decode())
    return "".join(map(json.loads, found))


def whole(response: bytes) -> bytes:
    """Return the body of a response in chunks."""
    _, _, rest = response.partition(b"\r\n\r\n")
    body = bytearray()
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        body += rest[:size]
        rest = rest[size + 2 :]
    return bytes(body)


def streams(port: int, count: int, num_tokens: int) -> tuple[float, set[str]]:
    """Return the milliseconds per token of each of `count` streams at once, and their texts."""

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(stream(port, num_tokens) for _ in range(count)))

    began_s = time.perf_counter()
    texts = asyncio.run(all_of_them())
    return (time.perf_counter() - began_s) * 1000 / num_tokens, set(texts)


def processes(sign: str) -> list[int]:
    """Return the processes with a text in their command lines, in which actors have their names."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and sign.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def measured(args: argparse.Namespace, port: int) -> dict[str, Any]:
    """Return times of both ways, in pairs."""
    began_s = time.monotonic()
    while True:
        try:
            streams(port, 1, 8)  # Serve starts the engine for it
            break
        except (OSError, SystemExit):
            if time.monotonic() - began_s > READY_S:
                raise
            time.sleep(1.0)
    replicas = asyncio.run(_replicas(port))
    (engine,) = [int(one["url"].rpartition(":")[2]) for one in replicas]
    ports = {"engine": engine, "serve": port}
    for one in ports.values():
        streams(one, args.streams, 64)
    between = {"haproxy": processes("haproxy"), "router": processes("ServeReplica:quire:Router")}
    if not all(between.values()):
        raise SystemExit(f"processes are missing: {between}")
    ms: dict[str, list[float]] = {name: [] for name in ports}
    cpu: dict[str, float] = dict.fromkeys(between, 0.0)
    texts = set[str]()
    for pair in range(args.pairs):
        for name in list(ports)[:: 1 if pair % 2 else -1]:
            before = {part: sum(map(cpu_s_of, pids)) for part, pids in between.items()}
            taken_ms, found = streams(ports[name], args.streams, args.tokens)
            ms[name].append(taken_ms)
            texts |= found
            if name == "serve":
                for part, pids in between.items():
                    cpu[part] += sum(map(cpu_s_of, pids)) - before[part]
    if len(texts) != 1:
        raise SystemExit(f"{len(texts)} different texts for one request")
    total = args.pairs * args.streams * args.tokens
    added = [two - one for one, two in zip(ms["engine"], ms["serve"], strict=True)]
    return {
        "streams": args.streams,
        "tokens": args.tokens,
        "pairs": args.pairs,
        "engine_ms_per_step": statistics.median(ms["engine"]),
        "serve_ms_per_step": statistics.median(ms["serve"]),
        "added_ms_per_token": statistics.median(added) / args.streams,
        "wall_ratio": statistics.median(
            two / one for one, two in zip(ms["engine"], ms["serve"], strict=True)
        ),
        "cpu_us_per_token": {part: seconds / total * 1e6 for part, seconds in cpu.items()},
    }


async def _replicas(port: int) -> list[dict[str, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    raw = await reader.read()
    writer.close()
    start = raw.index(b"{")
    found: list[dict[str, Any]] = json.loads(raw[start : raw.rindex(b"}") + 1])["replicas"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench/results/ray-serve.json")
    args = parser.parse_args()
    port = free_port()
    os.environ |= {
        "PYTHONPATH": str(REPOSITORY),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    import ray
    from ray import serve

    from quire.deploy.ray import build_app

    machine = machine_card()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        settings = {"max_num_seqs": args.streams, "kv_cache_memory": "16MiB", "kv_touch_ahead": 0}
        app = build_app(
            {"host": "127.0.0.1", "num_cpus": 1, "insecure": True, "settings": settings}
        )
        serve.run(app, name="quire", route_prefix="/")
        result = measured(args, port)
    finally:
        serve.shutdown()
        ray.shutdown()
    result = {"bench": "ray_serve", "machine": machine, "quire": quire_state(), **result}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in result if name != "machine"}, indent=1))
    sys.exit(0)


if __name__ == "__main__":
    main()
