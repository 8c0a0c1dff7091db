"""Draft tokens of a simulation: planned answers in fewer steps, by the server's own control."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.base.records import StepPlan, StepResult
from quire.engine.record import RecordingRunner, open_record
from quire.obs.timing import Goals
from quire.sim import drafts
from quire.sim.drafts import DraftAcceptance, draft_acceptance, recorded_rates
from quire.sim.run import Run, simulate
from quire.sim.summary import comparison_text, summary_of
from quire.speculative.control import AdaptiveControl, Control, FixedControl
from tests.unit.sim.made import DEFAULTS, config, drawn_requests, machine, request

ALWAYS, NEVER = DraftAcceptance((1.0,), 3), DraftAcceptance((0.0,), 3)


def simulated(acceptance: DraftAcceptance | None, output: int = 60) -> Run:
    return simulate(
        [request(0.0, 20, output)], DEFAULTS, machine(), config(), acceptance=acceptance
    )


def test_right_drafts_give_the_planned_answer_in_fewer_steps() -> None:
    plain, drafted = simulated(None), simulated(ALWAYS)
    assert plain.stats.steps_total == 60
    assert drafted.stats.steps_total <= 22
    assert drafted.stats.draft_tokens_total == drafted.stats.accepted_draft_tokens_total
    # A step takes 10 ms, and 1 ms more for each token after the first.
    [one] = drafted.finished
    assert one.last_token_ms <= 22 * 13 + 19
    assert one.request.output_tokens == 60


def test_wrong_drafts_are_given_up_and_cost_little() -> None:
    plain, drafted = simulated(None), simulated(NEVER)
    assert drafted.stats.steps_total == plain.stats.steps_total
    assert sum(drafted.stats.accepted_draft_tokens_total) == 0
    assert 0 < sum(drafted.stats.draft_tokens_total) <= 20
    assert drafted.end_ms <= 1.05 * plain.end_ms


def test_drafts_that_the_machine_makes_dear_are_not_made() -> None:
    """A busy machine, on which each token takes as long as a step of one: nothing is gained."""
    requests = [request(0.0, 1, 60) for _ in range(4)]
    few = simulate(
        requests,
        DEFAULTS,
        machine(),
        config(),
        acceptance=DraftAcceptance((0.1,), 3),
    )
    assert len(few.finished) == 4
    assert sum(few.stats.draft_tokens_total) <= 0.15 * 4 * 60


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_runs_repeat_and_all_answers_have_their_lengths(plans_in_flight: int) -> None:
    requests = drawn_requests(60, per_s=30, seed=2, shared=True)
    settings = config(plans_in_flight=plans_in_flight, kv_cache_memory="300KiB")
    runs = [
        simulate(
            requests,
            DEFAULTS,
            machine(),
            settings,
            acceptance=DraftAcceptance((0.8, 0.6), 4),
        )
        for _ in range(2)
    ]
    assert runs[0].finished == runs[1].finished
    assert len(runs[0].finished) == 60
    assert runs[0].stats.draft_rows_total > 0
    assert runs[0].stats.preemptions_total > 0


def test_drafts_are_accepted_as_often_as_given() -> None:
    requests = drawn_requests(200, per_s=5, seed=3)
    run = simulate(
        requests, DEFAULTS, machine(), config(), acceptance=DraftAcceptance((0.8, 0.5), 2)
    )
    drafted, accepted = run.stats.draft_tokens_total, run.stats.accepted_draft_tokens_total
    assert accepted[0] / drafted[0] == pytest.approx(0.8, abs=0.05)
    assert accepted[1] / drafted[1] == pytest.approx(0.4, abs=0.05)  # if the first is, too
    summary = summary_of(run, requests, Goals(ttft_s=1.0, tpot_s=0.1))
    assert summary["drafts"]["drafted"] == sum(drafted)
    runs = [{"policy": "fcfs", "speed": 1.0, "summary": summary, "light": None}]
    settings = {
        **{"machine": "made up", "num_requests": 200, "trace": "t", "left_out": 0},
        **{"max_tokens": 64, "goals": {"ttft_s": 1.0, "tpot_s": 0.1}},
    }
    assert "drafts" not in comparison_text({"settings": settings, "runs": runs})
    shown = comparison_text({"settings": {**settings, "draft_acceptance": [0.8]}, "runs": runs})
    assert f"{sum(drafted):,}" in shown


@pytest.mark.parametrize(
    ("text", "most", "words"),
    [
        ("1.5", 4, "from 0 to 1"),
        ("0.8,-1", 4, "from 0 to 1"),
        ("nan", 4, "from 0 to 1"),
        ("0.8,,0.6", 4, "neither probabilities"),
        ("no-such-file", 4, "neither probabilities"),
        ("0.8", 0, "at least 1"),
    ],
)
def test_a_wrong_acceptance_is_refused(text: str, most: int, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        draft_acceptance(text, most)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Answers:
    """A runner with given results."""

    def __init__(self, results: list[StepResult]) -> None:
        self._results = results

    def submit(self, plan: StepPlan) -> Answers:
        return self

    def collect(self, handle: object) -> StepResult:
        return self._results.pop(0)

    def outcome(self) -> StepResult:
        raise AssertionError("collected by the runner")

    def close(self) -> None:
        pass


def record(path: Path, steps: list[tuple[StepPlan, StepResult]]) -> None:
    runner = RecordingRunner(
        Answers([result for _, result in steps]),
        open_record(path),
        report=lambda what, **fields: None,
    )
    for plan, _ in steps:
        runner.collect(runner.submit(plan))
    runner.close()


def test_acceptance_is_read_from_recorded_plans(tmp_path: Path) -> None:
    rows = {"slots": ints(0, 1), "starts": ints(4, 5), "store_from": ints(4, 5)}
    drafted = StepPlan(
        step=1,
        counts=ints(3, 1),
        sample_counts=ints(3, 1),
        draft_counts=ints(2, 0),
        draft_ids=ints(7, 8),
        **rows,
    )
    right = StepResult(step=1, token_counts=ints(3, 1), token_ids=ints(7, 8, 9, 5))
    half = StepResult(step=1, token_counts=ints(2, 1), token_ids=ints(7, 3, 5))
    wrong = StepResult(step=1, token_counts=ints(1, 1), token_ids=ints(3, 5))
    plain = StepPlan(step=2, counts=ints(1, 1), sample_counts=ints(1, 1), **rows)
    after = StepResult(step=2, token_counts=ints(1, 1), token_ids=ints(1, 2))
    path = tmp_path / "plans"
    record(path, [(drafted, right), (drafted, half), (drafted, wrong), (plain, after)])
    assert recorded_rates(path) == pytest.approx((2 / 3, 1 / 2))
    assert draft_acceptance(str(path), 5).rates == pytest.approx((2 / 3, 1 / 2))
    without = tmp_path / "without"
    record(without, [(plain, after)])
    with pytest.raises(SettingError, match="no step with drafts"):
        recorded_rates(without)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\xff" * 64)
    with pytest.raises(SettingError, match="no recording of plans"):
        recorded_rates(damaged)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("running", [1, 4])
def test_the_control_is_about_as_good_as_the_best_fixed_number(
    running: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time, from the second wave of requests on."""

    def busy_ms(control: Callable[..., Control] | None) -> float:
        if control is not None:
            monkeypatch.setattr(drafts, "AdaptiveControl", control)
        acceptance = None if control is None else DraftAcceptance((rate,), 4)
        found = []
        for num_waves in (1, 4):
            requests = [
                request(1e6 * wave, 16, 60) for wave in range(num_waves) for _ in range(running)
            ]
            run = simulate(requests, DEFAULTS, machine(), config(), acceptance=acceptance)
            found.append(run.busy_ms)
        return found[1] - found[0]

    best_ms = min(
        busy_ms(None), *(busy_ms(lambda *_, num=num: FixedControl(num)) for num in (1, 2, 4))
    )
    assert busy_ms(AdaptiveControl) <= best_ms / 0.95
