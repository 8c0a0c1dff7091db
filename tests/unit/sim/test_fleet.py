"""Simulated engines with and without a store: what is found, when, and what limits it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.obs.timing import Goals
from quire.obs.trace import read_trace
from quire.sim.fleet import Fleet, compare_stores, simulate_fleet, stores_text
from quire.sim.load import TraceRequest, trace_requests
from quire.sim.run import Run, simulate
from quire.sim.virtual_store import StoreSpec, VirtualStore
from tests.data import outside
from tests.unit.sim.made import DEFAULTS, config, drawn_requests, machine, request

FAST = StoreSpec(gb_per_s=1000.0, latency_ms=0.0, num_bytes=1 << 40, buffer_bytes=1 << 30)
BLOCKS = 4
BLOCK = 16


def alike(arrival_ms: float, name: int = 7) -> TraceRequest:
    """Return a request with BLOCKS named blocks and some tokens of its own."""
    ids = tuple(range(10 * name, 10 * name + BLOCKS))
    tokens = BLOCKS * BLOCK + 5
    return replace(request(arrival_ms, tokens, 2), block_ids=ids, block_tokens=BLOCK)


def run_fleet(
    requests: list[TraceRequest], store: StoreSpec | None, num_engines: int = 2, **settings: Any
) -> tuple[list[Run], VirtualStore | None]:
    fleet = Fleet(num_engines=num_engines, store=store)
    found = simulate_fleet(requests, DEFAULTS, machine(), config(**settings), fleet)
    return found.engines, found.store


def cached(runs: list[Run]) -> list[int]:
    finished = sorted(
        (one for run in runs for one in run.finished), key=lambda one: one.request.arrival_ms
    )
    return [one.cached_tokens for one in finished]


def test_an_engine_finds_what_another_computed_before() -> None:
    requests = [alike(0.0), alike(5_000.0), alike(10_000.0, name=8)]
    runs, store = run_fleet(requests, FAST)
    assert cached(runs) == [0, BLOCKS * BLOCK, 0]
    assert store is not None
    assert len(store) == 2 * BLOCKS
    without, none = run_fleet(requests, None)
    assert cached(without) == [0, 0, 0]
    assert none is None
    first_ms = [
        next(
            one.first_token_ms
            for run in found
            for one in run.finished
            if one.request is requests[1]
        )
        for found in (runs, without)
    ]
    assert first_ms[0] < first_ms[1]


def test_one_engine_computes_what_another_one_claims_and_fetches() -> None:
    long = [
        replace(one, prompt_tokens=17 * BLOCK, block_ids=tuple(range(17)))
        for one in (alike(0.0), alike(1.0))
    ]
    runs, _ = run_fleet(long, FAST)
    stores = [run.stats.kv_store for run in runs]
    assert all(stores)
    assert [one.claims_total for one in stores if one] == [1, 0]
    assert [one.waited_total for one in stores if one] == [0, 1]
    assert [one.put_blocks_total for one in stores if one] == [17, 0]
    assert [one.fetched_blocks_total for one in stores if one] == [0, 17]
    assert cached(runs)[0] == 0
    assert cached(runs)[1] >= 16 * BLOCK


def test_short_prompts_are_computed_where_waiting_is_in_vain() -> None:
    runs, _ = run_fleet([alike(0.0), alike(0.0)], FAST)
    assert cached(runs) == [0, 0]
    assert runs[1].stats.kv_store is not None
    assert runs[1].stats.kv_store.waited_in_vain_total == 1


def test_a_store_that_is_slower_than_computing_is_not_used() -> None:
    slow = replace(FAST, gb_per_s=1e-9)
    runs, store = run_fleet([alike(0.0), alike(5_000.0)], slow)
    assert cached(runs) == [0, 0]
    far = replace(FAST, latency_ms=1e6)
    runs, store = run_fleet([alike(0.0), alike(5_000.0)], far)
    assert cached(runs) == [0, 0]
    assert store is not None
    assert len(store) == BLOCKS  # put all the same


def test_a_full_store_forgets_the_least_recently_used() -> None:
    store = VirtualStore(3)
    keys = [bytes([at]) for at in range(5)]
    for key in keys[:3]:
        store.put(key, 0.0)
    assert store.use(keys[0], 1.0)
    store.put(keys[3], 2.0)
    assert [store.has(key, 3.0) for key in keys] == [True, False, True, True, False]
    assert store.num_evicted == 1
    store.put(keys[4], 9.0)
    assert not store.has(keys[4], 8.0)  # not yet


def test_own_contents_of_two_engines_are_not_the_same() -> None:
    requests = [request(0.0, 69, 2), request(5_000.0, 69, 2)]
    runs, store = run_fleet(requests, FAST)
    assert cached(runs) == [0, 0]
    assert store is not None
    assert len(store) == 2 * BLOCKS


def test_one_engine_without_a_store_is_a_plain_simulation() -> None:
    requests = drawn_requests(60, per_s=30, seed=2, shared=True)
    [run], _ = run_fleet(requests, None, num_engines=1)
    plain = simulate(requests, DEFAULTS, machine(), config())
    assert [(one.request, one.last_token_ms) for one in run.finished] == [
        (one.request, one.last_token_ms) for one in plain.finished
    ]


def test_engines_of_ranks_that_divide_positions_have_their_blocks() -> None:
    requests = [request(500.0 * number, 300, 4) for number in range(4)]
    settings = {"context_parallel_size": 2, "kv_cache_memory": "1MiB"}  # two blocks of 512 tokens
    [run], _ = run_fleet(requests, None, num_engines=1, **settings)
    plain = simulate(requests, DEFAULTS, machine(), config(**settings))
    assert len(run.finished) == len(requests)
    assert [one.last_token_ms for one in run.finished] == [
        one.last_token_ms for one in plain.finished
    ]


def test_engines_with_few_blocks_end_all_requests_and_repeat() -> None:
    requests = drawn_requests(80, per_s=60, seed=3, shared=True)
    small = replace(FAST, buffer_bytes=40_000, num_bytes=200_000)
    runs = [
        run_fleet(requests, small, num_engines=3, kv_cache_memory="300KiB")[0] for _ in range(2)
    ]
    assert sum(len(run.finished) for run in runs[0]) == len(requests)
    assert [run.finished for run in runs[0]] == [run.finished for run in runs[1]]


def test_the_comparison_has_both_ways_with_and_without() -> None:
    requests = [alike(400.0 * at, name=at % 5) for at in range(40)]
    goals = Goals(ttft_s=1.0, tpot_s=1.0)
    outcome = compare_stores(
        requests, DEFAULTS, machine(), config(), num_engines=4, store=FAST, goals=goals
    )
    assert outcome["complete"]
    hits = {(run["routing"], run["store"]): run["summary"]["hit_share"] for run in outcome["runs"]}
    assert hits["round-robin", True] > hits["round-robin", False]
    assert len(stores_text(outcome).splitlines()) >= 6


def test_a_store_needs_a_rate_and_a_size() -> None:
    with pytest.raises(SettingError, match="above 0"):
        replace(FAST, gb_per_s=0.0)
    with pytest.raises(SettingError, match="above 0"):
        replace(FAST, buffer_bytes=0)


def test_a_published_trace_finds_more_with_a_store() -> None:
    trace = read_trace(outside("traces/mooncake-synthetic.jsonl"), max_requests=200)
    defaults = replace(DEFAULTS, max_tokens=8, max_model_len=4096)
    first, _ = trace_requests(trace, speed=1.0, defaults=defaults)
    first = first[:10]  # and again, each at another engine
    requests = first + [replace(one, arrival_ms=one.arrival_ms + 9e5) for one in first]
    hits = []
    for store in (None, FAST):
        fleet = Fleet(num_engines=4, store=store)
        settings = config(max_model_len=4096, kv_cache_memory="64MiB", max_num_batched_tokens=256)
        found = simulate_fleet(requests, defaults, machine(), settings, fleet)
        hits.append(found.run.stats.prefix_hit_tokens_total)
    assert hits[1] > hits[0]
