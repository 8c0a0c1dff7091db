"""Four simulated engines with and without a KV store that they share, on a published trace.

Mooncake's synthetic trace (arrivals, lengths, and hashes of 512-token blocks) over engines of
Llama-3.1-8B's shape on 1.5 TB/s and 300 TFLOP/s each: the share of prompt tokens found in a cache
and the time to first token, for requests in turn and as the router's `warm-cache` sends them; and
the same engines as two for prompts and two for answers, which decode engines or the router bring
together. Virtual time: the same result on every machine, busy or not.

Run: python -m bench.simulated_store [--max-requests 2000] [--speed 0.5] [--store-gb-per-s 5]
     [--transfer-gb-per-s 10] [--jobs 2] [--out bench/results/simulated-store.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.checkpoints import checkpoint_config
from bench.data import outside
from quire.bench.machine import machine_card
from quire.config.flags import engine_config
from quire.obs.report import table
from quire.obs.timing import Goals
from quire.obs.trace import read_trace
from quire.sim.fleet import (
    COMPARED_ROUTINGS,
    PREFILL_BY,
    Fleet,
    RolesSpec,
    fleet_entry,
    simulate_fleet,
    store_text,
)
from quire.sim.load import RequestDefaults, trace_requests
from quire.sim.machine import Machine, described_machine
from quire.sim.virtual_store import StoreSpec

SHAPE = "llama-3.1-8b"
MAX_MODEL_LEN = 131_072
# Blocks are larger than in service, so that there are fewer to simulate.
SETTINGS: dict[str, Any] = {"max_num_seqs": 128, "kv_cache_memory": "32GiB", "block_size": 64}
SETTINGS |= {"max_model_len": MAX_MODEL_LEN}
GOALS = Goals(ttft_s=2.0, tpot_s=0.1)
GIB = 1 << 30


def machine() -> Machine:
    """Return the machine of each engine."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint_config(SHAPE)))
        config = engine_config({**SETTINGS, "model": folder, "served_model_name": SHAPE})
        return described_machine(config, gb_per_s=1500.0, gflop_per_s=300_000.0, fixed_ms=2.0)


def fleets(args: argparse.Namespace, store: StoreSpec) -> Iterator[Fleet]:
    """Yield what is compared, each without the store and with it."""
    num_prefill = args.engines // 2
    for kept in (None, store):
        for routing in COMPARED_ROUTINGS:
            yield Fleet(num_engines=args.engines, routing=routing, store=kept)
        for prefill_by in PREFILL_BY:
            roles = RolesSpec(
                num_prefill=num_prefill,
                num_decode=args.engines - num_prefill,
                gb_per_s=args.transfer_gb_per_s,
                latency_ms=1.0,
                prefill_by=prefill_by,
            )
            yield Fleet(num_engines=args.engines, routing="warm-cache", store=kept, roles=roles)


def run(args: argparse.Namespace, fleet: Fleet) -> dict[str, Any]:
    """Return the result of one fleet."""
    trace = read_trace(outside("traces/mooncake-synthetic.jsonl"), max_requests=args.max_requests)
    defaults = RequestDefaults(max_tokens=2048, max_model_len=MAX_MODEL_LEN)
    requests, _ = trace_requests(trace, speed=args.speed, defaults=defaults)
    found = simulate_fleet(requests, defaults, machine(), engine_config(SETTINGS), fleet)
    return {
        "routing": fleet.routing,
        "store": fleet.store is not None,
        "roles": None if fleet.roles is None else asdict(fleet.roles),
        "num_requests": len(requests),
        **fleet_entry(found, requests, GOALS),
    }


def text(content: dict[str, Any]) -> str:
    """Return the table."""
    rows = []
    for one in content["runs"]:
        summary, roles = one["summary"], one["roles"]
        engines = f"{content['engines']} of both roles, {one['routing']}"
        if roles is not None:
            engines = f"{roles['num_prefill']} prefill, {roles['num_decode']} decode"
            engines += f", by {roles['prefill_by']}"
        rows.append(
            (
                engines,
                "yes" if one["store"] else "no",
                f"{100 * one['found_share']:.0f} %",
                *(f"{summary['ttft_s'][name]:.2f} s" for name in ("p50", "p99")),
                *(f"{1e3 * summary['tpot_s'][name]:.0f} ms" for name in ("p50", "p99")),
                f"{summary['goodput_per_s']:.2f}/s",
            )
        )
    headings = ("engines", "store", "hits", "TTFT p50", "p99", "TPOT p50", "p99", "goodput")
    return f"{store_text(content['store'])}\n{table(headings, rows)}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.simulated_store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--max-requests", type=int, default=2000)
    parser.add_argument("--speed", type=float, default=0.5)
    parser.add_argument("--store-gb-per-s", type=float, default=5.0)
    parser.add_argument("--transfer-gb-per-s", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once")
    parser.add_argument("--out", type=Path, default=Path("bench/results/simulated-store.json"))
    args = parser.parse_args(arguments)
    store = StoreSpec(
        gb_per_s=args.store_gb_per_s,
        latency_ms=2.0,
        num_bytes=1024 * GIB,
        buffer_bytes=16 * GIB,
    )
    content: dict[str, Any] = {
        "bench": "simulated store",
        "shape": SHAPE,
        "engines": args.engines,
        "speed": args.speed,
        "store": asdict(store),
        "transfer_gb_per_s": args.transfer_gb_per_s,
        "machine": machine_card(),
        "runs": [],
    }
    with ProcessPoolExecutor(args.jobs) as pool:
        for one in pool.map(partial(run, args), fleets(args, store)):
            content["runs"].append(one)
            seconds = one["summary"]["ttft_s"]["p50"]
            print(f"{len(content['runs'])} of 8: TTFT p50 {seconds:.2f} s", file=sys.stderr)
            args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(text(content))


if __name__ == "__main__":
    main(sys.argv[1:])
