"""Simulated prefill and decode engines: times counted by hand, choices, and reproducibility."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.base.errors import SettingError
from quire.obs.timing import Goals
from quire.sim.cost import MeasuredCost
from quire.sim.roles import RolesSpec, compare_roles, roles_text, simulate_roles
from quire.sim.run import simulate
from tests.unit.sim.made import DEFAULTS, config, drawn_requests, machine, request

# A block of 16 tokens takes 1 ms.
PAIR = RolesSpec(num_prefill=1, num_decode=1, gb_per_s=0.016384, latency_ms=2.0, fetch="always")


def test_a_prompt_is_computed_elsewhere_and_its_last_token_here() -> None:
    found = simulate_roles([request(500.0, 33, 3)], DEFAULTS, machine(), config(), PAIR)
    [finished] = found.run.finished
    # 2 ms to ask, 51 ms to compute 32 + 1 tokens, 2 ms for the blocks of the last chunk and 2 ms
    # on the way; then one token of the prompt, and two more.
    assert finished.first_token_ms == 500 + 2 + 51 + 2 + 2 + 10
    assert finished.last_token_ms == finished.first_token_ms + 20
    assert (found.num_fetches, found.num_local) == (1, 0)


def test_blocks_travel_while_later_ones_are_computed() -> None:
    found = simulate_roles([request(0.0, 97, 1)], DEFAULTS, machine(), config(), PAIR)
    [finished] = found.run.finished
    # Three chunks of 32 tokens in 41 ms each and one token; six blocks, of which two remain.
    assert finished.first_token_ms == 2 + 3 * 41 + 10 + 2 + 2 + 10


def test_a_slow_link_is_not_used_where_computing_is_faster() -> None:
    slow = RolesSpec(num_prefill=1, num_decode=1, gb_per_s=1e-6, latency_ms=2.0)
    requests = [request(0.0, 33, 3)]
    found = simulate_roles(requests, DEFAULTS, machine(), config(), slow)
    assert (found.num_fetches, found.num_local) == (0, 1)
    alone = simulate(requests, DEFAULTS, machine(), config())
    assert found.run.finished == alone.finished


def test_short_prompts_without_a_full_block_stay_here() -> None:
    found = simulate_roles([request(0.0, 9, 3)], DEFAULTS, machine(), config(), PAIR)
    assert (found.num_fetches, found.num_local) == (0, 1)


def test_decoding_is_not_delayed_by_prompts_computed_elsewhere() -> None:
    stream = request(0.0, 1, 60)
    prompts = [request(50.0 + number, 400, 1) for number in range(3)]
    fast = RolesSpec(num_prefill=1, num_decode=1, gb_per_s=100.0, latency_ms=0.0)
    apart = simulate_roles([stream, *prompts], DEFAULTS, machine(), config(), fast).run
    together = simulate([stream, *prompts], DEFAULTS, machine(), config())

    def seconds(finished: list) -> float:
        [one] = [one for one in finished if one.request is stream]
        return one.last_token_ms

    # A prompt adds its last tokens here, and nothing else.
    assert seconds(apart.finished) < 700
    assert seconds(together.finished) == 1_800


@pytest.mark.parametrize("roles", [(1, 2), (2, 1)])
def test_all_requests_end_and_runs_repeat(roles: tuple[int, int]) -> None:
    requests = drawn_requests(60, per_s=20, seed=3, shared=True)
    spec = RolesSpec(
        num_prefill=roles[0], num_decode=roles[1], gb_per_s=0.05, latency_ms=1.0, fetch="always"
    )
    settings = config(plans_in_flight=2, kv_cache_memory="400KiB")
    first, again = (simulate_roles(requests, DEFAULTS, machine(), settings, spec) for _ in range(2))
    assert len(first.run.finished) == 60
    assert first == again
    assert first.num_fetches > 20


def test_a_comparison_has_as_many_engines_on_both_sides_and_stops_when_asked() -> None:
    requests = drawn_requests(20, per_s=20, seed=4)
    goals = Goals()
    outcome = compare_roles(requests, DEFAULTS, machine(), config(), spec=PAIR, goals=goals)
    assert [one["roles"] for one in outcome["runs"]] == ["2 of both roles", "1 prefill, 1 decode"]
    assert outcome["complete"]
    assert "1 prefill, 1 decode" in roles_text(outcome)
    stopped = compare_roles(
        requests, DEFAULTS, machine(), config(), spec=PAIR, goals=goals, should_stop=lambda: True
    )
    assert not stopped["complete"]


def test_prefill_engines_may_be_other_machines() -> None:
    points = ((1, 1.0), (257, 26.6))
    fast = MeasuredCost(chunk_ms=points, rows_ms=points, pair_ms=0.0, read_ms=((1, 0.0),))
    other = replace(machine(), name="fast", cost=fast)
    requests = [request(500.0, 33, 3)]
    found = simulate_roles(requests, DEFAULTS, machine(), config(), PAIR, prefill_machine=other)
    [finished] = found.run.finished
    assert finished.first_token_ms == pytest.approx(500 + 2 + 5.1 + 2 + 2 + 10)
    outcome = compare_roles(
        requests, DEFAULTS, machine(), config(), spec=PAIR, goals=Goals(), prefill_machine=other
    )
    assert outcome["runs"][0]["roles"] == "2 of both roles, as decode"
    assert outcome["settings"]["prefill_machine"] == "fast"
    unlike = replace(other, token_bytes=512)
    with pytest.raises(SettingError, match="a token takes 512 bytes"):
        simulate_roles(requests, DEFAULTS, machine(), config(), PAIR, prefill_machine=unlike)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_prefill": 0}, "each role needs one"),
        ({"num_decode": 0}, "each role needs one"),
        ({"gb_per_s": 0.0}, "must be above 0"),
        ({"latency_ms": -1.0}, "at least 0"),
        ({"fetch": "never"}, "cost, always"),
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
