"""Four simulated engines with and without a KV store that they share, on a published trace.

Mooncake's synthetic trace (arrivals, lengths, and hashes of 512-token blocks) over engines of
Llama-3.1-8B's shape on 1.5 TB/s and 300 TFLOP/s each: the share of prompt tokens found in a cache
and the time to first token, for requests in turn and as the router's `warm-cache` sends them; then
the same engines as two for prompts and two for answers, beside four of both roles. Virtual time:
the same result on every machine, busy or not.

Run: python -m bench.simulated_store [--max-requests 2000] [--speed 0.5] [--store-gb-per-s 5]
     [--transfer-gb-per-s 10] [--out bench/results/simulated-store.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench.checkpoints import checkpoint_config
from bench.data import outside
from quire.bench.machine import machine_card
from quire.config.flags import engine_config
from quire.obs.timing import Goals
from quire.obs.trace import read_trace
from quire.sim.fleet import PREFILL_BY, RolesSpec, compare_stores, stores_text
from quire.sim.load import RequestDefaults, trace_requests
from quire.sim.machine import Machine, described_machine
from quire.sim.roles import compare_roles, roles_text
from quire.sim.virtual_store import StoreSpec

SHAPE = "llama-3.1-8b"
SETTINGS = {"max_num_seqs": 128, "kv_cache_memory": "32GiB", "max_model_len": 131_072}
GIB = 1 << 30


def machine() -> Machine:
    """Return the machine of each engine."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint_config(SHAPE)))
        config = engine_config({**SETTINGS, "model": folder, "served_model_name": SHAPE})
        return described_machine(config, gb_per_s=1500.0, gflop_per_s=300_000.0, fixed_ms=2.0)


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
    parser.add_argument("--out", type=Path, default=Path("bench/results/simulated-store.json"))
    args = parser.parse_args(arguments)
    trace = read_trace(outside("traces/mooncake-synthetic.jsonl"), max_requests=args.max_requests)
    defaults = RequestDefaults(max_tokens=2048, max_model_len=SETTINGS["max_model_len"])
    requests, _ = trace_requests(trace, speed=args.speed, defaults=defaults)
    store = StoreSpec(
        gb_per_s=args.store_gb_per_s,
        latency_ms=2.0,
        num_bytes=1024 * GIB,
        buffer_bytes=16 * GIB,
    )
    goals, config, described = Goals(ttft_s=2.0, tpot_s=0.1), engine_config(SETTINGS), machine()
    outcome = compare_stores(
        requests,
        defaults,
        described,
        config,
        num_engines=args.engines,
        store=store,
        goals=goals,
    )
    print(stores_text(outcome), flush=True)
    content = {**outcome, "speed": args.speed, "machine": machine_card(), "roles": {}}
    for prefill_by in PREFILL_BY:
        divided = compare_roles(
            requests,
            defaults,
            described,
            config,
            spec=RolesSpec(
                num_prefill=args.engines // 2,
                num_decode=args.engines - args.engines // 2,
                gb_per_s=args.transfer_gb_per_s,
                latency_ms=1.0,
                prefill_by=prefill_by,
            ),
            goals=goals,
            routing="warm-cache",
            store=store,
        )
        print(roles_text(divided), flush=True)
        content["roles"][prefill_by] = divided
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
