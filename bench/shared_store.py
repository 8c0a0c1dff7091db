"""Four engines that share a KV store: the first token of a known prefix, against computing it.

Each engine is a process of its own with an empty pool. The first computes a prompt and stores its
blocks; each of the others then gets a prompt with the same beginning and another end (`fetched`),
and one that is stored nowhere (`computed`). At last all four get one new beginning at once
(`at_once`): one computes it, the others wait for it. The tokens of each fetched prompt must be
those of the first engine, which computed its blocks itself, or the run is refused; so it is where
blocks were not fetched. times_sooner: median of computed over median of fetched.

Run: python -m bench.shared_store [--model FOLDER] [--prompt 4096] [--engines 4] [--store FOLDER]
     [--encoding none] [--cold] [--out bench/results/shared-store.json] [--smoke]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import random_checkpoint
from quire.base.kv_store import KVStoreStats
from quire.bench.local import LocalEngine
from quire.bench.machine import machine_card
from quire.bench.workloads import RequestSpec, draw_ids

SHAPE = "qwen3-0.6b"
OWN_TOKENS = 16  # after the common beginning, different each time
OUTPUT_TOKENS = 8
STORED_WITHIN_S = 60.0


def prompt(args: argparse.Namespace, beginning: int, end: int, vocab_size: int) -> tuple[int, ...]:
    """Return args.prompt tokens drawn by `beginning`, and OWN_TOKENS drawn by `end`."""
    first = draw_ids(args.prompt, vocab_size, np.random.default_rng(beginning))
    own = draw_ids(OWN_TOKENS, vocab_size, np.random.default_rng(10_000 + end))
    return (*first.tolist(), *own.tolist())


async def engine(args: argparse.Namespace) -> None:
    """Run an engine: a prompt per line of the input, an answer per line of the output."""
    settings: dict[str, Any] = {
        "kv_cache_memory": f"{args.kv_mib}MiB",
        "max_num_seqs": 4,
        "max_model_len": args.prompt + 128,
        "kv_store": args.store,
        "kv_store_size": "16GiB",
        "kv_store_buffer_size": f"{args.kv_mib}MiB",
        "kv_store_encoding": args.encoding,
    }
    if args.kv_cache_dtype:
        settings["kv_cache_dtype"] = args.kv_cache_dtype
    if args.pack_cache:
        settings["pack_cache"] = args.pack_cache
    async with LocalEngine(args.model, settings) as local:
        await local.settle()
        print(json.dumps({"about": local.description}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            beginning, end = json.loads(line)
            before = store_stats(local)
            ids = prompt(args, beginning, end, local.vocab_size)
            (answer,) = await local.run([RequestSpec(prompt_ids=ids, output_tokens=OUTPUT_TOKENS)])
            block_size = int(str(local.description["block_size"]))
            missing = args.prompt // block_size - (
                store_stats(local).fetched_blocks_total - before.fetched_blocks_total
            )
            await _stored(local, before.put_blocks_total + missing)
            after = store_stats(local)
            result = {
                "first_token_s": answer.times.first_s,
                "token_ids": list(answer.token_ids),
                "fetched_blocks": after.fetched_blocks_total - before.fetched_blocks_total,
                "put_blocks": after.put_blocks_total - before.put_blocks_total,
                "waited": after.waited_total - before.waited_total,
                "failures": sum(count for _, count in after.failures_total),
            }
            print(json.dumps(result), flush=True)


def store_stats(local: LocalEngine) -> KVStoreStats:
    """Return what the engine counted of its store."""
    stats = local.stats.kv_store
    assert stats is not None, "the engine has a store"
    return stats


async def _stored(local: LocalEngine, put_blocks: int) -> None:
    """Wait until so many blocks were put, or no more are."""
    last, since_s = store_stats(local).put_blocks_total, time.perf_counter()
    while (now := store_stats(local).put_blocks_total) < put_blocks:
        if now > last:
            last, since_s = now, time.perf_counter()
        if time.perf_counter() - since_s > 2.0:
            return  # it was found in the pool or stored before
        await asyncio.sleep(0.02)


class Child:
    """An engine in a process of its own."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        command = [sys.executable, "-m", "bench.shared_store", "--engine", "--model", args.model]
        command += ["--prompt", str(args.prompt), "--kv-mib", str(args.kv_mib)]
        command += ["--store", args.store, "--encoding", args.encoding]
        command += ["--pack-cache", args.pack_cache, "--kv-cache-dtype", args.kv_cache_dtype]
        self.number = number
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about: dict[str, Any] = self._line()["about"]

    def begin(self, beginning: int, end: int) -> None:
        """Send a prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([beginning, end])}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last prompt."""
        return self._line()

    def run(self, beginning: int, end: int) -> dict[str, Any]:
        """Return the answer to a prompt."""
        self.begin(beginning, end)
        return self.answer()

    def end(self) -> None:
        """Stop the engine."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"engine {self.number} ended ({self._process.wait()})")
        found: dict[str, Any] = json.loads(line)
        return found


def drop(folder: Path) -> None:
    """Make the system write the store's files out and drop their pages."""
    for file in folder.glob("blocks/*/*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measured(args: argparse.Namespace, engines: Sequence[Child]) -> dict[str, Any]:
    """Run all prompts. Raises SystemExit on a wrong token, and where nothing was fetched."""
    first, *others = engines
    num_blocks = args.prompt // int(first.about["block_size"])
    computed, fetched = [first.run(0, 0)], []
    if computed[0]["put_blocks"] < num_blocks:
        raise SystemExit(f"only {computed[0]['put_blocks']} of {num_blocks} blocks were stored")
    for child in others:
        if args.cold:
            drop(Path(args.store))
        found = child.run(0, child.number)
        if found["fetched_blocks"] < num_blocks:
            raise SystemExit(f"only {found['fetched_blocks']} of {num_blocks} blocks were fetched")
        wanted = first.run(0, child.number)["token_ids"]
        if found["token_ids"] != wanted and args.encoding == "none":
            raise SystemExit(f"the store's tokens differ: {found['token_ids']}, {wanted}")
        fetched.append(found)
    computed += [child.run(100 + child.number, 0) for child in others]
    if any(one["fetched_blocks"] for one in computed):
        raise SystemExit("blocks were fetched for a prompt that was to be computed")
    medians = {
        name: statistics.median(one["first_token_s"] for one in runs)
        for name, runs in (("computed", computed), ("fetched", fetched))
    }
    return {
        "blocks": num_blocks,
        "computed_first_token_s": [one["first_token_s"] for one in computed],
        "fetched_first_token_s": [one["first_token_s"] for one in fetched],
        "median_computed_s": medians["computed"],
        "median_fetched_s": medians["fetched"],
        "times_sooner": medians["computed"] / medians["fetched"],
        "at_once": at_once(args, engines),
    }


def at_once(args: argparse.Namespace, engines: Sequence[Child]) -> dict[str, Any]:
    """Send one new beginning to all engines at once."""
    for child in engines:
        child.begin(500, 0)
    answers = [child.answer() for child in engines]
    if len({tuple(one["token_ids"]) for one in answers}) > 1 and args.encoding == "none":
        raise SystemExit(f"engines answer differently: {answers}")
    return {
        "first_token_s": [one["first_token_s"] for one in answers],
        "fetched_blocks": [one["fetched_blocks"] for one in answers],
        "waited": sum(one["waited"] for one in answers),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.shared_store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--kv-mib", type=int, default=1536)
    parser.add_argument("--store", default="", help="an empty or missing directory; it is removed")
    parser.add_argument("--pack-cache", default="")
    parser.add_argument("--kv-cache-dtype", default="")
    parser.add_argument("--encoding", default="none")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache")
    parser.add_argument("--out", type=Path, default=Path("bench/results/shared-store.json"))
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.engine:
        asyncio.run(engine(args))
        return
    if args.engines < 2:
        raise SystemExit(f"--engines is {args.engines}; at least 2 share a store")
    if args.smoke:
        args.prompt, args.kv_mib = 256, 32
    elif not args.model:
        checkpoint = random_checkpoint(SHAPE)
        args.model = str(checkpoint)
        args.pack_cache = args.pack_cache or str(checkpoint.parent / "packed")
    args.store = args.store or tempfile.mkdtemp(prefix="quire-store-")
    if any(Path(args.store).glob("*")):
        raise SystemExit(f"{args.store} is not empty; name a directory that may be removed")
    engines: list[Child] = []
    try:
        engines += [Child(args, number) for number in range(args.engines)]
        content: dict[str, Any] = {
            "bench": "shared_store",
            "machine": machine_card(),
            "about": engines[0].about,
            "prompt": args.prompt,
            "engines": args.engines,
            "encoding": args.encoding,
            "page_cache": "dropped" if args.cold else "warm",
            **measured(args, engines),
        }
    finally:
        for child in engines:
            child.end()
        shutil.rmtree(args.store, ignore_errors=True)
    shown = {name: one for name, one in content.items() if name not in ("machine", "about")}
    print(json.dumps(shown, indent=1))
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
