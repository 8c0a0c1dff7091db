"""Measure too little KV memory: the cost of preemption, and what blocks from a tier save.

`w3`: 32 requests of 128-512 tokens in and 32-128 out, at most 16 running: with memory for all 16
(`uncut`), for 4 of them at their longest (`cut`), and that with a tier (`tier`). The rate is of
tokens in and out. `long`: conversations with long contexts take turns, and the pool holds a part of
them: each turn begins with the whole conversation so far. `cut` recomputes what left the pool,
`tier` loads it where that is predicted to be cheaper; the pool has equally many bytes in both.
`alone` has room for all. Refuses to report if any request gets other tokens than in the run with
room for all. A run is a process; runs accumulate in the file, and medians are reported.

Run: python -m bench.memory preemption --runs w3:uncut,w3:cut,w3:tier,long:alone,long:cut,long:tier
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory.plots import plot_preemption
from bench.memory.processes import Runs, add_places, child, fill_places, median
from quire.bench.local import LocalEngine
from quire.bench.workloads import WORKLOADS, RequestSpec, draw_ids

MODES = {"w3": ("uncut", "cut", "tier"), "long": ("alone", "cut", "tier")}
# Conversations of so many turns; each turn adds so many tokens.
CONVERSATIONS, TURNS, BEGINNING, ADDED, ANSWER = 6, 3, 1536, 48, 16
POOL_CONVERSATIONS = 2.5


def longest(load: str) -> int:
    """Return tokens of the longest request."""
    if load == "w3":
        return WORKLOADS["w3"].longest
    return BEGINNING + TURNS * (ADDED + ANSWER)


def kv_tokens(load: str, mode: str) -> int:
    """Return tokens the pool holds."""
    if load == "w3":
        return (16 if mode == "uncut" else 4) * (longest(load) + 16)
    share = CONVERSATIONS + 1 if mode == "alone" else POOL_CONVERSATIONS
    return int(share * (longest(load) + 16))


async def converse(engine: LocalEngine) -> tuple[list[tuple[int, ...]], int]:
    """Run all conversations turn by turn, sequentially within a turn, two at a time."""
    rng = np.random.default_rng(5)
    said = [draw_ids(BEGINNING, engine.vocab_size, rng).tolist() for _ in range(CONVERSATIONS)]
    answers, tokens = [], 0
    for _ in range(TURNS):
        for first in range(0, CONVERSATIONS, 2):
            pair = range(first, first + 2)
            for one in pair:
                said[one] += draw_ids(ADDED, engine.vocab_size, rng).tolist()
            asks = [RequestSpec(prompt_ids=tuple(said[one]), output_tokens=ANSWER) for one in pair]
            for one, answer in zip(pair, await engine.run(asks), strict=True):
                said[one] += answer.token_ids
                answers.append(answer.token_ids)
                tokens += len(asks[0].prompt_ids) + ANSWER
    return answers, tokens


async def one_run(args: argparse.Namespace) -> dict[str, Any]:
    """Run one load in one mode in a fresh process."""
    token_bytes = 2 * 28 * 8 * 128 * 2
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": kv_tokens(args.load, args.mode) * token_bytes,
        "max_num_seqs": 16,
        "max_model_len": longest(args.load),
        "pack_cache": args.pack_cache,
    }
    if args.mode == "tier":
        settings["kv_tier_path"], settings["kv_tier_size"] = args.tier, "4GiB"
    async with LocalEngine(args.model, settings) as engine:
        began_s = time.perf_counter()
        if args.load == "w3":
            asks = WORKLOADS["w3"].draw(engine.vocab_size, np.random.default_rng(7))
            got = [answer.token_ids for answer in await engine.run(asks)]
            tokens = sum(len(ask.prompt_ids) + ask.output_tokens for ask in asks)
        else:
            got, tokens = await converse(engine)
        took_s = time.perf_counter() - began_s
        stats = engine.stats
        return {
            "load": args.load,
            "mode": args.mode,
            "tokens_per_s": tokens / took_s,
            "took_s": took_s,
            "answers": hashlib.blake2b(repr(got).encode(), digest_size=8).hexdigest(),
            "preemptions": stats.preemptions_total,
            "preemptions_moved": stats.preemptions_moved_total,
            "preemption_cost_ms": stats.preemption_cost_ms_total,
            "prefix_hit_tokens": stats.prefix_hit_tokens_total,
            "fetched_blocks": stats.tier_fetched_blocks_total,
            "saved_blocks": stats.tier_saved_blocks_total,
            "unsaved_blocks": stats.tier_unsaved_blocks_total,
            "about": engine.description,
        }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of each load and mode, and the ratios of the goals."""
    result: dict[str, Any] = {}
    for load, modes in MODES.items():
        medians = {mode: median(runs, "tokens_per_s", load=load, mode=mode) for mode in modes}
        rates = {mode: rate for mode, rate in medians.items() if rate is not None}
        if rates:
            result[load] = {"tokens_per_s": rates}
            for mode in ("cut", "tier"):
                if mode in rates and modes[0] in rates:
                    result[load][f"{mode}_of_{modes[0]}"] = rates[mode] / rates[modes[0]]
            if "cut" in rates and "tier" in rates:
                result[load]["tier_of_cut"] = rates["tier"] / rates["cut"]
    return result


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="bench.memory preemption", description=__doc__
    )
    add_places(parser, out=Path("bench/results/preemption.json"))
    parser.add_argument("--runs", default=",".join(f"{k}:{m}" for k in MODES for m in MODES[k]))
    parser.add_argument("--load", choices=tuple(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.load:
        print(json.dumps(asyncio.run(one_run(args))))
        return
    fill_places(args, "preemption")
    runs = Runs("preemption", args.out, summary)
    for name in args.runs.split(","):
        load, _, mode = name.partition(":")
        shutil.rmtree(args.tier, ignore_errors=True)
        run = child(args, "preemption", "--load", load, "--mode", mode)
        shutil.rmtree(args.tier, ignore_errors=True)
        shown = ("took_s", "tokens_per_s", "preemptions", "preemptions_moved", "fetched_blocks")
        print(name, {key: round(run[key], 2) for key in shown})
        answers = {one["answers"] for one in (*runs.all, run) if one["load"] == load}
        if len(answers) > 1:
            raise SystemExit(f"{load}: answers differ between runs; wrong answers are not reported")
        runs.add(run)
    plot_preemption(runs.content, args.out.with_suffix(".png"))
    runs.print_summary()
