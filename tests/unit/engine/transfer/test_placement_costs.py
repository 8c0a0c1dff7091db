"""Placement: the sums of delays that are compared, and what is assumed of an unknown engine."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.base.prefill_load import PrefillLoad
from quire.engine.transfer.placement import ROUND_TRIP_MS, Placement
from quire.scheduler.cost.step_cost import LinearCost

HERE = PrefillLoad(
    queue_ms=20.0, fixed_ms=5.0, token_ms=0.5, position_ms=0.001, step_tokens=64, is_measured=True
)
PLACEMENT = Placement(start=64, end=192, moving_ms=8.0, here=HERE, num_decoding=3)


def test_a_span_costs_what_the_step_costs_say() -> None:
    price = LinearCost(fixed_ms=5.0, token_ms=0.5, position_ms=0.001)
    assert math.isclose(HERE.span_ms(64, 192), price.row_ms(64, 128))
    assert math.isclose(HERE.prompt_ms(64, 192), price.row_ms(64, 128) + 2 * 5.0)
    assert HERE.prompt_ms(64, 64) == 0.0


def test_here_all_wait_and_there_one_does() -> None:
    span_ms = HERE.span_ms(64, 192)
    assert PLACEMENT.local_ms == 20.0 + 4 * span_ms
    # The blocks of the last step, half of all, come after its computation.
    compute_ms = HERE.prompt_ms(64, 192)
    assert PLACEMENT.remote_ms(HERE) == ROUND_TRIP_MS + 20.0 + compute_ms + 4.0


def test_a_slow_link_outlasts_the_computation() -> None:
    slow = replace(PLACEMENT, moving_ms=500.0)
    assert slow.remote_ms(replace(HERE, queue_ms=0.0)) == ROUND_TRIP_MS + 500.0
    assert not replace(slow, num_decoding=100).pays(None)  # it is not worth moving at all


def test_an_unknown_engine_may_be_idle_and_fast() -> None:
    assert PLACEMENT.remote_ms(None) == ROUND_TRIP_MS + 8.0
    alone = replace(PLACEMENT, here=replace(HERE, queue_ms=0.0), num_decoding=0)
    assert alone.pays(None)
    assert not alone.pays(replace(HERE, queue_ms=0.0))


def test_guesses_are_replaced_by_the_own_speed() -> None:
    guess = PrefillLoad(queue_ms=7.0, token_ms=1e9)
    assert PLACEMENT.remote_ms(guess) == PLACEMENT.remote_ms(replace(HERE, queue_ms=7.0))


def test_what_comes_from_elsewhere_is_neither_computed_nor_moved() -> None:
    rest = PLACEMENT.after(96)
    assert (rest.start, rest.end, rest.moving_ms) == (160, 192, 2.0)
    nothing = PLACEMENT.after(1000)
    assert (nothing.start, nothing.moving_ms) == (192, 0.0)
    assert not nothing.pays(None)
