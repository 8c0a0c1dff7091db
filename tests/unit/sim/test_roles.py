"""Simulated prefill and decode engines, with links, stores and a router: times counted by hand,
choices, and reproducibility."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.obs.timing import Goals
from quire.obs.trace import read_trace
from quire.sim.cost import MeasuredCost
from quire.sim.fleet import Fleet, FleetRun, RolesSpec, simulate_fleet
from quire.sim.load import TraceRequest, trace_requests
from quire.sim.roles import compare_roles, roles_text
from quire.sim.run import simulate
from quire.sim.virtual_store import StoreSpec
from tests.unit.sim.made import DEFAULTS, config, drawn_requests, machine, request

# A block of 16 tokens takes 1 ms.
PAIR = RolesSpec(num_prefill=1, num_decode=1, gb_per_s=0.016384, latency_ms=2.0, fetch="always")
STORE = StoreSpec(
    gb_per_s=1000.0, latency_ms=0.0, num_bytes=1 << 40, buffer_bytes=1 << 30, fetch="always"
)


def run_roles(
    requests: list[TraceRequest],
    roles: RolesSpec | None,
    *,
    num_engines: int = 0,
    store: StoreSpec | None = None,
    routing: str = "round-robin",
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> FleetRun:
    num_engines = num_engines or (1 if roles is None else roles.num_engines)
    fleet = Fleet(num_engines=num_engines, routing=routing, store=store, roles=roles)
    return simulate_fleet(requests, DEFAULTS, machine(), config(**(settings or {})), fleet, **more)


def received_blocks(found: FleetRun) -> list[int]:
    stats = [one.stats.transfer for one in found.engines]
    return [0 if one is None else one.received_blocks_total for one in stats]


def stored(found: FleetRun, name: str) -> list[int]:
    return [getattr(one.stats.kv_store, name) for one in found.engines]


def test_a_prompt_is_computed_elsewhere_and_its_last_token_here() -> None:
    found = run_roles([request(500.0, 33, 3)], PAIR)
    [finished] = found.run.finished
    # 2 ms to ask, 41 ms to compute 32 tokens, 2 ms on the way and 2 ms for the blocks; then one
    # token of the prompt, and two more.
    assert finished.first_token_ms == 500 + 2 + 41 + 2 + 2 + 10
    assert finished.last_token_ms == finished.first_token_ms + 20
    assert found.num_fetches == 1
    assert received_blocks(found) == [0, 2]
    assert found.run.stats.transfer is not None
    assert found.run.stats.transfer.received_bytes_total == 2 * 16 * 1024
    assert not sum(count for _, count in found.run.stats.transfer.failures_total)


@pytest.mark.parametrize("speed", [1, 4])
def test_a_mooncake_trace_meets_a_pair_at_its_times(tmp_path: Path, speed: int) -> None:
    """Times count from the first request, whatever the order of lines; equal names are equal
    tokens."""
    file = tmp_path / "trace.jsonl"
    lines = ((9_000, 1), (1_000, 1), (21_000, 2))  # milliseconds, and the name of the only block
    file.write_text(
        "".join(
            json.dumps(
                {"timestamp": at, "input_length": 33, "output_length": 3, "hash_ids": [name]}
            )
            + "\n"
            for at, name in lines
        )
    )
    requests, left_out = trace_requests(read_trace(file), speed=speed, defaults=DEFAULTS)
    assert left_out == 0
    arrivals_ms = [0, 8_000 / speed, 20_000 / speed]
    assert [one.arrival_ms for one in requests] == arrivals_ms
    found = run_roles(requests, PAIR)
    # As counted by hand for one request; the second one has its blocks already.
    assert [one.first_token_ms - one.request.arrival_ms for one in found.run.finished] == [
        *(2 + 41 + 2 + 2 + 10, 10),
        2 + 41 + 2 + 2 + 10,
    ]
    assert [one.request.arrival_ms for one in found.run.finished] == arrivals_ms
    assert received_blocks(found) == [0, 4]


def test_blocks_travel_while_later_ones_are_computed() -> None:
    found = run_roles([request(0.0, 97, 1)], PAIR)
    [finished] = found.run.finished
    # Three chunks of 32 tokens in 41 ms each. A chunk is saved with the next step and can be sent
    # after it; after the last one four blocks remain.
    assert finished.first_token_ms == 2 + 3 * 41 + 2 + 4 + 10


def test_a_slow_link_is_not_used_where_computing_is_faster() -> None:
    slow = RolesSpec(num_prefill=1, num_decode=1, gb_per_s=1e-6, latency_ms=2.0)
    requests = [request(0.0, 33, 3)]
    found = run_roles(requests, slow)
    assert found.num_fetches == 0
    alone = simulate(requests, DEFAULTS, machine(), config())
    assert found.run.finished == alone.finished


def test_short_prompts_without_a_full_block_stay_here() -> None:
    assert run_roles([request(0.0, 9, 3)], PAIR).num_fetches == 0


def test_decoding_is_not_delayed_by_prompts_computed_elsewhere() -> None:
    stream = request(0.0, 1, 60)
    prompts = [request(50.0 + number, 400, 1) for number in range(3)]
    fast = RolesSpec(num_prefill=1, num_decode=1, gb_per_s=100.0, latency_ms=0.0)
    apart = run_roles([stream, *prompts], fast).run
    together = simulate([stream, *prompts], DEFAULTS, machine(), config())

    def last_ms(finished: list) -> float:
        [one] = [one for one in finished if one.request is stream]
        return one.last_token_ms

    # A prompt adds its last tokens here, and nothing else.
    assert last_ms(apart.finished) < 700
    assert last_ms(together.finished) == 1_800


@pytest.mark.parametrize(("num_before", "asked"), [(0, True), (3, False)])
def test_a_prefill_engine_says_what_it_has_to_compute_for_others(
    num_before: int, asked: bool
) -> None:
    """Two decode engines get requests in turn. The second one learns what the first one asked."""
    spec = RolesSpec(num_prefill=1, num_decode=2, gb_per_s=1.0, latency_ms=1.0)
    streams = [request(0.0, 1, 60), request(1.0, 1, 60)]
    others = [
        request(50.0 + number, *lengths)
        for number in range(num_before)
        for lengths in ((400, 1), (1, 1))
    ]
    found = run_roles([*streams, *others, request(500.0, 1, 1), request(501.0, 200, 1)], spec)
    transfer = found.engines[2].stats.transfer
    assert transfer is not None
    assert transfer.transfers_total == 1
    assert dict(transfer.failures_total)["busy"] == (not asked)
    assert bool(received_blocks(found)[2]) == asked


@pytest.mark.parametrize("prefill_by", ["decode-engine", "router"])
@pytest.mark.parametrize("store", [None, STORE], ids=["no store", "store"])
def test_all_requests_end_and_runs_repeat(prefill_by: str, store: StoreSpec | None) -> None:
    requests = drawn_requests(60, per_s=20, seed=3, shared=True)
    spec = RolesSpec(
        num_prefill=2,
        num_decode=2,
        gb_per_s=0.05,
        latency_ms=1.0,
        fetch="always",
        prefill_by=prefill_by,
        min_prefill_tokens=20,
    )
    settings = {"plans_in_flight": 2, "kv_cache_memory": "400KiB"}
    small = None if store is None else replace(store, buffer_bytes=80_000, num_bytes=400_000)
    first, again = (
        run_roles(requests, spec, store=small, routing="warm-cache", settings=settings)
        for _ in range(2)
    )
    assert len(first.run.finished) == 60
    assert {id(one.request) for one in first.run.finished} == {id(one) for one in requests}
    assert first.run == again.run
    assert first.num_fetches >= 10


def test_a_router_has_long_prompts_computed_first() -> None:
    spec = replace(PAIR, prefill_by="router", min_prefill_tokens=33)
    found = run_roles([request(500.0, 33, 3), request(9_000.0, 32, 3)], spec)
    long, short = found.run.finished
    # The prefill engine computes all 33 tokens in two steps, and its answer goes back through the
    # router (2 ms); 2 ms to ask for blocks, 2 on the way and 2 for them; then the last token.
    assert long.first_token_ms == 500 + 41 + 10 + 2 + 2 + 2 + 2 + 10
    assert short.first_token_ms == 9_000 + 41
    assert (found.num_handed_over, found.num_fetches) == (1, 1)
    assert received_blocks(found) == [0, 2]


def test_a_prompt_that_no_prefill_engine_takes_is_computed_where_it_is_answered() -> None:
    spec = replace(PAIR, prefill_by="router", min_prefill_tokens=16)
    requests = [request(0.1 * at, 100, 3) for at in range(8)]
    found = run_roles(requests, spec, settings={"max_queued_requests": 3})
    finished, refused = found.run.finished, found.run.refused
    assert len(finished) + len(refused) == len(requests)
    assert {kind for _, kind in refused} <= {"OverloadedError"}
    assert 0 < found.num_handed_over < len(finished)


def test_engines_of_both_roles_change_sides_with_the_load() -> None:
    spec = RolesSpec(
        num_prefill=1,
        num_decode=1,
        num_movable=2,
        gb_per_s=100.0,
        latency_ms=0.0,
        prefill_by="router",
        min_prefill_tokens=16,
        hold_s=1.0,
    )
    prompts = [request(100.0 * at, 400, 1) for at in range(70)]
    answers = [request(40_000.0 + 40.0 * at, 8, 120) for at in range(160)]
    both: dict[str, Any] = {"routing": "least-tokens", "settings": {"max_num_seqs": 16}}
    found = run_roles([*prompts, *answers], spec, **both)
    fixed = run_roles([*prompts, *answers], replace(spec, num_movable=0), **both)
    assert len(found.run.finished) == len(fixed.run.finished) == 230
    assert found.num_role_changes >= 2
    assert fixed.num_role_changes == 0
    assert found.run.end_ms < fixed.run.end_ms


def test_what_a_prefill_engine_stores_is_read_by_an_engine_that_starts_cold() -> None:
    """Both engines read what is stored; a link brings only what the store lacks."""
    ids = tuple(range(4))
    alike = [replace(request(at, 69, 2), block_ids=ids, block_tokens=16) for at in (0.0, 5e3, 10e3)]
    longer = replace(request(15e3, 133, 2), block_ids=(*ids, 7, 8, 9, 10), block_tokens=16)
    spec = RolesSpec(num_prefill=1, num_decode=2, gb_per_s=1.0, latency_ms=0.0, fetch="always")
    found = run_roles([*alike, longer], spec, store=STORE)
    # The first decode engine gets the first prompt over the link, and has it in the pool later; the
    # second one reads the store. Of the longer prompt it has the first half, and the rest comes
    # over the link from the prefill engine, which puts it.
    assert stored(found, "put_blocks_total") == [8, 0, 0]
    assert stored(found, "fetched_blocks_total") == [0, 0, 4]
    assert received_blocks(found) == [0, 4, 4]
    assert [one.cached_tokens for one in found.run.finished] == [64, 64, 64, 128]
    without = run_roles([*alike, longer], spec)
    assert received_blocks(without) == [0, 4, 8]


def test_a_store_spares_prefill_engines_what_another_one_has_computed() -> None:
    ids = tuple(range(4))
    alike = [replace(request(5e3 * at, 69, 2), block_ids=ids, block_tokens=16) for at in range(2)]
    spec = RolesSpec(
        num_prefill=2,
        num_decode=2,
        gb_per_s=1.0,
        latency_ms=0.0,
        prefill_by="router",
        min_prefill_tokens=16,
    )
    found = run_roles(alike, spec, store=STORE)
    assert stored(found, "put_blocks_total") == [4, 0, 0, 0]
    # The second prefill engine and the second decode engine find all of it in the store.
    assert stored(found, "fetched_blocks_total")[1] == 4
    without = run_roles(alike, spec)
    assert found.computed_tokens < without.computed_tokens


def test_a_comparison_has_as_many_engines_on_both_sides_and_stops_when_asked() -> None:
    requests = drawn_requests(20, per_s=20, seed=4)
    goals = Goals()
    outcome = compare_roles(requests, DEFAULTS, machine(), config(), spec=PAIR, goals=goals)
    assert [one["roles"] for one in outcome["runs"]] == ["2 of both roles", "1 prefill, 1 decode"]
    assert outcome["complete"]
    assert "1 prefill, 1 decode" in roles_text(outcome)
    with_store = compare_roles(
        requests, DEFAULTS, machine(), config(), spec=PAIR, goals=goals, store=STORE
    )
    assert [one["store"] for one in with_store["runs"]] == [False, False, True, True]
    assert with_store["runs"][:2] == [{**one, "store": False} for one in outcome["runs"]]
    assert with_store["runs"][3]["shared_store"]["put_blocks"]
    assert "a store of" in roles_text(with_store)
    stopped = compare_roles(
        requests, DEFAULTS, machine(), config(), spec=PAIR, goals=goals, should_stop=lambda: True
    )
    assert not stopped["complete"]


def test_prefill_engines_may_be_other_machines() -> None:
    points = ((1, 1.0), (257, 26.6))
    fast = MeasuredCost(chunk_ms=points, rows_ms=points, pair_ms=0.0, read_ms=((1, 0.0),))
    other = replace(machine(), name="fast", cost=fast)
    requests = [request(500.0, 33, 3)]
    found = run_roles(requests, PAIR, prefill_machine=other)
    [finished] = found.run.finished
    assert finished.first_token_ms == pytest.approx(500 + 2 + 4.1 + 2 + 2 + 10)
    outcome = compare_roles(
        requests, DEFAULTS, machine(), config(), spec=PAIR, goals=Goals(), prefill_machine=other
    )
    assert outcome["runs"][0]["roles"] == "2 of both roles, as decode"
    assert outcome["settings"]["prefill_machine"] == "fast"
    unlike = replace(other, token_bytes=512)
    with pytest.raises(SettingError, match="a token takes 512 bytes"):
        run_roles(requests, PAIR, prefill_machine=unlike)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_prefill": 0}, "each role needs one"),
        ({"num_decode": 0}, "each role needs one"),
        ({"gb_per_s": 0.0}, "must be above 0"),
        ({"latency_ms": -1.0}, "at least 0"),
        ({"fetch": "never"}, "cost, always"),
        ({"prefill_by": "client"}, "decode-engine, router"),
        ({"num_movable": 1}, "only a router moves"),
        ({"hold_s": 0.0}, "above 0"),
    ],
)
def test_impossible_roles_are_rejected(changes: dict[str, object], says: str) -> None:
    given: dict[str, object] = {
        "num_prefill": 1,
        "num_decode": 1,
        "gb_per_s": 1.0,
        "latency_ms": 1.0,
    }
    with pytest.raises(SettingError, match=says):
        RolesSpec(**{**given, **changes})  # type: ignore[arg-type]


def test_impossible_fleets_are_rejected() -> None:
    with pytest.raises(SettingError, match="round-robin, least-tokens, warm-cache"):
        Fleet(num_engines=2, routing="turn")
    with pytest.raises(SettingError, match="2 of them with roles"):
        Fleet(num_engines=3, roles=PAIR)
