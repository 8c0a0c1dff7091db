"""Simulated engines with roles and a store count what real ones do: hits, transfers and bytes.

A prefill engine, and two decode engines that ask it for prompts, share a store. Each request is
sent when the one before has ended and all engines have counted what the simulation counts by then,
so that the order of events is the same in both; a count that is never reached fails the test.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.engine_stats import EngineStats
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.program.tensors import DType
from quire.sim.fleet import Fleet, RolesSpec, simulate_fleet
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.virtual_store import StoreSpec
from tests.exact.rig import Model
from tests.exact.test_disaggregation import Engine, key, running
from tests.exact.workload import VOCAB_SIZE
from tests.tiny_models import write_tiny_llama
from tests.unit.sim.made import config, machine

__all__ = ["key"]

BLOCK, LENGTH = 16, 160
# Named blocks of each prompt, and tokens of its own after them.
PROMPTS = (
    ((1, 2, 3, 4), 5),
    ((1, 2, 3, 4), 7),  # at the other decode engine: all of it is stored
    ((1, 2, 3, 4, 5, 6), 20),  # the first has four blocks in its pool
    ((1, 2, 3, 9), 1),  # three from the store, and one over the link
    ((7, 8), 0),
    ((7, 8), 40),
    ((), 15),  # shorter than a block
    ((1, 2, 3, 4, 5, 6), 33),
)
SETTINGS = {"max_num_batched_tokens": 32, "kv_cache_memory": "1MiB", "max_num_seqs": 4}


def counts_of(stats: EngineStats) -> dict[str, int]:
    """Return what is compared of one engine."""
    store, moved = stats.kv_store, stats.transfer
    if store is None or moved is None:
        return {}
    return {
        "queried tokens": stats.prefix_queried_tokens_total,
        "hit tokens": stats.prefix_hit_tokens_total,
        "transfers": moved.transfers_total,
        "received blocks": moved.received_blocks_total,
        "received bytes": moved.received_bytes_total,
        "lookups": store.lookups_total,
        "hit blocks": store.hit_blocks_total,
        "missed blocks": store.missed_blocks_total,
        "fetched blocks": store.fetched_blocks_total,
        "fetched bytes": store.fetched_bytes_total,
        "put blocks": store.put_blocks_total,
        "put bytes": store.put_bytes_total,
        "failures": sum(count for _, count in (*store.failures_total, *moved.failures_total)),
    }


def simulated(num_requests: int, block_bytes: int) -> list[dict[str, int]]:
    """Return the counts of each engine after so many requests."""
    requests = [
        TraceRequest(
            arrival_ms=1e5 * number,
            prompt_tokens=BLOCK * len(blocks) + own,
            output_tokens=2,
            block_ids=blocks,
            block_tokens=BLOCK,
        )
        for number, (blocks, own) in enumerate(PROMPTS[:num_requests])
    ]
    defaults = RequestDefaults(max_tokens=2, max_model_len=LENGTH)
    roles = RolesSpec(num_prefill=1, num_decode=2, gb_per_s=1.0, latency_ms=0.1, fetch="always")
    store = StoreSpec(
        gb_per_s=1.0, latency_ms=0.2, num_bytes=1 << 30, buffer_bytes=1 << 20, fetch="always"
    )
    made = replace(machine(), token_bytes=block_bytes // BLOCK)
    fleet = Fleet(num_engines=3, roles=roles, store=store)
    found = simulate_fleet(requests, defaults, made, config(**SETTINGS), fleet)
    assert len(found.run.finished) == num_requests
    return [counts_of(one.stats) for one in found.engines]


def real_request(number: int) -> Request:
    """Return a request with equal tokens in equal blocks, and others of its own."""
    blocks, own = PROMPTS[number]
    parts = [np.random.default_rng(one).integers(0, VOCAB_SIZE, BLOCK) for one in blocks]
    parts.append(np.random.default_rng(1000 + number).integers(0, VOCAB_SIZE, own))
    prompt = np.concatenate(parts).astype(np.int32)
    return Request(
        request_id=f"r{number}",
        group_id=f"r{number}",
        stream=0,
        prompt_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=2, seed=0).resolve(),
        stop_ids=(),
        max_total_tokens=len(prompt) + 2,
        arrival_ms=0.0,
    )


def test_a_simulated_fleet_counts_what_engines_do(tmp_path: Path, key: Path) -> None:
    model = Model(write_tiny_llama(tmp_path / "model", seed=25), DType.F32)
    shared: dict[str, Any] = {
        **SETTINGS,
        "max_model_len": LENGTH,
        "kv_transfer_key_file": str(key),
        "kv_transfer_size": "1MiB",
        "kv_store": str(tmp_path / "store"),
        "kv_store_size": "64MiB",
        "kv_store_buffer_size": "1MiB",
        "kv_store_fetch": "always",
        "kv_store_timeout": 60.0,
    }
    prefill = Engine(model, role="prefill", **shared)
    assert prefill.card is not None
    assert prefill.card.transfer is not None
    block_bytes = prefill.card.block_bytes
    peers = (f"127.0.0.1:{prefill.card.transfer.port}",)
    asking = {"role": "decode", "kv_transfer_peer": peers, "kv_transfer_fetch": "always"}
    with running(prefill):
        decode = [Engine(model, **asking, **shared) for _ in range(2)]
        with running(*decode):
            engines = [prefill, *decode]
            for number in range(len(PROMPTS)):
                request, wanted = real_request(number), simulated(number + 1, block_bytes)
                decode[number % 2].start([request])
                decode[number % 2].finish([request.request_id])
                for engine, counts in zip(engines, wanted, strict=True):
                    reached(engine, counts, f"after request {number}")
    for name in ("received blocks", "fetched blocks", "put blocks", "hit tokens"):
        assert sum(counts[name] for counts in wanted), name


def reached(engine: Engine, wanted: dict[str, int], when: str) -> None:
    """Wait until an engine has counted as much, and compare."""

    def is_there() -> bool:
        counts = counts_of(engine.stats)
        return bool(counts) and all(counts[name] >= wanted[name] for name in wanted)

    try:
        engine.wait(is_there)
    except AssertionError as error:
        raise AssertionError(f"{when}: {counts_of(engine.stats)}, simulated {wanted}") from error
    assert counts_of(engine.stats) == wanted, when
