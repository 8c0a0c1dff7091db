"""The predicted TTFT of a request beside others that yield to it, and others that overtake it."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import DeadlineMissed
from quire.scheduler.policy.policy import Policy
from quire.scheduler.sequence import SequenceState
from quire.scheduler.slo.overtaking import Overtaking
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup
from tests.unit.scheduler.slo.test_admission_control import harness_of


def test_no_request_overtakes_one_without_handicap() -> None:
    passing = Overtaking()
    for number in range(20):
        passing.note(10.0 * number, 0.0, 5.0)
    assert passing.extended_ms(100.0, 0.0) == 100.0


def test_overtaking_requests_take_their_share_of_the_time() -> None:
    passing = Overtaking()
    for number in range(21):  # one every 10 ms; each takes 5 of them
        passing.note(10.0 * number, 0.0, 5.0)
    passing.note(200.0, 1000.0, 0.0)
    share = 21 * 5.0 / 200.0
    assert passing.extended_ms(10.0, 500.0) == pytest.approx(10.0 / (1 - share))
    # A request with 20 ms of handicap is passed only by those of the next 20 ms.
    assert passing.extended_ms(100.0, 20.0) == pytest.approx(100.0 + 20.0 * share)
    assert passing.extended_ms(100.0, -20.0) == 100.0


def test_an_endless_wait_is_predicted_as_a_long_one() -> None:
    passing = Overtaking()
    for number in range(20):
        passing.note(10.0 * number, float(number % 2), 50.0)
    assert passing.extended_ms(3.0, np.inf) == pytest.approx(300.0)


def test_steadily_arriving_short_jobs_lengthen_a_long_ones_prediction() -> None:
    harness = harness_of("sjf", max_num_seqs=1)
    for number in range(40):
        request = make_request(f"s{number}", [1] * 10, max_tokens=5, arrival_ms=75.0 * number)
        harness.add(request)
    late = harness.scheduler.predict_ttft_ms("s39")
    long = make_request("long", [1] * 60, max_tokens=200, arrival_ms=3000.0)
    harness.add(long)
    prediction = harness.scheduler.predict_ttft_ms("long")
    assert late is not None
    assert prediction is not None
    # After the same 40 in the queue, and after most of those to come.
    assert prediction > 2 * late


def test_the_prediction_of_a_light_tenant_includes_paused_and_preempted_rows() -> None:
    prediction = {}
    for policy in ("fcfs", "fair"):
        harness = harness_of(policy)
        for number in range(12):
            harness.add(make_request(f"f{number}", [1] * 30, max_tokens=100, tenant="flood"))
        for _ in range(40):
            harness.step()
        harness.add(make_request("light", [2] * 60, max_tokens=5, tenant="light"))
        ms = harness.scheduler.predict_ttft_ms("light")
        assert ms is not None
        prediction[policy] = ms
    # Two steps of at most 64 tokens with one continuing row; in turn it would wait for the flood.
    assert 80.0 <= prediction["fair"] <= 160.0
    assert prediction["fcfs"] > 2000.0


def test_a_request_that_preempts_others_is_not_rejected_for_them() -> None:
    harness = harness_of("priority")
    for number in range(12):
        harness.add(make_request(f"r{number}", [1] * 30, max_tokens=100, priority=5))
    for _ in range(10):
        harness.step()
    asks = {"max_tokens": 5, "ttft_slo_ms": 400.0}
    harness.add(make_request("urgent", [1] * 50, priority=0, **asks))  # type: ignore[arg-type]
    with pytest.raises(DeadlineMissed):
        harness.add(make_request("alike", [1] * 50, priority=5, **asks))  # type: ignore[arg-type]


def test_flows_of_a_kind_take_turns_and_flooded_ones_come_first() -> None:
    harness = harness_of("fair", max_num_seqs=2)
    for number in range(8):
        harness.add(make_request(f"f{number}", [1] * 30, max_tokens=100, tenant="flood"))
    for _ in range(40):
        harness.step()
    for number in range(3):
        harness.add(make_request(f"l{number}", [2] * 60, max_tokens=5, tenant="light"))
    queue, sequences = harness.scheduler._queue, harness.scheduler._requests.sequences
    assert [queue.num_before(sequences[f"l{number}"]) for number in range(3)] == [0, 1, 2]
    waiting = [name for name in sequences if name[0] == "f" and sequences[name].slot < 0]
    places = [queue.num_before(sequences[name]) for name in waiting]
    assert places == [3 + place for place in range(len(waiting))]


def test_flows_without_keys_are_of_one_kind() -> None:
    class Tenants(Policy):
        def flow(self, sequence: SequenceState) -> str:
            return sequence.request.tenant

    harness = Harness(Setup(policy=Tenants, max_num_seqs=1, num_blocks=64))
    for number in range(7):
        harness.add(make_request(f"r{number}", [1] * 4, max_tokens=5, tenant="ab"[number % 2]))
    harness.step()
    queue, sequences = harness.scheduler._queue, harness.scheduler._requests.sequences
    assert [queue.num_before(sequences[f"r{at}"]) for at in range(1, 7)] == [0, 0, 2, 2, 4, 4]
    harness.drain()
    harness.check_end()


def test_a_round_of_a_pipeline_is_a_plan_for_each_stage() -> None:
    rest_ms, first_ms = {}, {}
    for stages in (1, 2):
        settings = {"plans_in_flight": 2, "micro_batches": 2, "run_late": True}
        harness = harness_of(max_num_seqs=8, **(settings if stages > 1 else {}))
        for number in range(4):
            harness.add(make_request(f"r{number}", [1] * 10, max_tokens=100))
        for _ in range(12):
            harness.step()
        harness.add(make_request("late", [2] * 10, max_tokens=5))
        late = harness.scheduler._requests.sequences["late"]
        first_ms[stages] = harness.scheduler.predictor.first_token(late, 0, 0.0).ms
        rest_ms[stages] = harness.scheduler.predictor.rest_ms(late)
    # Four more tokens, each of five requests at once: a step of five rows, or two of 2.5.
    assert rest_ms == {1: pytest.approx(4 * 15), 2: pytest.approx(4 * 2 * 12.5)}
    # The tokens of four others that are due, then the prompt beside four rows, or beside two.
    assert first_ms == {1: pytest.approx(4 + 10 + 14), 2: pytest.approx(4 + 10 + 12)}
