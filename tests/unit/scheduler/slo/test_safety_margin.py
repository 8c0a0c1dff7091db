"""The safety margin of TTFT predictions: learned, decayed, and per kind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.base.errors import DeadlineMissed
from quire.scheduler.sequence_parts import Prediction
from quire.scheduler.slo.safety_margin import CONFIDENCE, SafetyMargin
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.run import simulate
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.slo.test_admission_control import harness_of
from tests.unit.sim.made import config, drawn_requests, machine

WAIT = Prediction(at_ms=1000.0, ms=100.0, waits=True)


def came(margin: SafetyMargin, prediction: Prediction, times: float) -> None:
    margin.came(prediction, prediction.at_ms + times * prediction.ms)


def test_without_experience_a_prediction_is_used_unchanged() -> None:
    assert SafetyMargin().times(WAIT) == 1.0


def test_95_percent_are_kept_whatever_the_predictions_error() -> None:
    for scale, spread in ((1.0, 0.1), (1.5, 0.5), (0.9, 1.0)):
        margin, rng = SafetyMargin(), np.random.default_rng(1)
        late = []
        for times in scale * np.exp(spread * rng.normal(size=4000)):
            late.append(times > margin.times(WAIT))
            came(margin, WAIT, float(times))
        assert np.mean(late[1000:]) == pytest.approx(1 - CONFIDENCE, abs=0.015)


def test_pessimistic_predictions_get_no_margin() -> None:
    margin = SafetyMargin()
    for _ in range(100):
        came(margin, WAIT, 0.5)
    assert margin.times(WAIT) == 1.0


def test_immediate_starts_are_not_rejected_for_errors_of_queued_ones() -> None:
    margin = SafetyMargin()
    for _ in range(50):
        came(margin, WAIT, 100.0)
    assert margin.times(WAIT) == pytest.approx(10.0)  # the maximum
    assert margin.times(Prediction(at_ms=0.0, ms=100.0, waits=False)) == 1.0
    assert margin.times(Prediction(at_ms=0.0, ms=1000.0, waits=True)) == 1.0
    assert margin.times(Prediction(at_ms=0.0, ms=90.0, waits=True)) == pytest.approx(10.0)


def test_a_margin_that_only_rejects_shrinks_until_a_request_is_admitted() -> None:
    margin = SafetyMargin()
    for _ in range(50):
        came(margin, WAIT, 100.0)
    num_refused = 0
    while margin.times(WAIT) > 2.0:
        margin.refused(WAIT)
        num_refused += 1
    assert num_refused < 400


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    margin, rng = SafetyMargin(), np.random.default_rng(2)
    for ms in 1e7 * rng.random(5000):
        came(margin, Prediction(at_ms=0.0, ms=float(ms), waits=bool(ms > 1e5)), 2.0)
    assert len(margin._margins) < 60
    # a predicted time of zero is not counted
    came(margin, Prediction(at_ms=0.0, ms=0.0, waits=False), 1.0)


def test_a_rejection_caused_only_by_the_margin_is_recorded() -> None:
    harness = harness_of(max_num_seqs=1)
    for number in range(5):
        harness.add(make_request(f"r{number}", [1] * 30, max_tokens=20))
    foretold_ms = harness.scheduler.predict_ttft_ms("r4")
    assert foretold_ms is not None
    harness.abort("r4")
    margin, kind = harness.scheduler.predictor.margin, Prediction(0.0, foretold_ms, True)
    for _ in range(5):
        came(margin, kind, 10.0)
    before = margin.times(kind)
    assert before == pytest.approx(math.exp(5 * 0.1 * CONFIDENCE))
    defaults = {"max_tokens": 20, "ttft_slo_ms": 1.5 * foretold_ms}
    with pytest.raises(DeadlineMissed, match=r"were exceeded up to 1\.61 times") as refused:
        harness.add(make_request("refused", [1] * 30, **defaults))  # type: ignore[arg-type]
    assert refused.value.retry_after_s is not None
    assert margin.times(kind) < before
    margin._margins.clear()
    harness.add(make_request("taken", [1] * 30, **defaults))  # type: ignore[arg-type]
    harness.drain()
    assert len(margin._margins) == 1  # its first token has arrived
    harness.check_end()


def test_deadlines_use_the_margin_of_completed_answers() -> None:
    harness = harness_of(max_num_seqs=1)
    defaults = {"max_tokens": 20, "deadline_ms": 5000.0}
    harness.add(make_request("slow", [1] * 30, **defaults))  # type: ignore[arg-type]
    harness.step()
    harness.now_ms += 2000.0  # steps take far longer than the predicted 11 ms
    harness.drain()
    margin = harness.scheduler.predictor.margin
    predicted_ms = 10.0 + 30.0 + 19 * 11.0
    kind = Prediction(at_ms=0.0, ms=predicted_ms, waits=False, is_end=True)
    assert margin.times(kind) == pytest.approx(math.exp(0.1 * CONFIDENCE))
    for _ in range(4):
        came(margin, kind, 10.0)
    defaults |= {"arrival_ms": harness.now_ms, "deadline_ms": 1.5 * predicted_ms}
    with pytest.raises(DeadlineMissed, match=r"the end of the answer .* up to 1\.61 times"):
        harness.add(make_request("refused", [1] * 30, **defaults))  # type: ignore[arg-type]
    defaults["deadline_ms"] = 1.7 * predicted_ms
    harness.add(make_request("taken", [1] * 30, **defaults))  # type: ignore[arg-type]


def test_the_margin_of_completion_is_at_least_that_of_the_first_token() -> None:
    harness = harness_of(max_num_seqs=1)
    margin = harness.scheduler.predictor.margin
    for _ in range(5):
        came(margin, Prediction(at_ms=0.0, ms=40.0, waits=False), 10.0)
    with pytest.raises(DeadlineMissed, match=r"the end of the answer .* up to 1\.61 times"):
        harness.add(make_request("r", [1] * 30, max_tokens=20, deadline_ms=350.0))


def test_an_answer_ended_by_its_deadline_widens_the_margin() -> None:
    harness = harness_of(max_num_seqs=1)
    harness.add(make_request("late", [1] * 30, max_tokens=20, deadline_ms=300.0))
    harness.step()
    harness.now_ms += 300.0
    harness.schedule()
    assert "late" in harness.refusals
    assert harness.scheduler.predictor.margin._margins[True, False, 8] > 0


def reported(requests: list[TraceRequest], goal_ms: float) -> tuple[int, int, int]:
    """Return how many met their goal, were late, and were rejected."""
    defaults = RequestDefaults(max_tokens=64, max_model_len=512, ttft_slo_ms=goal_ms)
    run = simulate(requests, defaults, machine(), config(kv_cache_memory="4MiB"))
    late = sum(one.first_token_ms - one.request.arrival_ms > goal_ms for one in run.finished)
    return len(run.finished) - late, late, len(run.refused)


def test_beyond_saturation_few_accepted_requests_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = drawn_requests(600, per_s=12, seed=3)
    good, late, _ = reported(requests, 2000.0)
    with monkeypatch.context() as patched:
        patched.setattr(SafetyMargin, "times", lambda *_: 1.0)
        good_without, late_without, _ = reported(requests, 2000.0)
    assert late_without > 3 * late
    assert good > 1.5 * good_without


def test_with_a_short_queue_none_is_rejected() -> None:
    assert reported(drawn_requests(300, per_s=2, seed=4), 2000.0) == (300, 0, 0)
