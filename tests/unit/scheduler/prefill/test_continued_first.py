"""Streams that continue together: which steps are their own, and that no answer depends on it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from quire.base.errors import DeadlineMissed
from quire.base.records import Request
from quire.scheduler.policy.priority import PriorityFirst
from quire.scheduler.prefill.continued_first import (
    MAX_GAP_MS,
    MAX_GATHER_MS,
    MAX_IN_A_ROW,
    MAX_STEPS,
    MIN_TOGETHER,
    REST_STEPS,
    SHARE_TO_EARN,
    STEPS_TO_EARN,
    ContinuedFirst,
)
from quire.scheduler.slo.ttft_prediction import MIN_STEPS
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

NUM_OLD = 4


class Continuing(Harness):
    """A harness with requests that may have known tokens of their answers."""

    def alone(self, request: Request) -> list[int]:
        return super().alone(request)[len(request.output_ids) :]

    def continued(self, name: str, prompt: list[int], known: int, **options: int) -> Request:
        """Return a request that continues its answer after so many tokens."""
        request = make_request(name, prompt, **{"max_tokens": known + 6, **options})  # type: ignore[arg-type]
        ids = super().alone(request)[:known]
        return replace(request, output_ids=np.array(ids, np.int32))

    @property
    def last_rows(self) -> int:
        return len(self.plans[-1].slots)


def started(**changes: object) -> Continuing:
    """Return a harness with some requests that generate."""
    options = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 96,
        "num_blocks": 600,
        "prefix_caching": False,
    }
    harness = Continuing(Setup(**{**options, **changes}))  # type: ignore[arg-type]
    for number in range(NUM_OLD):
        harness.add(make_request(f"old{number}", [number, 2, 3], max_tokens=40))
    harness.step()
    harness.step()
    return harness


def add(harness: Continuing, count: int, known: int = 5, first: int = 0) -> None:
    for number in range(first, first + count):
        harness.add(harness.continued(f"new{number}", [7, number % 50, 9], known))


def test_the_others_stand_back_for_one_step_of_all_that_continue() -> None:
    harness = started()
    add(harness, MIN_TOGETHER)
    harness.step()
    assert harness.last_rows == MIN_TOGETHER
    assert all(len(harness.tokens[f"new{number}"]) == 1 for number in range(MIN_TOGETHER))
    harness.step()
    assert harness.last_rows == MIN_TOGETHER + NUM_OLD
    harness.drain()
    harness.check_end()


def test_few_that_continue_run_beside_the_others() -> None:
    harness = started()
    add(harness, MIN_TOGETHER - 1)
    harness.step()
    assert harness.last_rows == MIN_TOGETHER - 1 + NUM_OLD
    harness.drain()
    harness.check_end()


def test_requests_that_are_refused_do_not_count() -> None:
    harness = started()
    harness.scheduler.speed.num_steps = MIN_STEPS  # so that first tokens are predicted
    for number in range(MIN_TOGETHER - 1):
        request = harness.continued(f"late{number}", [7, number, 9], 5)
        with pytest.raises(DeadlineMissed):
            harness.scheduler.add(replace(request, ttft_slo_ms=1e-3))
    add(harness, 1)
    harness.step()
    assert harness.last_rows == 1 + NUM_OLD
    harness.drain()
    harness.check_end()


def test_prompts_that_are_new_change_nothing() -> None:
    harness = started()
    for number in range(2 * MIN_TOGETHER):
        harness.add(make_request(f"new{number}", [7, number, 9], max_tokens=6))
    harness.step()
    assert harness.last_rows == 2 * MIN_TOGETHER + NUM_OLD
    harness.drain()
    harness.check_end()


def test_the_others_have_every_fourth_step_however_many_continue() -> None:
    harness = started(max_num_seqs=128)
    has_old = []
    for number in range(12):
        add(harness, MIN_TOGETHER, first=number * MIN_TOGETHER)
        before = len(harness.tokens["old0"])
        harness.step()
        has_old.append(len(harness.tokens["old0"]) > before)
    assert has_old == 3 * ([False] * MAX_IN_A_ROW + [True])
    harness.drain()
    harness.check_end()


def test_the_others_rarely_stand_back_where_streams_continue_all_the_time() -> None:
    harness = started(max_num_seqs=128, max_model_len=400)
    harness.add(make_request("long", [1, 2], max_tokens=300))
    harness.step()
    num_steps = 2 * MAX_STEPS
    for number in range(num_steps):
        add(harness, MIN_TOGETHER, first=number * MIN_TOGETHER)
        harness.step()
    num_with = len(harness.tokens["long"]) - 1
    assert num_steps - num_with == MAX_STEPS + (num_steps + 3) // STEPS_TO_EARN
    harness.drain()
    harness.check_end()


def test_requests_stand_back_for_streams_of_their_own_tenant() -> None:
    harness = started()
    harness.add(make_request("other", [4, 2], max_tokens=20, tenant="b"))
    harness.step()
    add(harness, MIN_TOGETHER)
    harness.step()
    assert harness.last_rows == MIN_TOGETHER + 1
    assert len(harness.tokens["other"]) == 2
    harness.drain()
    harness.check_end()


def test_nothing_stands_back_for_requests_that_cannot_run() -> None:
    harness = started(max_num_seqs=NUM_OLD)
    add(harness, MIN_TOGETHER)
    harness.step()
    assert harness.last_rows == NUM_OLD, "no slot is free"
    harness.drain()
    harness.check_end()
    harness = started(num_blocks=NUM_OLD * 12)
    add(harness, MIN_TOGETHER, known=40)  # more than the blocks that are left
    num_old = len(harness.tokens["old0"])
    for _ in range(REST_STEPS):
        harness.step()
    assert len(harness.tokens["old0"]) - num_old >= REST_STEPS - 1, (
        "but for the step that was tried"
    )
    harness.drain()
    harness.check_end()


def test_nothing_stands_back_for_streams_that_are_paused() -> None:
    harness = started()
    add(harness, MIN_TOGETHER)
    for number in range(MIN_TOGETHER):
        harness.scheduler.hold(f"new{number}", is_held=True)
    harness.step()
    assert harness.last_rows == NUM_OLD
    for number in range(MIN_TOGETHER):
        harness.scheduler.hold(f"new{number}", is_held=False)
    harness.step()
    assert harness.last_rows == MIN_TOGETHER
    harness.drain()
    harness.check_end()


def test_long_prompts_of_streams_that_continue_share_the_steps_of_others() -> None:
    """A step of their own would have few of them."""
    harness = started(max_num_batched_tokens=64)
    add(harness, MIN_TOGETHER, known=40)
    num_old = len(harness.tokens["old0"])
    for _ in range(8):
        harness.step()
    assert len(harness.tokens["old0"]) - num_old >= 7
    harness.drain()
    harness.check_end()


def test_a_target_for_the_time_between_tokens_is_kept() -> None:
    harness = started()
    harness.add(make_request("timed", [1, 2], max_tokens=20, tpot_slo_ms=50.0))
    harness.step()
    add(harness, MIN_TOGETHER)
    harness.step()
    assert harness.last_rows > MIN_TOGETHER
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("changes", [{"tpot_target_ms": 50.0}, {"policy": lambda: PriorityFirst()}])
def test_priorities_and_targets_of_the_server_count_first(changes: dict[str, object]) -> None:
    harness = started(**changes)
    add(harness, MIN_TOGETHER)
    before = len(harness.tokens["old0"])
    harness.step()
    assert len(harness.tokens["old0"]) == before + 1
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_the_answer_alone(seed: int) -> None:
    """With preemptions, aborts, two plans in flight and chunks of known tokens."""
    chance = Random(seed)
    harness = started(
        plans_in_flight=1 + seed % 2,
        num_blocks=chance.choice((120, 400)),
        max_num_batched_tokens=chance.choice((16, 96)),
        prefix_caching=bool(seed % 3),
    )
    for number in range(24):
        known = chance.randrange(1, 20)
        harness.add(harness.continued(f"new{number}", [number % 3, 5], known))
        if chance.random() < 0.2:
            harness.step()
        if chance.random() < 0.1:
            harness.abort(f"new{chance.randrange(number + 1)}")
    harness.drain()
    harness.check_end()


def gathering(step_ms: float = 20.0, **changes: object) -> tuple[Continuing, ContinuedFirst]:
    """Return a harness with steps that take so long, and what its steps wait for."""
    harness = started(**changes)
    harness.scheduler.speed.step_ms = lambda num_rows, positions: step_ms  # type: ignore[method-assign]
    assert harness.scheduler.continued is not None
    return harness, harness.scheduler.continued


def test_the_next_step_waits_until_no_more_come() -> None:
    harness, continued = gathering()
    add(harness, MIN_TOGETHER - 1)
    assert continued.gather_s(100.0) == 0.0
    add(harness, 1, first=50)
    waits_s = [continued.gather_s(100.0), continued.gather_s(115.0)]
    add(harness, 1, first=60)
    waits_s += [continued.gather_s(at_ms) for at_ms in (118.0, 138.0)]
    assert waits_s == pytest.approx([0.020, 0.005, 0.020, 0.0])
    harness.step()
    assert harness.last_rows == MIN_TOGETHER + 1
    assert continued.gather_s(140.0) == 0.0
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("step_ms", [0.5, 20.0, 1000.0])
def test_one_more_is_waited_for_no_longer_than_a_step_or_the_limit(step_ms: float) -> None:
    harness, continued = gathering(step_ms)
    add(harness, MIN_TOGETHER)
    assert continued.gather_s(100.0) == pytest.approx(min(step_ms, MAX_GAP_MS) / 1000)


def test_what_all_waits_take_is_bounded() -> None:
    harness, continued = gathering(max_num_seqs=128, num_blocks=2000)
    add(harness, MIN_TOGETHER)
    at_ms, num_new = 100.0, 0
    while continued.gather_s(at_ms):
        add(harness, 1, known=1, first=100 + num_new)
        at_ms, num_new = at_ms + 10.0, num_new + 1
    assert num_new == MAX_GATHER_MS / 10
    harness.step()
    add(harness, MIN_TOGETHER, known=1, first=300)
    assert continued.gather_s(at_ms + 80.0) == pytest.approx(80.0 * SHARE_TO_EARN / 1000)
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("why", ["few run", "a target", "another tenant", "plans overlap"])
def test_nothing_waits_where_it_may_not(why: str) -> None:
    harness, continued = gathering(plans_in_flight=2 if why == "plans overlap" else 1)
    if why == "few run":
        harness.drain()
        harness.scheduler.speed.step_ms = lambda num_rows, positions: 0.1 * num_rows  # type: ignore[method-assign]
    elif why == "a target":
        harness.add(make_request("timed", [1, 2], max_tokens=20, tpot_slo_ms=50.0))
        harness.step()
    elif why == "another tenant":
        harness.add(make_request("other", [1, 2], max_tokens=20, tenant="b"))
        harness.step()
    add(harness, MIN_TOGETHER)
    assert continued.gather_s(100.0) == 0.0
    harness.drain()
    harness.check_end()
