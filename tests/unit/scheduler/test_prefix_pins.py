"""Marked prefixes: pinned for their lifetime, bounded by tenant, in the way of no request."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from quire.base.rare_records import CachePin
from quire.base.records import FinishReason
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

SIZE = 4


def pinning(share: float = 0.5, **settings: Any) -> Harness:
    return Harness(Setup(pin_share=share, block_size=SIZE, **settings))


def run(harness: Harness, name: str, prompt: Any, *marks: tuple[int, float], **more: Any) -> Any:
    """Run a request to its end; return its last output. marks: (tokens, lifetime in ms)."""
    pins = tuple(CachePin(num_tokens=count, lifetime_ms=ms) for count, ms in marks)
    harness.add(
        make_request(name, prompt, max_tokens=2, explain_cache=bool(pins), cache_pins=pins, **more)
    )
    harness.drain()
    return harness.ends[name]


def fill(harness: Harness, name: str, first: int, count: int) -> None:
    """Run `count` requests that share nothing, so that all other blocks are evicted."""
    for at in range(count):
        run(harness, f"{name}{at}", range(first + 100 * at, first + 100 * at + 24))


def cached(harness: Harness, name: str, prompt: Any) -> int:
    return int(run(harness, name, prompt).cached_tokens)


def test_a_pinned_prefix_survives_what_evicts_all_others() -> None:
    harness = pinning(num_blocks=20)
    run(harness, "a", range(16), (12, 1e6))
    run(harness, "b", range(50, 66))
    fill(harness, "x", 1000, 12)
    assert cached(harness, "c", range(16)) == 12
    assert cached(harness, "d", range(50, 66)) == 0
    assert harness.scheduler.stats().pinned_blocks == 3
    harness.check_end()


def test_without_a_share_nothing_is_pinned() -> None:
    harness = pinning(0.0, num_blocks=20)
    use = run(harness, "a", range(16), (12, 1e6)).cache_use
    assert use.pinned_tokens == ()
    fill(harness, "x", 1000, 12)
    assert cached(harness, "b", range(16)) == 0
    assert harness.scheduler.stats().pinned_blocks == 0


def test_usage_has_what_is_computed_by_lifetime_once() -> None:
    harness = pinning(num_blocks=40)
    marks = ((8, 3600.0), (17, 300.0))
    use = run(harness, "a", range(20), *marks).cache_use
    assert use.pinned_tokens == ((3600.0, 8), (300.0, 8))
    use = run(harness, "b", range(20), *marks).cache_use
    assert (use.pool_tokens, use.pinned_tokens) == (20, ())
    use = run(harness, "c", [*range(10), *range(70, 80)], *marks).cache_use
    assert (use.pool_tokens, use.pinned_tokens) == (8, ((300.0, 8),))
    assert harness.scheduler.stats().pinned_tokens_total == 24


def test_a_pin_ends_after_its_lifetime_which_a_use_renews() -> None:
    harness = pinning(num_blocks=20)
    run(harness, "a", range(16), (12, 500.0))
    harness.now_ms += 400.0
    run(harness, "b", range(16), (12, 500.0))
    harness.now_ms += 400.0
    fill(harness, "x", 1000, 3)
    assert harness.scheduler.stats().pinned_blocks == 3
    harness.now_ms += 500.0
    fill(harness, "y", 5000, 12)
    stats = harness.scheduler.stats()
    assert (stats.pinned_blocks, stats.expired_pins_total) == (0, 3)
    assert not harness.scheduler._slot_allocator.pins.is_active


def test_beyond_its_share_a_tenant_loses_its_oldest_pins_from_their_ends() -> None:
    harness = pinning(0.25, num_blocks=32)  # 8 blocks
    run(harness, "a", range(20), (20, 1e6))
    run(harness, "b", range(100, 120), (20, 1e6))
    stats = harness.scheduler.stats()
    assert (stats.pinned_blocks, stats.dropped_pins_total) == (8, 2)
    fill(harness, "x", 1000, 20)
    assert cached(harness, "c", range(20)) == 12
    assert cached(harness, "d", range(100, 120)) == 20


def test_a_prefix_beyond_the_share_is_pinned_as_far_as_it_reaches() -> None:
    harness = pinning(0.25, num_blocks=16)  # 4 blocks
    use = run(harness, "a", range(24), (24, 1e6)).cache_use
    assert use.pinned_tokens == ((1e6, 16),)
    assert harness.scheduler.stats().pinned_blocks == 4


def test_pins_of_one_tenant_do_not_drop_those_of_another() -> None:
    harness = pinning(0.25, num_blocks=32)
    run(harness, "a", range(20), (20, 1e6), tenant="one")
    run(harness, "b", range(100, 132), (32, 1e6), tenant="two")
    assert harness.scheduler.stats().pinned_blocks == 13
    run(harness, "c", range(200, 232), (32, 1e6), tenant="two")
    assert harness.scheduler.stats().pinned_blocks == 13


def test_all_tenants_together_pin_half_of_the_cache() -> None:
    harness = pinning(0.25, num_blocks=32)
    for at in range(4):
        run(harness, f"a{at}", range(100 * at, 100 * at + 28), (28, 1e6), tenant=str(at))
    assert harness.scheduler.stats().pinned_blocks == 16


def test_a_request_takes_pinned_blocks_where_there_are_no_others() -> None:
    harness = pinning(0.5, num_blocks=16)
    run(harness, "a", range(32), (32, 1e6))
    assert harness.scheduler.stats().pinned_blocks == 8
    end = run(harness, "b", range(100, 160))  # 15 blocks and one for its answer
    assert end.finish_reason is FinishReason.LENGTH
    assert end.num_preemptions == 0
    stats = harness.scheduler.stats()
    assert stats.pinned_blocks == 0
    run(harness, "c", range(8), (8, 1e6))
    assert harness.scheduler.stats().evicted_pins_total == 8
    harness.check_end()


def test_a_flush_forgets_pinned_prefixes() -> None:
    harness = pinning(num_blocks=20)
    run(harness, "a", range(16), (12, 1e6))
    harness.scheduler.flush_cache()
    assert cached(harness, "b", range(16)) == 0
    run(harness, "c", range(16), (12, 1e6))
    assert harness.scheduler.stats().pinned_blocks == 3


@pytest.mark.parametrize("seed", range(6))
def test_random_marks_break_nothing_and_change_no_answer(seed: int) -> None:
    random = Random(seed)
    harness = pinning(0.3, num_blocks=24, max_num_seqs=3, plans_in_flight=random.choice((1, 2)))
    live: list[str] = []
    for number in range(60):
        start = 100 * random.randrange(4)
        prompt = range(start, start + random.randrange(1, 30))
        marks = sorted(random.sample(range(1, 40), random.randrange(3)))
        pins = tuple(
            CachePin(num_tokens=count, lifetime_ms=random.choice((5.0, 50.0, 1e6)))
            for count in marks
        )
        name = f"r{number}"
        harness.add(
            make_request(
                name,
                prompt,
                max_tokens=random.randrange(1, 8),
                explain_cache=bool(pins),
                cache_pins=pins,
                tenant=random.choice(("", "t")),
            )
        )
        live.append(name)
        for _ in range(random.randrange(6)):
            harness.step()
        if random.random() < 0.2:
            harness.abort(random.choice(live))
        if random.random() < 0.05:
            harness.scheduler.flush_cache()
        assert harness.scheduler.stats().pinned_blocks <= 12
    harness.drain()
    for name, request in harness.requests.items():
        if harness.ends[name].finish_reason is not FinishReason.ABORT:
            assert harness.tokens[name] == harness.alone(request)
