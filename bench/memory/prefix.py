"""Measure the prefix cache: what it finds, what it costs, and what sharing saves.

1. Replay of traces through the real cache at several sizes: blocks found by it, by plain LRU (the
   same cache without protection), by Belady's rule, and by a rule that knows which blocks never
   come back. A Mooncake trace (hashes of 512-token blocks) and conversations as token ids (blocks
   of 16; the answer is in the cache as well).
2. Sixteen requests at once with a common prefix of 1,024 tokens: tokens computed, against each
   computing its own.
3. Microseconds per block: digests and match, registering, and allocation with eviction.
4. Prompts that share nothing: time inside the prefix cache over the run's time, and the run's time
   with prefix caching on over off, in pairs.

Run: python -m bench.memory prefix [--only replay,...] [--model DIR] [--out ...] [--png ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.data import outside
from bench.memory.belady import belady_hits, footprint, lru_without_dead_hits
from quire.base.records import Request, StepResult
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card
from quire.cache.manager import CacheManager
from quire.cache.pool import PROTECTED_SHARE, BlockPool
from quire.obs.pictures import draw_lines, pyplot
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler

Int32s = NDArray[np.int32]

MOONCAKE = "traces/mooncake-synthetic.jsonl"
CONVERSATIONS = "traces/sharegpt-qwen3-ids.jsonl"
BLOCK_SIZE = 16
# Sizes of the cache, as shares of a trace's distinct blocks.
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8)
_SLOT = np.zeros(1, np.intp)


# ---- 1: replay


class Trace:
    """Requests as rows of token ids, one after the other; the first `asked` ids are prompt.

    block_size: ids per block here, each of which may stand for many: a block had block_tokens.
    """

    def __init__(
        self, name: str, rows: Sequence[tuple[Int32s, int]], *, block_size: int, block_tokens: int
    ) -> None:
        self.name, self.rows = name, rows
        self.block_size, self.block_tokens = block_size, block_tokens
        known: dict[tuple[int, bytes], int] = {}
        self.chains = [
            _numbered(tokens[: len(tokens) // block_size * block_size], block_size, known)
            for tokens, _ in rows
        ]
        self.asked = [asked // block_size for _, asked in rows]


def mooncake() -> Trace:
    """Read a trace: each hash stands for a block of 512 tokens, here one token."""
    lines = outside(MOONCAKE).read_text().splitlines()
    hashes = [np.array(json.loads(line)["hash_ids"], np.int32) for line in lines]
    rows = [(ids, len(ids)) for ids in hashes]
    return Trace("mooncake", rows, block_size=1, block_tokens=512)


def conversations() -> Trace:
    """Read conversations: prompts are looked up, and their answers stay cached as well."""
    rows = []
    for line in outside(CONVERSATIONS).read_text().splitlines():
        entry = json.loads(line)
        prompt, answer = entry["input_tok_ids"], entry["output_tok_ids"]
        rows.append((np.array([*prompt, *answer], np.int32), len(prompt)))
    return Trace("conversations", rows, block_size=BLOCK_SIZE, block_tokens=BLOCK_SIZE)


def replayed_hits(trace: Trace, capacity: int, *, protected_share: float) -> int:
    """Return blocks found by the cache with `capacity` blocks."""
    size = trace.block_size
    cache = CacheManager(capacity, size, prefix_caching=True)
    cache.pool = BlockPool(capacity, protected_share=protected_share)
    cache.lay_out(num_slots=1, max_tokens=max(len(tokens) for tokens, _ in trace.rows))
    hits = 0
    for (tokens, asked), chain_ids in zip(trace.rows, trace.chains, strict=True):
        if len(chain_ids) > capacity:
            continue
        full = tokens[: len(chain_ids) * size]
        chain = cache.chain(full[: asked // size * size], "")
        assert chain is not None, "prefix caching is on"
        match = cache.match(chain)
        hits += match.num_blocks
        cache.attach(0, match)
        cache.extend(0, len(full))
        cache.register(_SLOT, np.array([len(full)], np.int32), full.reshape(1, -1))
        cache.free(_SLOT, np.zeros(1, np.int64))
    problems = cache.check_integrity()
    if problems:
        raise SystemExit(f"the books do not agree: {problems}")
    return hits


def replay(trace: Trace) -> dict[str, Any]:
    """Return hits by size and rule."""
    distinct, asked = footprint(trace.chains), sum(trace.asked)
    sizes = []
    for share in SHARES:
        capacity = max(int(share * distinct), max(map(len, trace.chains)))
        best = belady_hits(trace.chains, trace.asked, capacity)
        found = {
            "lru": replayed_hits(trace, capacity, protected_share=0.0),
            "quire": replayed_hits(trace, capacity, protected_share=PROTECTED_SHARE),
            "lru_without_dead": lru_without_dead_hits(trace.chains, trace.asked, capacity),
        }
        sizes.append(
            {
                "blocks": capacity,
                "share_of_footprint": round(capacity / distinct, 3),
                "hits": {**found, "belady": best},
                "hit_rate": {
                    rule: round(hits / asked, 4) for rule, hits in {**found, "belady": best}.items()
                },
                "of_belady": {rule: round(hits / best, 4) for rule, hits in found.items()},
            }
        )
    return {
        "trace": trace.name,
        "requests": len(trace.rows),
        "block_tokens": trace.block_tokens,
        "asked_blocks": asked,
        "distinct_blocks": distinct,
        "protected_share": PROTECTED_SHARE,
        "sizes": sizes,
    }


def _numbered(tokens: Int32s, size: int, known: dict[tuple[int, bytes], int]) -> list[int]:
    """Give each chain of blocks a number: equal tokens after an equal chain get an equal one."""
    before, chain = -1, []
    for at in range(0, len(tokens), size):
        before = known.setdefault((before, tokens[at : at + size].tobytes()), len(known))
        chain.append(before)
    return chain


# ---- 2: a prefix shared by sixteen requests


def shared_prefix(*, prefix_caching: bool, step_tokens: int) -> dict[str, int]:
    """Return tokens computed for sixteen requests with 1,024 common tokens and 32 own ones."""
    limits = SchedulerLimits(
        max_num_seqs=16, max_num_batched_tokens=step_tokens, max_model_len=2048
    )
    cache = CacheManager(2048, BLOCK_SIZE, prefix_caching=prefix_caching)
    scheduler = Scheduler(limits, cache, FirstCome())
    rng = np.random.default_rng(1)
    shared = rng.integers(2, 30_000, 1024).astype(np.int32)
    for number in range(16):
        own = rng.integers(2, 30_000, 32).astype(np.int32)
        scheduler.add(_request(f"r{number}", np.concatenate((shared, own)), max_tokens=1))
    computed = steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        if plan is None:
            raise SystemExit("the scheduler made no plan though requests are there")
        counts = plan.samples.astype(np.int32)
        ids = np.full(int(counts.sum()), 5, np.int32)
        scheduler.update(plan, StepResult(step=plan.step, token_counts=counts, token_ids=ids), 0.0)
        computed += plan.num_tokens
        steps += 1
    return {"tokens_computed": computed, "steps": steps}


def sharing() -> list[dict[str, Any]]:
    """Measure sharing at several step sizes."""
    rows = []
    for step_tokens in (128, 256, 512, 2048, 20_000):
        alone = shared_prefix(prefix_caching=False, step_tokens=step_tokens)
        shared = shared_prefix(prefix_caching=True, step_tokens=step_tokens)
        ratio = shared["tokens_computed"] / alone["tokens_computed"]
        rows.append(
            {"step_tokens": step_tokens, "alone": alone, "shared": shared, "ratio": round(ratio, 4)}
        )
    return rows


def _request(name: str, prompt: Int32s, *, max_tokens: int) -> Request:
    return Request(
        request_id=name,
        group_id=name,
        stream=0,
        prompt_ids=prompt,
        sampling=SamplingParams(temperature=0, seed=0),
        stop_ids=(),
        max_total_tokens=len(prompt) + max_tokens,
        arrival_ms=0.0,
    )


# ---- 3: microseconds per block


def microseconds(
    rounds: int, *, prompt_blocks: int = 256, pool_blocks: int = 4096
) -> dict[str, Any]:
    """Time the cache's methods on prompts of 4,096 tokens, in a pool that is always full."""
    cache = CacheManager(pool_blocks, BLOCK_SIZE, prefix_caching=True)
    num_tokens = prompt_blocks * BLOCK_SIZE
    cache.lay_out(num_slots=1, max_tokens=num_tokens)
    rng = np.random.default_rng(2)
    times: dict[str, list[float]] = {}

    def timed(name: str, verb: Callable[[], Any]) -> Any:
        begun = time.perf_counter_ns()
        done = verb()
        times.setdefault(name, []).append((time.perf_counter_ns() - begun) / 1000 / prompt_blocks)
        return done

    def admit(kind: str, tokens: Int32s) -> None:
        computed = np.array([num_tokens], np.int32)
        chain = timed(f"digests ({kind})", lambda: cache.chain(tokens, ""))
        match = timed(f"match ({kind})", lambda: cache.match(chain))
        timed(f"attach ({kind})", lambda: cache.attach(0, match))
        timed(f"allocate and evict ({kind})", lambda: cache.extend(0, num_tokens))
        timed(f"register ({kind})", lambda: cache.register(_SLOT, computed, tokens.reshape(1, -1)))
        timed(f"free ({kind})", lambda: cache.free(_SLOT, np.zeros(1, np.int64)))

    for _ in range(rounds + pool_blocks // prompt_blocks):
        tokens = rng.integers(2, 30_000, num_tokens).astype(np.int32)
        admit("new", tokens)
        admit("found", tokens)
    warm = 2 * (pool_blocks // prompt_blocks)
    median = {name: round(statistics.median(taken[warm:]), 3) for name, taken in times.items()}
    return {
        "block_size": BLOCK_SIZE,
        "prompt_blocks": prompt_blocks,
        "rounds": rounds,
        "us_per_block": median,
        "digests_and_match_us": {
            kind: round(median[f"digests ({kind})"] + median[f"match ({kind})"], 3)
            for kind in ("new", "found")
        },
    }


# ---- 4: no reuse

# Methods that exist, or take longer, because of prefix caching.
_VERBS = ("chain", "match", "attach", "register")
_WARM_UPS = 5


def no_reuse(model: str, pairs: int, *, prompt_tokens: int, requests: int) -> dict[str, Any]:
    """Run prompts without a common prefix, 16 generated tokens each."""
    from quire import LLM

    rng = np.random.default_rng(3)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def prompts() -> list[list[int]]:
        return rng.integers(5, 300, (requests, prompt_tokens)).tolist()

    inside_s: list[float] = []
    original = {name: getattr(CacheManager, name) for name in _VERBS}

    def clocked(verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return verb(*arguments, **named)
            finally:
                inside_s.append(time.perf_counter() - begun)

        return call

    def seconds(llm: LLM) -> float:
        asked = prompts()
        begun = time.perf_counter()
        llm.generate(asked, sampling)
        return time.perf_counter() - begun

    ratios, shares = [], []
    # A small pool, used completely before it counts: without caching a few blocks are reused
    # forever, with caching the whole pool is touched, and its first use would cost time.
    kv: Any = {"kv_cache_memory_bytes": 1 << 27}
    with LLM(model, **kv) as on, LLM(model, **kv, enable_prefix_caching=False) as off:
        for _ in range(_WARM_UPS):
            seconds(on), seconds(off)
        for _ in range(pairs):
            with_cache, without = seconds(on), seconds(off)
            ratios.append(with_cache / without)
        for name, verb in original.items():
            setattr(CacheManager, name, clocked(verb))
        try:
            for _ in range(pairs):
                inside_s.clear()
                shares.append((lambda took: sum(inside_s) / took)(seconds(on)))
        finally:
            for name, verb in original.items():
                setattr(CacheManager, name, verb)
    return {
        "model": Path(model).name,
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "pairs": pairs,
        "books_share_percent": round(100 * statistics.median(shares), 3),
        "on_over_off": round(statistics.median(ratios), 4),
    }


# ---- all parts


def draw(replays: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the hit rate over the cache's size, a panel for each trace."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(replays), figsize=(6 * len(replays), 4.2), squeeze=False)
    lines = {
        "lru": "LRU",
        "quire": "Quire (segmented LRU, ghosts)",
        "lru_without_dead": "LRU that skips blocks never used again",
        "belady": "Belady (optimal)",
    }
    for panel, one in zip(panels[0], replays, strict=True):
        sizes = [size["blocks"] for size in one["sizes"]]
        rates = {
            label: [100 * size["hit_rate"][rule] for size in one["sizes"]]
            for rule, label in lines.items()
        }
        draw_lines(panel, dict.fromkeys(rates, sizes), rates)
        panel.set_title(
            f"{one['trace']}: {one['requests']:,} requests, "
            f"{one['distinct_blocks']:,} distinct blocks"
        )
        panel.set_xlabel(f"cache size, blocks of {one['block_tokens']} tokens")
        panel.set_ylabel("hit rate, % of requested blocks")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0][-1].legend(loc="lower right", framealpha=0.7)
    figure.suptitle("Prefix cache hits by eviction rule", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parts = ("replay", "sharing", "microseconds", "no_reuse")
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="bench.memory prefix", description=__doc__
    )
    parser.add_argument("--only", default=",".join(parts), help="parts, by commas")
    parser.add_argument("--model", default=None, help="for no_reuse; else stories260K")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--requests", type=int, default=32, help="of one run of no_reuse")
    parser.add_argument("--out", type=Path, default=Path("bench/results/prefix.json"))
    parser.add_argument("--png", type=Path, default=Path("bench/results/prefix.png"))
    args = parser.parse_args(arguments)
    asked = args.only.split(",")
    unknown = sorted(set(asked) - set(parts))
    if unknown:
        raise SystemExit(f"--only names {', '.join(unknown)}; there are {', '.join(parts)}")
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    result |= {"bench": "prefix", "machine": machine_card()}
    if "replay" in asked:
        result["replay"] = [replay(mooncake()), replay(conversations())]
        draw(result["replay"], args.png)
    if "sharing" in asked:
        result["sharing"] = sharing()
    if "microseconds" in asked:
        result["microseconds"] = microseconds(args.rounds)
    if "no_reuse" in asked:
        model = args.model or str(outside("stories260K"))
        one = no_reuse(model, args.pairs, prompt_tokens=384, requests=args.requests)
        result.setdefault("no_reuse", {})[one["model"]] = one
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({part: result[part] for part in asked if part != "replay"}, indent=1))
    for one in result["replay"] if "replay" in asked else ():
        print(one["trace"])
        for size in one["sizes"]:
            print(size["blocks"], size["hit_rate"], size["of_belady"])
