"""KV memory: the used share of allocated slots, the size of metadata, the cost of paging.

1. The real scheduler and cache under mixed lengths with an instant worker: tokens held over slots
   allocated, each step, against reserving the maximum length for each request.
2. Bytes of the cache's metadata against the bytes of KV they manage (0.6B shape, bf16).
3. Attention over pages in random order at block sizes 16, 32, 64 against the same keys and values
   laid out contiguously, interleaved in one run: against the faster of one run of memory for each
   (request, KV head) and one for each request. Refuses to report if any of them differs in a single
   bit.

Run: python -m bench.memory paging [--out bench/results/memory.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.records import Request, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card
from quire.cache.manager import CacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler

Int32s = NDArray[np.int32]

TOKEN_BYTES = 2 * 28 * 8 * 128 * 2  # KV of one token: 28 layers, 8 KV heads of 128, bf16
MAX_MODEL_LEN = 4096
BLOCK_SIZES = (16, 32, 64)
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128


# ---- 1 and 2: the metadata


def instant_worker(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    """Return a result for each row that samples: random token ids that never end a request."""
    counts = plan.samples.astype(np.int32)
    ids = rng.integers(2, 30_000, int(counts.sum())).astype(np.int32)
    return StepResult(step=plan.step, token_counts=counts, token_ids=ids)


def mixed_requests(num_requests: int, rng: np.random.Generator) -> list[Request]:
    """Draw log-normal lengths: prompts with a median of some 400 tokens, outputs of some 150."""
    requests = []
    for index in range(num_requests):
        prompt = int(np.clip(rng.lognormal(6.0, 0.8), 16, 3000))
        output = int(np.clip(rng.lognormal(5.0, 0.7), 8, MAX_MODEL_LEN - prompt))
        requests.append(
            Request(
                request_id=str(index),
                group_id=str(index),
                stream=0,
                prompt_ids=rng.integers(2, 30_000, prompt).astype(np.int32),
                sampling=SamplingParams(seed=index),
                stop_ids=(),
                max_total_tokens=prompt + output,
                arrival_ms=0.0,
            )
        )
    return requests


def kv_share(num_blocks: int = 4096, num_requests: int = 600) -> dict[str, float]:
    """Return shares over a run in which the pool limits concurrency."""
    rng = np.random.default_rng(0)
    cache = CacheManager(num_blocks, 16, prefix_caching=True)
    limits = SchedulerLimits(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        max_queued_requests=num_requests,
    )
    scheduler = Scheduler(limits, cache, FirstCome())
    for request in mixed_requests(num_requests, rng):
        scheduler.add(request)
    held_tokens: dict[int, int] = {}
    tokens = slots_allocated = reserved = steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        if plan is None:
            raise SystemExit("the scheduler stalled")
        for slot in plan.retired.tolist():
            held_tokens.pop(slot, None)
        held_tokens.update(
            zip(plan.slots.tolist(), (plan.starts + plan.counts).tolist(), strict=True)
        )
        steps += 1
        tokens += sum(held_tokens.values())
        slots_allocated += (cache.num_blocks - cache.num_free) * cache.block_size
        reserved += len(held_tokens) * MAX_MODEL_LEN
        scheduler.update(plan, instant_worker(plan, rng), 0.0)
    problems = scheduler.check_integrity()
    if problems:
        raise SystemExit(f"the books disagree: {problems}")
    books = bytes_of(cache, set())
    return {
        "kv_share_percent": 100 * tokens / slots_allocated,
        "kv_share_reserved_percent": 100 * tokens / reserved,
        "steps": steps,
        "preemptions": scheduler.stats().preemptions_total,
        "books_bytes": books,
        "books_percent_of_kv": 100 * books / (num_blocks * 16 * TOKEN_BYTES),
    }


def bytes_of(thing: Any, seen: set[int]) -> int:
    """Return bytes of an object and everything reachable: arrays, containers, plain attributes."""
    if id(thing) in seen or isinstance(thing, type) or callable(thing):
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return bytes_of(thing.base, seen) if thing.base is not None else thing.nbytes
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return size + sum(bytes_of(k, seen) + bytes_of(v, seen) for k, v in thing.items())
    if isinstance(thing, list | tuple | set | frozenset):
        return size + sum(bytes_of(item, seen) for item in thing)
    slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    return size + sum(bytes_of(item, seen) for item in (*slots, *vars_of(thing).values()))


def vars_of(thing: Any) -> dict[str, Any]:
    """Return attributes of an object with a dict; none otherwise."""
    return vars(thing) if hasattr(thing, "__dict__") else {}


# ---- 3: paging


class AttentionCase:
    """One layer's attention over `num_seqs` sequences of `context` positions, one row each."""

    def __init__(
        self, pool: _native.Pool, tables: Int32s, *, context: int, block_size: int, kv_heads: int
    ) -> None:
        self.num_seqs, self.context, self.block_size = len(tables), context, block_size
        self.tables, self.kv_width = tables, kv_heads * HEAD_DIM
        self.q_width = kv_heads * (HEADS // KV_HEADS) * HEAD_DIM
        widths = [self.q_width, self.kv_width, self.kv_width, self.q_width]
        rows = max(self.num_seqs, context)
        self.native = _native.Program(pool, sum(rows * width * 2 for width in widths))
        offset = 0
        for width in widths:
            self.native.add_buffer(0, offset, width, rows, "bf16")
            offset += rows * width * 2
        q, k, v, y = ((i, 0, width) for i, width in enumerate(widths))
        heads = self.q_width // HEAD_DIM
        attention = {
            "q": q,
            "y": y,
            "layer": 0,
            "cache": 0,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "scale": HEAD_DIM**-0.5,
            "window": 0,
            "soft_cap": 0.0,
        }
        self.native.add_segment([("store_kv", {"k": k, "v": v, "layer": 0, "cache": 0})])
        self.native.add_segment([("attention", attention)])
        self.native.allocate_cache(
            dtype="bf16",
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            block_size=block_size,
            layers=1,
            num_blocks=int(tables.max()) + 1,
        )

    def store(self, seq: int, keys: NDArray[np.uint16], values: NDArray[np.uint16]) -> None:
        """Fill one sequence's cache; keys and values are bf16 bits [context, kv width]."""
        self.native.array((1, 0, self.kv_width), self.context)[:] = keys
        self.native.array((2, 0, self.kv_width), self.context)[:] = values
        positions = np.arange(self.context, dtype=np.int32)
        blocks = self.tables[seq, positions // self.block_size]
        slots = (blocks * self.block_size + positions % self.block_size).astype(np.int32)
        self._run(
            0, positions, slots, np.array([0, self.context], np.int32), self.tables[seq : seq + 1]
        )

    def attend(self, queries: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Attend with one query row per sequence, at the last position."""
        self.native.array((0, 0, self.q_width), self.num_seqs)[:] = queries
        last = np.full(self.num_seqs, self.context - 1, np.int32)
        starts = np.arange(self.num_seqs + 1, dtype=np.int32)
        self._run(1, last, np.full(self.num_seqs, -1, np.int32), starts, self.tables)
        return self.native.array((3, 0, self.q_width), self.num_seqs)

    def _run(
        self, segment: int, positions: Int32s, slots: Int32s, starts: Int32s, tables: Int32s
    ) -> None:
        self.native.run(
            segment,
            token_ids=np.zeros(len(positions), np.int32),
            positions=positions,
            rope_positions=positions,
            kv_slots=slots,
            seq_starts=starts,
            block_tables=np.ascontiguousarray(tables),
            sample_rows=np.empty(0, np.int32),
        )


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Return bf16 bits of normals."""
    values = rng.standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def paged_attention(pairs: int, *, num_seqs: int = 16, context: int = 2048) -> list[dict[str, Any]]:
    """Return medians of the ratio paged / contiguous over interleaved pairs, for each block
    size.
    """
    rng = np.random.default_rng(1)
    pool = _native.Pool(2)
    queries = random_bf16(rng, (num_seqs, HEADS * HEAD_DIM))
    kv = [random_bf16(rng, (2, context, KV_HEADS * HEAD_DIM)) for _ in range(num_seqs)]
    contiguous = _contiguous_case(pool, kv, num_seqs, context)
    group = HEADS // KV_HEADS * HEAD_DIM
    by_head = queries.reshape(num_seqs * KV_HEADS, group)
    wanted = contiguous.attend(by_head).reshape(num_seqs, -1).copy()
    in_order = np.arange(num_seqs * context // 128, dtype=np.int32).reshape(num_seqs, -1)
    ordered = _filled_case(pool, kv, in_order, context=context, block_size=128)
    results = []
    for block_size in BLOCK_SIZES:
        num_columns = context // block_size
        tables = rng.permutation(num_seqs * num_columns).astype(np.int32)
        paged = _filled_case(
            pool, kv, tables.reshape(num_seqs, num_columns), context=context, block_size=block_size
        )
        if not np.array_equal(paged.attend(queries), wanted):
            raise SystemExit(f"block size {block_size}: paged attention differs in its bits")
        ratios, paged_ms = [], []
        for _ in range(pairs):
            one = _ms(lambda case=paged: case.attend(queries))
            other = min(
                _ms(lambda: contiguous.attend(by_head)), _ms(lambda: ordered.attend(queries))
            )
            ratios.append(one / other)
            paged_ms.append(one)
        results.append(
            {
                "block_size": block_size,
                "paged_cost_percent": 100 * (statistics.median(ratios) - 1),
                "paged_ms": statistics.median(paged_ms),
                "kv_gb_per_s": 2
                * num_seqs
                * context
                * KV_HEADS
                * HEAD_DIM
                * 2
                / statistics.median(paged_ms)
                / 1e6,
                "pairs": pairs,
            }
        )
    return results


def _filled_case(
    pool: _native.Pool,
    kv: list[NDArray[np.uint16]],
    tables: Int32s,
    *,
    context: int,
    block_size: int,
) -> AttentionCase:
    case = AttentionCase(pool, tables, context=context, block_size=block_size, kv_heads=KV_HEADS)
    for seq, (keys, values) in enumerate(kv):
        case.store(seq, keys, values)
    return case


def _contiguous_case(
    pool: _native.Pool, kv: list[NDArray[np.uint16]], num_seqs: int, context: int
) -> AttentionCase:
    """Return each KV head as a sequence with contiguous blocks."""
    num_rows, num_columns = num_seqs * KV_HEADS, context // 16
    tables = np.arange(num_rows * num_columns, dtype=np.int32).reshape(num_rows, num_columns)
    case = AttentionCase(pool, tables, context=context, block_size=16, kv_heads=1)
    for seq, (keys, values) in enumerate(kv):
        for head in range(KV_HEADS):
            columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            case.store(seq * KV_HEADS + head, keys[:, columns], values[:, columns])
    return case


def _ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="bench.memory paging", description=__doc__
    )
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {"bench": "memory", "machine": machine_card(), **kv_share()}
    result["attention_shape"] = {
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "sequences": 16,
        "context": 2048,
        "kv_dtype": "bf16",
    }
    result["paged_attention"] = paged_attention(args.pairs)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
