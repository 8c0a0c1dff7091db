"""Measure a warm disk tier after a restart: time to first token with the prefix in the tier.

Each measurement is a process of its own. `cold` computes a fresh prompt; `fill` computes a prompt
and leaves its blocks in the tier; `warm` starts anew with the same beginning and another end, the
tier's files in the page cache; `dropped` does so after the tier's files were dropped from the page
cache, so that they come from the disk. Refuses to report if the tier's tokens differ from those
computed. The median of all runs is reported; runs accumulate in the file.

Run: python -m bench.memory warm [--model FOLDER] [--prompt 4096] [--runs cold,fill,warm,dropped]
     [--tier FOLDER] [--out bench/results/tier-warm.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory.plots import plot_tier
from bench.memory.processes import Run, Runs, add_places, child, fill_places, median
from quire.bench.local import LocalEngine
from quire.bench.workloads import RequestSpec, draw_ids

KINDS = ("cold", "fill", "warm", "dropped")
OWN_TOKENS = 16  # after the common beginning, different each time
OUTPUT_TOKENS = 8
SAVED_WITHIN_S = 30.0


def prompt(num_tokens: int, vocab_size: int, *, beginning: int, end: int) -> tuple[int, ...]:
    """Return `num_tokens` drawn by `beginning` and OWN_TOKENS drawn by `end`."""
    first = draw_ids(num_tokens, vocab_size, np.random.default_rng(beginning))
    return (*first.tolist(), *draw_ids(OWN_TOKENS, vocab_size, np.random.default_rng(end)).tolist())


async def one_run(args: argparse.Namespace) -> dict[str, Any]:
    """Run one answer in a fresh process, and return its times."""
    settings: dict[str, Any] = {
        "kv_cache_memory": f"{args.kv_mib}MiB",
        "max_num_seqs": 4,
        "max_model_len": args.prompt + 512,
    }
    if args.pack_cache:
        settings["pack_cache"] = args.pack_cache
    if args.kind != "cold":
        settings["kv_tier_path"], settings["kv_tier_size"] = args.tier, "4GiB"
    began_s = time.perf_counter()
    async with LocalEngine(args.model, settings) as engine:
        ready_s = time.perf_counter() - began_s
        beginning = 0 if args.kind != "cold" or args.same else 1_000 + args.number
        ids = prompt(args.prompt, engine.vocab_size, beginning=beginning, end=args.number)
        (answer,) = await engine.run([RequestSpec(prompt_ids=ids, output_tokens=OUTPUT_TOKENS)])
        if args.kind == "fill":
            await _saved(engine, args.prompt // int(engine.description["block_size"]))
        stats = engine.stats
        return {
            "kind": args.kind,
            "first_token_s": answer.times.first_s,
            "ready_s": ready_s,
            "token_ids": list(answer.token_ids),
            "fetched_blocks": stats.tier_fetched_blocks_total,
            "saved_blocks": stats.tier_saved_blocks_total,
            "about": engine.description,
        }


async def _saved(engine: LocalEngine, num_blocks: int) -> None:
    """Wait until so many blocks have been written."""
    until_s = time.perf_counter() + SAVED_WITHIN_S
    while engine.stats.tier_saved_blocks_total < num_blocks:
        if time.perf_counter() > until_s:
            raise SystemExit(f"{num_blocks} blocks were not saved within {SAVED_WITHIN_S} s")
        await asyncio.sleep(0.05)


def drop(folder: Path) -> None:
    """Make the system write the tier's files out and drop their pages."""
    for file in folder.glob("*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached(folder: Path) -> None:
    """Read the tier's files into the page cache; a fetch leaves none there."""
    for file in folder.glob("*.kv"):
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def in_child(args: argparse.Namespace, kind: str, number: int, *, same: bool = False) -> Run:
    """Run `one_run` in a fresh process."""
    flags = ["--kind", kind, "--prompt", str(args.prompt), "--number", str(number)]
    return child(args, "warm", *flags, "--kv-mib", str(args.kv_mib), *["--same"] * same)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of each kind, and the speedup of the tier over the cold run."""
    result: dict[str, Any] = {}
    for kind in KINDS:
        first_token_s = median(runs, "first_token_s", kind=kind)
        if first_token_s is not None:
            count = sum(run["kind"] == kind for run in runs)
            result[kind] = {"first_token_s": first_token_s, "runs": count}
    if "cold" in result:
        for kind in ("warm", "dropped"):
            if kind in result:
                ratio = result["cold"]["first_token_s"] / result[kind]["first_token_s"]
                result[kind]["times_sooner"] = ratio
    return result


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="bench.memory warm", description=__doc__
    )
    add_places(parser, out=Path("bench/results/tier-warm.json"))
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--runs", default="cold,fill,warm,dropped")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--same", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.kind:
        print(json.dumps(asyncio.run(one_run(args))))
        return
    fill_places(args, "warm")
    runs = Runs("warm", args.out, summary)
    for kind in args.runs.split(","):
        if kind == "fill":
            shutil.rmtree(args.tier, ignore_errors=True)
        if kind in ("warm", "dropped"):
            {"warm": cached, "dropped": drop}[kind](Path(args.tier))
        # Each warm run has its own ending; the first is also computed, to compare tokens.
        number = sum(run["kind"] == kind for run in runs.all)
        run = in_child(args, kind, number)
        print(kind, f"{run['first_token_s']:.3f} s, {run['fetched_blocks']} blocks fetched")
        if kind in ("warm", "dropped"):
            if run["fetched_blocks"] < args.prompt // int(run["about"]["block_size"]) - 1:
                raise SystemExit(f"only {run['fetched_blocks']} blocks came from the tier")
            computed = _computed(args, runs.content, number)
            if run["token_ids"] != computed:
                raise SystemExit(f"the tier's tokens differ: {run['token_ids']}, {computed}")
        runs.add(run, prompt=args.prompt)
    plot_tier(runs.content, args.out.with_suffix(".png"))
    runs.print_summary()


def _computed(args: argparse.Namespace, content: dict[str, Any], number: int) -> list[int]:
    """Return the tokens of warm prompt `number`, computed without a tier, once."""
    known = content.setdefault("computed", {})
    if str(number) not in known:
        known[str(number)] = in_child(args, "cold", number, same=True)["token_ids"]
    tokens: list[int] = known[str(number)]
    return tokens
