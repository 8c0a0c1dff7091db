"""The benchmarks of prefill and decode engines: prompts that fit the time, simulated gaps, and what
the page says of the results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.disaggregation import MIN_PROMPT, fitting, total_s
from bench.disaggregation_map import ROOM, TokenGaps, _beside
from bench.measured.pair_table import pair_part
from quire.sim.fleet import Fleet, simulate_fleet
from tests.unit.sim.made import DEFAULTS, config, machine, request


@pytest.mark.parametrize(
    ("alone_s", "wanted"),
    [
        (0.05, (8192, 4)),  # all of it
        (0.7, (8192, 3)),  # fewer prompts come first
        (2.0, (4096, 3)),
        (100.0, (MIN_PROMPT, 1)),  # the shortest, whatever it takes
    ],
)
def test_prompts_are_fewer_and_shorter_where_they_take_long(
    alone_s: float, wanted: tuple[int, int]
) -> None:
    found = fitting(alone_s, 300.0, 8192, 4)
    assert found == wanted
    if found[0] > MIN_PROMPT:
        assert total_s(alone_s, *found) <= 300.0


def test_a_prompt_of_any_length_is_one_that_was_asked_for() -> None:
    assert fitting(1000.0, 1.0, 256, 1) == (256, 1)
    assert fitting(0.0, 1.0, 100, 3) == (100, 3)
    assert fitting(3.0, 300.0, 8192, 4, min_prompt=8192) == (8192, 1)


def test_gaps_are_those_between_the_tokens_of_a_request() -> None:
    """A step takes 10 ms, and 1 ms more for each token after the first."""
    requests = [request(0.0, 1, 30), request(105.0, 21, 1)]
    gaps = TokenGaps(num_answers=2)
    simulate_fleet(requests, DEFAULTS, machine(), config(), Fleet(num_engines=1), on_outputs=gaps)
    assert gaps.has_all()
    assert len(gaps.ended_ms) == 2
    assert gaps.percentile_ms(50) == 10.0
    assert gaps.percentile_ms(100) == 31.0  # beside the prompt's 21 tokens
    assert gaps.percentile_ms(100, until_ms=90.0) == 10.0
    assert gaps.percentile_ms(100, since_ms=1e6) == 0.0


def test_a_point_of_engines_is_simulated_as_it_was_measured() -> None:
    point = {"prompt_tokens": 64, "gb_per_s": 1.0, "two engines": {"prompts": 1}}
    settings = config(max_model_len=64 + ROOM, kv_cache_memory="64MiB", max_num_seqs=18)
    made = replace(machine(), max_model_len=64 + ROOM)
    found = _beside(made, settings, point, "two engines")
    assert found["tpot_p50_ms"] == 25.0  # 16 streams
    assert found["ttft_s"] == pytest.approx(0.16, abs=0.03)  # two chunks, and steps beside streams


def test_the_measured_part_has_what_was_measured_and_no_more() -> None:
    card = {"cpu": "a processor", "cores": 2, "memory_gb": 8.0, "load_at_start": 0.5}
    side = {"real": {"tpot_p50_ms": 20.0, "tpot_p99_ms": 90.0, "ttft_s": 1.5}, "prompts": 3}
    point = {
        "prompt_tokens": 1024,
        "one engine": side,
        "two engines": side,
        "real_one_over_two": 1.0,
    }
    of_map = {"machine": card, "confirmed": [point], "confirmed_shape": "a-shape"}
    part = pair_part(of_map, None)
    assert "| 1,024 tokens | 90 ms | 90 ms | 1.00 | 1.50 s | 1.50 s |" in part
    assert "was not run" in part
    assert "In brackets" not in part
    simulated = {"tpot_p50_ms": 20.0, "tpot_p99_ms": 45.0, "ttft_s": 3.0}
    both = {**side, "simulated": simulated}
    point = {**point, "one engine": both, "two engines": both, "simulated_one_over_two": 1.0}
    part = pair_part({**of_map, "confirmed": [point]}, None)
    assert "90 ms (45 ms)" in part
    assert "In brackets" in part
    assert "0.50 to 0.50 of the measured ones, simulated first tokens 2.00 to 2.00" in " ".join(
        part.split()
    )
    assert pair_part(None, None) == "Not yet measured."
    links = {"block_bytes": 1 << 20, "memcpy_gb_per_s": 9.0, "load_at_start": 9.0}
    links |= {f"shm{name}": 0.5 for name in ("_gb_per_s", "_first_gb_per_s", "_of_memcpy")}
    part = pair_part(None, {"machine": card, "links": links})
    assert "| shm | 0.5 | 0.5 | 0.50 |" in part
    assert "tcp" not in part
    assert "other work ran" in part
