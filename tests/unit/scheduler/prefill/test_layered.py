"""Prompt chunks computed some layers per step: when, how large, and what ends them.

The property: with random pools, arrivals, aborts, failures and preemptions, each request gets the
tokens it gets alone, and no position is visible between two layers.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest

from quire.base.records import FinishReason, PartLayers
from quire.scheduler import step_budget
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.plan_builder import PlanBuilder, Step
from quire.scheduler.policy.policies import POLICY_NAMES, make_policy
from quire.scheduler.prefill import layered
from quire.scheduler.prefill.prompt_shares import LONG_SHARE
from quire.scheduler.sequence import NO_SLOT
from tests.drawn import examples
from tests.unit.scheduler.fake_worker import VOCAB, make_request
from tests.unit.scheduler.harness import Harness, Setup

# Reading is expensive, which makes small chunks inefficient.
COST = LinearCost(fixed_ms=10.0, token_ms=0.1, position_ms=0.0, read_ms=0.2)
NUM_LAYERS = 8
ROOMY: dict[str, Any] = {
    "num_blocks": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 1024,
    "prefix_caching": False,
    "long_prompt_tokens": 100,
    "part_layers": NUM_LAYERS,
}


def harness_of(**settings: Any) -> Harness:
    policy = partial(make_policy, settings.pop("policy", "fcfs"))
    harness = Harness(Setup(policy=policy, **{**ROOMY, **settings}))
    speed = harness.scheduler.speed
    speed._linear = COST  # as if learned; times of the fake steps carry no information
    speed.note = lambda *_: None  # type: ignore[method-assign]
    return harness


def decoding(harness: Harness, number: int) -> None:
    """Return `number` requests that decode: 10 + number ms a step, plus some for reading."""
    for place in range(number):
        harness.add(make_request(f"d{place}", [1, 2], max_tokens=400))
    while any(len(harness.tokens[f"d{place}"]) < 2 for place in range(number)):
        harness.step()


def until_layers(harness: Harness) -> PartLayers:
    """Run steps up to the first that computes layers."""
    for _ in range(100):
        harness.step()
        if (layers := harness.plans[-1].layers) is not None:
            return layers
    raise AssertionError("no layers in 100 steps")


def slot_of(harness: Harness, name: str) -> int:
    return harness.scheduler._requests.sequences[name].slot


def test_deep_chunks_are_layered_and_shallow_ones_are_not() -> None:
    harness = harness_of()
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    while not harness.tokens["p"]:
        harness.step()
    found = [(plan, plan.layers) for plan in harness.plans if plan.layers is not None]
    assert found, "a chunk of some tokens reads everything before it"
    assert min(layers.start for _, layers in found) >= 16
    for plan, layers in found:
        end = layers.start + layers.count
        assert layers.count % step_budget.TILE_TOKENS == 0 or end == 499, "the last token samples"
        layers_ms = layers.share * (COST.fixed_ms + COST.row_ms(layers.start, layers.count))
        rows_ms = harness.scheduler.speed.step_ms(len(plan.slots), float(plan.starts.sum()))
        assert layers_ms <= LONG_SHARE * rows_ms
    tokens = sum(layers.count * layers.is_last for _, layers in found)
    assert tokens > 300
    assert harness.scheduler.stats().layered_tokens_total == tokens
    harness.drain()
    harness.check_end()


def test_layers_are_consecutive_and_a_chunk_ends_with_the_last() -> None:
    harness = harness_of()
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    first = until_layers(harness)
    assert first.first_layer == 0
    at, part = first.end_layer, (first.start, first.count)
    while at < NUM_LAYERS:
        assert harness.scheduler._batch.computed[first.slot] == first.start
        harness.step()
        layers = harness.plans[-1].layers
        assert layers is not None
        assert (layers.start, layers.count) == part
        assert layers.first_layer == at
        at = layers.end_layer
    assert harness.scheduler._batch.computed[first.slot] == first.start + first.count


def test_without_decoding_rows_nothing_is_layered() -> None:
    harness = harness_of()
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    harness.drain()
    assert all(plan.layers is None for plan in harness.plans)


@pytest.mark.parametrize("off", [{"part_layers": 0}, {"long_prompt_tokens": 0}])
def test_without_a_bound_or_without_support_nothing_is_layered(
    off: dict[str, int],
) -> None:
    harness = harness_of(**off)
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    while not harness.tokens["p"]:
        harness.step()
    assert all(plan.layers is None for plan in harness.plans)


def test_when_decoding_ends_the_rest_of_a_chunk_is_one_step() -> None:
    harness = harness_of()
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    first = until_layers(harness)
    for place in range(6):
        harness.abort(f"d{place}")
    harness.step()
    layers = harness.plans[-1].layers
    assert layers is not None
    assert (layers.first_layer, layers.end_layer) == (first.end_layer, NUM_LAYERS)
    assert len(harness.plans[-1].slots) == 0
    harness.drain()
    harness.check_end()


def test_an_abort_between_layers_ends_the_chunk_and_frees_its_blocks() -> None:
    harness = harness_of()
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    harness.add(make_request("q", [4] * 500, max_tokens=4))
    first = until_layers(harness)
    name = next(name for name in ("p", "q") if slot_of(harness, name) == first.slot)
    harness.abort(name)
    harness.drain()
    harness.check_end()
    assert harness.ends[name].finish_reason is FinishReason.ABORT


def test_a_failed_chunk_ends_only_its_request() -> None:
    harness = harness_of()
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    until_layers(harness)
    harness.schedule(fail_rows=[6])  # after six rows, so it is the chunk
    assert harness.plans[-1].layers is not None
    harness.update()
    assert harness.ends["p"].finish_reason is FinishReason.ERROR
    assert harness.ends["p"].error == "the part failed as planned"
    assert list(harness.ends) == ["p"]
    harness.drain()
    harness.check_end()


def test_one_chunk_is_in_progress_at_a_time() -> None:
    harness = harness_of()
    decoding(harness, 5)
    for name in ("p", "q"):
        harness.add(make_request(name, [3 + len(name)] * 400, max_tokens=4))
    harness.drain()
    harness.check_end()  # the worker detects mixed layers of two chunks
    assert any(plan.layers for plan in harness.plans)


def test_layers_keep_a_target_that_few_tokens_would_exceed() -> None:
    """Sixteen tokens are always granted to a prompt, which takes too long here."""
    harness = harness_of(tpot_target_ms=45.0, long_prompt_tokens=0)
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 150, max_tokens=4))
    speed = harness.scheduler.speed
    while not harness.tokens["p"]:
        harness.step()
        plan = harness.plans[-1]
        if plan.layers is not None:
            rows_ms = speed.step_ms(len(plan.slots), float(plan.starts.sum()))
            layers_ms = COST.fixed_ms + COST.row_ms(plan.layers.start, plan.layers.count)
            assert rows_ms + plan.layers.share * layers_ms <= 45.0
    assert any(plan.layers is not None for plan in harness.plans)


def test_a_scored_prompt_and_its_last_token_are_ordinary_rows() -> None:
    harness = harness_of()
    decoding(harness, 6)
    harness.add(make_request("p", [3] * 500, max_tokens=4, prompt_logprobs=0))
    while not harness.tokens["p"]:
        harness.step()
    assert all(plan.layers is None for plan in harness.plans)


def test_a_request_ranked_first_does_not_wait_for_a_later_ones_chunk() -> None:
    harness = harness_of(policy="priority", num_blocks=4096)
    decoding(harness, 5)
    harness.add(make_request("later", [3] * 700, max_tokens=4, priority=5))
    slot = until_layers(harness).slot
    assert slot == slot_of(harness, "later")
    harness.add(make_request("first", [4] * 600, max_tokens=4, priority=-5))
    while until_layers(harness).slot != slot_of(harness, "first"):
        assert not harness.tokens["first"]
    while not harness.tokens["first"]:
        harness.step()
    begun = len(harness.plans)
    found = [plan.layers for plan in harness.plans if plan.layers is not None]
    assert sum(one.count * one.is_last for one in found if one.slot != slot) > 300
    harness.drain()
    harness.check_end()
    later = [plan.layers for plan in harness.plans[begun:] if plan.layers is not None]
    assert later[0].slot == slot
    assert later[0].first_layer == 0, "its chunk starts again"


def test_a_chunk_that_displaced_another_is_not_displaced() -> None:
    """So a policy with an order that changes every step cannot prevent all progress."""
    harness = harness_of(policy="priority", num_blocks=4096)
    decoding(harness, 5)
    ranks = {"p": 1, "q": 2}
    policy = harness.scheduler._policy
    own = policy.rank
    policy.rank = lambda t: (ranks.get(t.request.request_id, 0), *own(t))  # type: ignore[method-assign]
    harness.add(make_request("p", [3] * 500, max_tokens=4))
    harness.add(make_request("q", [4] * 500, max_tokens=4))
    computed = 0
    for _ in range(60):
        ranks["p"], ranks["q"] = ranks["q"], ranks["p"]
        harness.step()
        layers = harness.plans[-1].layers
        computed += layers.count if layers is not None and layers.is_last else 0
    assert computed > 300
    harness.drain()
    harness.check_end()


def test_a_chunk_continued_by_ordinary_rows_blocks_no_request() -> None:
    harness = harness_of(num_blocks=4096)
    decoding(harness, 5)
    harness.add(make_request("p", [3] * 200, max_tokens=300))
    until_layers(harness)
    scheduler, p = harness.scheduler, harness.scheduler._requests.sequences["p"]
    # Like a step in which no other request can continue: strictly by key, p's prompt to its end.
    only_p = [slot for slot in scheduler._batch.active.tolist() if slot != p.slot]
    while harness.scheduler._batch.scheduled[p.slot] < 200:
        builder = PlanBuilder(scheduler._requests.in_flight.step + 1)
        step = Step(builder=builder, budget=scheduler._budget(), now_ms=0.0)
        scheduler._advance.advance(step, only_p, by_key=True)
        plan = scheduler._requests.in_flight.send(builder.finish([]), harness.now_ms)
        harness.check_plan(plan)
        harness.out.append((plan, harness.worker.run(plan), ()))
        harness.update()
    harness.add(make_request("q", [4] * 500, max_tokens=4))
    assert until_layers(harness).slot == slot_of(harness, "q")
    harness.drain()
    harness.check_end()


def test_layers_count_as_progress_for_paused_rows() -> None:
    """Otherwise paused rows resume in the same step, which exceeds the time promised to each."""
    harness = harness_of(policy="fair", num_blocks=4096, tpot_target_ms=70.0)
    for place in range(7):
        harness.add(make_request(f"d{place}", [1, 2], max_tokens=400, tenant="flood"))
    while any(len(harness.tokens[f"d{place}"]) < 100 for place in range(7)):
        harness.step()
    harness.add(make_request("light", [3] * 250, max_tokens=4, tenant="light"))
    until_layers(harness)
    while not harness.tokens["light"]:
        plan = harness.plans[-1]
        assert plan.layers is None or len(plan.slots) == 1, "one of seven continues"
        harness.step()
    harness.drain()
    harness.check_end()


@pytest.fixture
def tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable layers for the short prompts of drawn cases."""
    monkeypatch.setattr(layered, "TILE_TOKENS", 1)
    monkeypatch.setattr(layered, "WORTH", 0.0)
    monkeypatch.setattr(step_budget, "MIN_PROMPT_TOKENS", 2)


@pytest.mark.usefixtures("tiny_parts")
def test_drawn_cases_give_each_request_the_tokens_it_gets_alone() -> None:
    met, cases = Counter[str](), examples(180)
    for seed in range(cases):
        met.update(run_case(seed))
    shares = {name: number / cases for name, number in met.items()}
    print({name: f"{share:.0%}" for name, share in shares.items()})
    assert shares["layers"] >= 0.6
    assert shares["left between layers"] >= 0.2
    assert shares["failed"] >= 0.1
    assert shares["two out"] >= 0.3


def run_case(seed: int) -> set[str]:
    """Run operations in a small pool, then everything to the end; return the coverage."""
    random, target_ms = Random(seed), Random(f"target {seed}").choice([0.0, 0.0, 30.0])
    setup = Setup(
        num_blocks=random.choice([20, 28, 40]),
        max_num_seqs=random.choice([3, 6]),
        max_num_batched_tokens=random.choice([6, 8, 32]),
        plans_in_flight=random.choice([1, 1, 2, 3]),
        prefix_caching=random.random() < 0.5,
        long_prompt_tokens=8,
        part_layers=random.choice([3, 6, 12]),
        layered_part_tokens=random.choice([3, 9, 50]),
        run_late=random.random() < 0.5,
        policy=partial(make_policy, random.choice(POLICY_NAMES)),
        tier_places=random.choice([0, 0, 12]),
        window=random.choice([0, 0, 0, 7]),
        tpot_target_ms=target_ms,
    )
    harness, met = Harness(setup), set[str]()
    harness.scheduler.speed._linear = LinearCost(
        fixed_ms=2.0, token_ms=1.0, position_ms=0.01, read_ms=0.5
    )
    harness.scheduler.speed.note = lambda *_: None  # type: ignore[method-assign]
    for number in range(60):
        kind, before = random.randrange(100), under_way(harness)
        if kind < 20:
            length = random.choice([2, 3, random.randrange(8, 50)])
            prompt = [random.randrange(VOCAB) for _ in range(length)]
            name, priority = f"r{number}", random.choice([0, 0, -2, 5])
            harness.add(
                make_request(name, prompt, max_tokens=random.randrange(1, 14), priority=priority)
            )
        elif kind < 25 and harness.requests:
            harness.abort(before or random.choice(sorted(harness.requests)))
        elif kind < 31 and harness.plans:
            layers_row = len(harness.plans[-1].slots)
            harness.schedule(fail_rows=[layers_row, random.randrange(20)])
        elif kind < 35 and harness.requests:
            name = random.choice(sorted(harness.requests))
            harness.scheduler.hold(name, is_held=random.random() < 0.5)
            harness.check()
        elif kind < 65:
            harness.schedule()
        else:
            harness.update()
            harness.arrive(random)
        live = harness.scheduler._requests.sequences
        if before is not None and (before not in live or live[before].slot == NO_SLOT):
            met.add("left between layers")
    for name in harness.requests:
        harness.scheduler.hold(name, is_held=False)
    harness.drain()
    harness.check_end()
    if any(plan.layers and plan.layers.first_layer for plan in harness.plans):
        met.add("layers")
    if any(end.error == "the part failed as planned" for end in harness.ends.values()):
        met.add("failed")
    if harness.max_in_flight > 1 and any(plan.layers for plan in harness.plans):
        met.add("two out")
    return met


def under_way(harness: Harness) -> str | None:
    """Return the request with a chunk between two layers."""
    holder = harness.scheduler._layered._holder
    if holder is None or holder.part is None or not holder.part.layers_done:
        return None
    return holder.request.request_id
