"""AsyncSteps over a device that computes only when waited for: call order, and no early reads.

tests/exact/test_overlap.py tests whole engines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.base.errors import WorkerError
from quire.base.records import StepResult
from quire.runner.model_runner import ModelRunner
from tests.unit.runner.deferred_executor import DeferredExecutor
from tests.unit.runner.plans import admission_of, ints, plan_of, runner_of
from tests.unit.runner.scripted_executor import ScriptedExecutor


class World:
    """A runner over a deferred device with sampled ids of position + 20."""

    def __init__(self, **settings: Any) -> None:
        scripted = ScriptedExecutor(lambda positions: (positions + 20).astype(np.int32))
        self.device = DeferredExecutor(scripted)
        self.scripted = scripted
        self.runner: ModelRunner = runner_of(self.device, overlap=True, **settings)

    def new_log(self) -> list[str]:
        """Return submissions and waits of the device since the last call."""
        said = [entry[0] for entry in self.device.log]
        self.device.log.clear()
        return said

    def tokens(self, slot: int) -> list[int]:
        table = self.runner.tables.tokens
        return table.tokens[slot, : table.lengths[slot]].tolist()

    def result(self, handle: Any) -> StepResult:
        return self.runner.collect(handle)


def test_the_next_step_is_submitted_before_the_tokens_of_this_one_are_read() -> None:
    world = World()
    first = world.runner.submit(
        plan_of(1, [(0, 0, 2, True)], admissions=(admission_of(0, [1, 2]),), blocks={0: [3, 4]})
    )
    second = world.runner.submit(plan_of(2, [(0, 2, 1, True)]))
    assert world.new_log() == ["trunk", "head", "choose"] * 2
    assert world.tokens(0) == [1, 2]
    assert world.result(first).token_ids.tolist() == [22]
    third = world.runner.submit(plan_of(3, [(0, 3, 1, True)]))
    assert world.new_log() == ["wait", "trunk", "head", "choose"]
    assert [world.result(handle).token_ids.tolist() for handle in (second, third)] == [[23], [24]]
    assert world.tokens(0) == [1, 2, 22, 23, 24]
    assert [batch.token_ids.tolist() for batch in world.device.batches] == [[1, 2], [22], [23]]


def test_a_token_that_has_been_read_comes_from_the_host() -> None:
    world = World()
    some = plan_of(1, [(0, 0, 1, True)], admissions=(admission_of(0, [1]),), blocks={0: [3]})
    world.result(world.runner.submit(some))
    world.runner.submit(plan_of(2, [(0, 1, 1, True)]))
    assert [entry for entry in world.device.log if entry[0] == "trunk"] == [("trunk", 1, 0)] * 2


def test_late_results_of_an_ended_request_do_not_reach_its_slots_next_owner() -> None:
    """It ended with step 1; step 2 has a row of it; step 3 gives its slot to another."""
    world = World()
    one = admission_of(0, [1, 2])
    first = world.runner.submit(plan_of(1, [(0, 0, 2, True)], admissions=(one,), blocks={0: [3]}))
    second = world.runner.submit(plan_of(2, [(0, 2, 1, True)]))
    assert world.result(first).token_ids.tolist() == [22]
    other = admission_of(0, [7, 8, 9])
    third = world.runner.submit(
        plan_of(3, [(0, 0, 3, True)], admissions=(other,), retired=ints(0), blocks={0: [5]})
    )
    assert world.result(second).token_counts.tolist() == [1]  # the result is dropped
    assert world.tokens(0) == [7, 8, 9]
    assert world.result(third).token_ids.tolist() == [23]
    assert world.tokens(0) == [7, 8, 9, 23]


def test_rows_with_penalties_have_their_last_token_from_the_device() -> None:
    """Beside a row without penalties, and one with all tokens known."""
    world = World()
    both = (admission_of(0, [1, 2], repetition_penalty=1.5), admission_of(1, [5]))
    first = world.runner.submit(
        plan_of(1, [(0, 0, 2, True), (1, 0, 1, True)], admissions=both, blocks={0: [3], 1: [4]})
    )
    known = admission_of(2, [6, 7], presence_penalty=0.5)
    rows = [(1, 1, 1, True), (0, 2, 1, True), (2, 0, 2, True)]
    second = world.runner.submit(plan_of(2, rows, admissions=(known,), blocks={2: [5]}))
    assert world.new_log() == ["trunk", "head", "choose"] * 2
    world.result(first)
    third = world.runner.submit(plan_of(3, [(0, 3, 1, True)]))
    assert world.new_log() == ["wait", "trunk", "head", "choose"]
    world.result(second)
    world.result(third)
    histories = [one.history.tokens for one in world.scripted.samples if one.history is not None]
    seen = [(tokens.ids.tolist(), tokens.starts.tolist()) for tokens in histories]
    assert seen == [
        ([1, 2], [0, 2, 2]),
        ([1, 2, 22, 6, 7], [0, 0, 3, 5]),
        ([1, 2, 22, 23], [0, 4]),
    ]


def test_rows_with_penalties_wait_if_two_tokens_are_unknown() -> None:
    world = World()
    penal = admission_of(0, [1, 2], frequency_penalty=0.5)
    first = world.runner.submit(
        plan_of(1, [(0, 0, 2, True)], admissions=(penal,), blocks={0: [3, 4]})
    )
    world.runner.submit(plan_of(2, [(0, 2, 1, True)]))
    world.new_log()
    third = world.runner.submit(plan_of(3, [(0, 3, 1, True)]))
    assert world.new_log() == ["trunk"]
    world.result(first)
    assert world.new_log() == ["wait"]
    assert world.result(third).token_ids.tolist() == [24]
    assert world.new_log() == ["wait", "head", "choose", "wait"]
    history = world.scripted.samples[-1].history
    assert history is not None
    assert history.tokens.ids.tolist() == [1, 2, 22, 23]


@pytest.mark.parametrize(
    "asks", [{"typical_p": 0.5}, {"logprob_token_ids": (3,)}], ids=["rare", "listed"]
)
def test_rows_sampled_on_the_host_end_the_overlap_for_their_step(
    asks: dict[str, Any],
) -> None:
    world = World()
    rare = admission_of(0, [1, 2], **asks)
    first = world.runner.submit(plan_of(1, [(0, 0, 2, True)], admissions=(rare,), blocks={0: [3]}))
    assert world.new_log() == ["trunk"]
    second = world.runner.submit(plan_of(2, [(0, 2, 1, True)]))
    assert world.new_log()[-1] == "trunk"  # after the token choice of the first
    assert world.tokens(0) == [1, 2, 22]
    assert world.result(second).token_ids.tolist() == [23]
    assert world.result(first).token_ids.tolist() == [22]
    assert all(len(batch.late_slots) == 0 for batch in world.device.batches)


def test_a_plan_that_copies_tokens_between_slots_waits_for_them() -> None:
    world = World()
    both = (admission_of(0, [1, 2]), admission_of(1, [5]))
    first = world.runner.submit(
        plan_of(1, [(0, 0, 2, True)], admissions=both, blocks={0: [3], 1: [4]})
    )
    branch = {"branch_from": ints(0), "branch_to": ints(1), "known_slots": ints(1)}
    second = world.runner.submit(plan_of(2, [(1, 2, 1, True)], **branch, known_ids=ints(30)))
    assert world.tokens(1) == [1, 2, 30]
    assert world.result(first).token_ids.tolist() == [22]
    assert world.result(second).token_ids.tolist() == [23]
    assert world.tokens(0) == [1, 2, 22]


def test_a_step_without_tokens_to_sample_is_waited_for_like_others() -> None:
    world = World()
    first = world.runner.submit(
        plan_of(1, [(0, 0, 2, False)], admissions=(admission_of(0, [1, 2, 3]),), blocks={0: [3]})
    )
    second = world.runner.submit(plan_of(2, [(0, 2, 1, True)]))
    assert not world.device.batches
    assert world.result(first).token_counts.tolist() == [0]
    assert len(world.device.batches) == 1
    assert world.result(second).token_ids.tolist() == [23]


@pytest.mark.parametrize("what", ["trunk", "head", "choose"])
def test_a_failed_step_raises_when_collected_and_others_continue(what: str) -> None:
    world = World()
    two = (admission_of(0, [1]), admission_of(1, [5, 6]))
    blocks = {0: [3], 1: [4]}
    first = world.runner.submit(plan_of(1, [(0, 0, 1, True)], admissions=two, blocks=blocks))
    world.device.fail_next[what] = RuntimeError("broken")
    second = world.runner.submit(plan_of(2, [(0, 1, 1, True)]))
    assert world.result(first).token_ids.tolist() == [21]
    third = world.runner.submit(plan_of(3, [(1, 0, 2, True)]))
    with pytest.raises(RuntimeError, match="broken"):
        world.result(second)
    assert world.result(third).token_ids.tolist() == [22]
    with pytest.raises(RuntimeError, match="broken"):
        world.result(second)  # on every collection


def test_a_plan_that_cannot_be_applied_fails_its_result() -> None:
    world = World()
    without_seed = plan_of(1, [(0, 0, 1, True)], admissions=(admission_of(0, [1], seed=None),))
    with pytest.raises(ValueError, match="planned without a seed"):
        world.result(world.runner.submit(without_seed))
    moves = plan_of(2, [], tier_copies=np.empty(0))
    with pytest.raises(WorkerError, match="moves 0 blocks"):
        world.result(world.runner.submit(moves))


def test_forced_tokens_stay_known_when_the_first_of_them_is_sampled() -> None:
    world = World()
    tables = world.runner.tables
    world.runner.submit(plan_of(1, [], admissions=(admission_of(0, [1, 2]),)))
    tables.append(ints(0), ints(2), ints(7))
    tables.tokens.tokens[0, 3:5], tables.tokens.lengths[0] = [8, 9], 5  # like GrammarRows
    tables.append(ints(0), ints(3), ints(8))
    assert world.tokens(0) == [1, 2, 7, 8, 9]
