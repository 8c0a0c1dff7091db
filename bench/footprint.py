"""Measure the memory of a serving engine beyond weights and the KV cache.

`quire serve` of a 0.6B shape with a small cache, all of it touched, under a few concurrent
requests. Memory is read while the server starts and serves, and the maximum counts. Mapped file
pages are left out, because the system can reclaim them. Reported for the engine process (the
largest) and for the whole server, beside the server's own plan. Refuses to report if a request
fails.

Run: python -m bench.footprint [--precisions none,int8,int4] [--out bench/results/footprint.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from bench.checkpoints import random_checkpoint
from quire.base.errors import WorkerError
from quire.bench.cpu_use import own_bytes
from quire.bench.floor import program_of
from quire.bench.http_load import Target, open_loop, served_model
from quire.bench.machine import machine_card
from quire.bench.workloads import RequestSpec, draw_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

KV = "256MiB"
GOAL = 1.15
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 220, 32
_LOOK_S = 0.05
_READY_LIMIT_S = 300.0


class Watch:
    """Peak memory of a server's processes, in total and of the largest one."""

    def __init__(self, pid: int) -> None:
        self.all_bytes = self.largest_bytes = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            now = own_bytes(self._pid).values()
            self.all_bytes = max(self.all_bytes, sum(now))
            self.largest_bytes = max(self.largest_bytes, max(now, default=0))


def measure(shape: str, precision: str) -> dict[str, Any]:
    """Measure one precision of the weights."""
    model = str(random_checkpoint(shape))
    settings = {"quantization": precision, "kv_cache_memory": KV}
    program = program_of(model, settings)
    words = [model, "--quantization", precision, "--kv-cache-memory", KV, "--kv-touch-ahead", KV]
    with tempfile.TemporaryFile() as log, _server(words, log) as (process, target):
        with Watch(process.pid) as watch:
            _wait(process, target, log)
            named = Target(url=target.url, model=asyncio.run(served_model(target)).name)
            _fill(named, program.vocab_size)
            _settle(watch)
        plan = _plan(log)
    kv_tokens = plan["blocks"] * plan["block_size"]
    kv_bytes = kv_tokens * program.caches[0].token_bytes
    planned = program.weight_bytes + kv_bytes
    return {
        "shape": shape,
        "precision": "bf16" if precision == "none" else precision,
        "weight_bytes": program.weight_bytes,
        "kv_bytes": kv_bytes,
        "kv_tokens": kv_tokens,
        "planned_bytes": planned,
        "engine_bytes": watch.largest_bytes,
        "server_bytes": watch.all_bytes,
        "ratio": watch.largest_bytes / planned,
        "server_ratio": watch.all_bytes / planned,
        "goal": GOAL,
        "plan": plan["text"],
    }


@contextmanager
def _server(words: list[str], log: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], Target]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", *words, "--port", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process, Target(url=f"http://127.0.0.1:{port}", model="")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _wait(process: subprocess.Popen[bytes], target: Target, log: IO[bytes]) -> None:
    end_s = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < end_s and process.poll() is None:
        with suppress(WorkerError):
            asyncio.run(served_model(target))
            return
        time.sleep(0.2)
    log.seek(0)
    raise SystemExit(f"the server did not start: {log.read().decode(errors='replace')[-500:]}")


def _fill(target: Target, vocab_size: int) -> None:
    rng = np.random.default_rng(3)
    asks = [
        RequestSpec(
            prompt_ids=tuple(draw_ids(PROMPT_TOKENS, vocab_size, rng).tolist()),
            output_tokens=OUTPUT_TOKENS,
        )
        for _ in range(REQUESTS)
    ]
    failed = [one.error for one in asyncio.run(open_loop(target, asks)) if one.error]
    if failed:
        raise SystemExit(f"requests failed, so nothing is reported: {failed[0]}")


def _settle(watch: Watch) -> None:
    """Wait until the idle engine has touched all of its cache: no growth for two seconds."""
    held = -1
    while watch.all_bytes > held:
        held = watch.all_bytes
        time.sleep(2)


def _plan(log: IO[bytes]) -> dict[str, Any]:
    """Return the server's own memory plan."""
    log.seek(0)
    said = log.read().decode(errors="replace").splitlines()
    lines = [line.removeprefix("memory").strip() for line in said if line.startswith("memory ")]
    [cache] = [line for line in lines if line.startswith("KV cache (")]
    blocks, _, rest = cache.partition("KV cache (")[2].partition(" blocks of ")
    return {
        "blocks": int(blocks),
        "block_size": int(rest.split()[0]),
        "text": [" ".join(line.split()) for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--precisions", default="none,int8,int4")
    parser.add_argument("--out", type=Path, default=Path("bench/results/footprint.json"))
    args = parser.parse_args()
    # What is installed has bytecode: a start without it would compile each module.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    result = {
        "bench": "footprint",
        "machine": machine_card(),
        "footprints": [measure(args.shape, name) for name in args.precisions.split(",")],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["footprints"], indent=1))


if __name__ == "__main__":
    main()
