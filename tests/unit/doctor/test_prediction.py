"""Predicted effects: the real scheduler on a synthetic load, without and with a lever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.doctor import scenario as scenario_module
from quire.doctor.capacity_checks import check_cost
from quire.doctor.finding import Effect, Finding, Lever, Verdict
from quire.doctor.latency_checks import check_ttft
from quire.doctor.levers import more_blocks, more_slots, replica
from quire.doctor.prediction import improvement, with_predictions
from quire.doctor.scenario import Scenario, scenario_metrics, scenario_of
from quire.doctor.situation import Situation, engine_view
from quire.obs.timing import Goals
from tests.unit.doctor.made import ENGINE, PRICES, situation

# One request takes 21 steps of 8.2 ms: so many a second are too much for one slot.
OVERLOADED = {"ttft_ms": 1500.0, "queue_ms": 1400.0, "running": (1, 1), "waiting": (9, 9)}
ONE_SLOT = replace(ENGINE, slots=1)


@pytest.fixture(autouse=True)
def _small_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario_module, "_MIN_REQUESTS", 40)
    monkeypatch.setattr(scenario_module, "_MAX_OUTPUT_TOKENS", 500)


def made_scenario(found: Situation) -> Scenario:
    scenario = scenario_of(found)
    assert isinstance(scenario, Scenario)
    return scenario


def test_the_load_has_the_measured_rate_lengths_and_backlog() -> None:
    scenario = made_scenario(
        situation(queried=5000, hits=1000, running=(2, 4), waiting=(3, 5), engine=ENGINE)
    )
    traffic = scenario.traffic
    assert traffic.rate == pytest.approx(10.4)  # 100 ended and 4 more are there
    assert traffic.prompt_tokens == pytest.approx(40.0)  # a fifth is found in the cache
    assert (traffic.output_tokens, traffic.running, traffic.waiting) == (21.0, 2, 3)
    assert (scenario.slots, scenario.step_tokens, scenario.num_blocks) == (8, 64, 100)


def test_without_load_times_are_those_of_single_steps() -> None:
    quiet = made_scenario(situation(running=(0, 0), waiting=(0, 0))).changed({"load": 1e-4})
    found = scenario_metrics(quiet)
    assert found["tpot_p50_ms"] == pytest.approx(8.2)  # fixed, a token and a score
    # one step of half to one and a half times 50 tokens, in steps of 64
    assert 8.1 + 2.5 <= found["ttft_p50_ms"] <= 8.1 + 6.4
    assert found["preemptions_per_100"] == 0.0
    faster = scenario_metrics(quiet.changed({"fixed_price": 0.5}))
    assert faster["tpot_p50_ms"] == pytest.approx(4.2)
    assert scenario_metrics(quiet) == found
    # Blocks of ranks that divide positions: as many tokens in larger blocks.
    pieces = replace(quiet, block_size=512, num_blocks=-(-int(quiet.num_blocks) * 16 // 512))
    assert scenario_metrics(pieces)


def test_more_slots_help_a_queue_for_slots_and_more_blocks_do_not() -> None:
    queued = situation(**OVERLOADED, engine=ONE_SLOT)
    levers = tuple(lever for lever in (more_blocks(queued), more_slots(queued, 4)) if lever)
    finding = replace(check_ttft(queued), levers=levers)
    [predicted] = with_predictions([finding], queued)
    [effect] = predicted.effects
    assert effect.lever.text == "--max-num-seqs 4"
    assert effect.after["ttft_p95_ms"] < 0.5 * effect.before["ttft_p95_ms"]
    [useless] = with_predictions([replace(finding, levers=levers[:1])], queued)
    assert not useless.effects
    assert "predicts no improvement from --kv-cache-memory 200MiB" in useless.note


def test_the_smallest_change_that_meets_the_goals_comes_first() -> None:
    queued = situation(**OVERLOADED, engine=ONE_SLOT, goals=Goals(ttft_s=1.0))
    [predicted] = with_predictions([check_ttft(queued)], queued)
    after = [effect.after["ttft_p95_ms"] for effect in predicted.effects]
    met = [value <= 1000.0 for value in after]
    assert met == sorted(met, reverse=True)
    assert met[0]
    assert predicted.effects[0].lever.text.startswith("--max-num-seqs")


def test_blocks_help_where_blocks_are_short() -> None:
    short = replace(ENGINE, num_blocks=6)
    pressed = situation(**{**OVERLOADED, "running": (3, 3)}, used=(95, 95), engine=short)
    finding = Finding(
        check="x",
        verdict=Verdict.WARNING,
        found="",
        levers=(more_blocks(pressed), replica(pressed)),
        metric="preemptions_per_100",
    )
    [predicted] = with_predictions([finding], pressed)
    assert "--kv-cache-memory 12MiB" in [effect.lever.text for effect in predicted.effects]


def test_capacity_is_the_highest_load_within_the_goals() -> None:
    idle = situation(busy_s=1.0, running=(0, 0), choices=20)
    [predicted] = with_predictions([check_cost(idle)], idle)
    [effect] = predicted.effects
    held = effect.lever.change["load"]
    assert held > 1
    assert effect.after["ttft_p95_ms"] <= 200.0
    assert f"{held:g} times the load" in effect.lever.text


def test_a_simulated_value_unlike_the_measured_one_is_pointed_out() -> None:
    queued = situation(**{**OVERLOADED, "waiting": (0, 0)}, engine=ONE_SLOT)
    [predicted] = with_predictions([check_ttft(queued)], queued)
    ratio = predicted.effects[0].before["ttft_p95_ms"] / (1e3 * queued.ttft.quantile(0.95))
    assert ("trust the direction" in predicted.note) is not (0.5 <= ratio <= 2.0)


def test_steps_are_slowed_down_to_the_throughput_under_a_queue() -> None:
    scenario = made_scenario(situation(engine=ONE_SLOT))
    capacity = scenario_metrics(scenario, saturated=True)["output_tokens_per_s"]
    slow = scenario.changed({"calibration": 1.5})
    assert scenario_metrics(slow, saturated=True)["output_tokens_per_s"] == pytest.approx(
        capacity / 1.5
    )
    # 100 choices of 21 tokens in 10 s are 210 tokens/s, more than one slot of 8.2 ms computes
    for seconds, slows in ((10.0, False), (25.0, True)):
        queued = situation(**OVERLOADED, engine=ONE_SLOT, seconds=seconds, busy_s=seconds)
        [predicted] = with_predictions([check_ttft(queued)], queued)
        plain = scenario_metrics(made_scenario(queued))["ttft_p95_ms"]
        assert (predicted.effects[0].before["ttft_p95_ms"] > plain) is slows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": None}, "/v1/engine was not readable"),
        ({"engine": replace(ENGINE, prices=None)}, "timed too few steps"),
        ({"choices": 9}, "too few requests ended"),
    ],
)
def test_why_there_is_no_prediction(change: dict[str, object], said: str) -> None:
    found = situation(**change)  # type: ignore[arg-type]
    scenario = scenario_of(found)
    assert isinstance(scenario, str)
    assert said in scenario
    finding = Finding(
        check="x", verdict=Verdict.WARNING, found="", levers=(Lever(text="y"),), metric="z"
    )
    assert said in with_predictions([finding], found)[0].note


def test_a_lever_that_names_no_field_is_a_mistake_here() -> None:
    with pytest.raises(KeyError, match="no fields"):
        made_scenario(situation()).changed({"slot": 3})


def test_improvement_is_of_the_right_sign() -> None:
    def effect(name: str, before: float, after: float) -> Effect:
        return Effect(lever=Lever(text=""), before={name: before}, after={name: after})

    assert improvement(effect("ttft_p95_ms", 100.0, 80.0), "ttft_p95_ms") == pytest.approx(0.2)
    name = "output_tokens_per_s"
    assert improvement(effect(name, 100.0, 120.0), name) == pytest.approx(0.2)


def test_the_engines_answer_is_read_strictly() -> None:
    answer = {
        "limits": {
            **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512},
            **{"plans_in_flight": 1, "tpot_target_ms": 0.0, "long_prompt_tokens": 256},
            **{"max_long_prompts": 0, "max_short_prompts": 0, "part_layers": 0},
        },
        "blocks": {"total": 100, "size": 16, "bytes_each": 2**20},
        "waiting": [{"age_ms": 3.0}, {"age_ms": 70.0}],
        "step_prices": {
            **{"steps_timed": 50, "fixed_ms": 8.0, "token_ms": 0.1, "score_ms": 0.1},
            **{"position_ms": 0.0, "read_ms": 0.0},
        },
    }
    assert engine_view(answer) == replace(ENGINE, oldest_wait_ms=70.0)
    few = {**answer, "step_prices": {**answer["step_prices"], "steps_timed": 49}}  # type: ignore[dict-item]
    view = engine_view(few)
    assert view is not None
    assert view.prices is None
    for name in answer:
        assert engine_view({key: value for key, value in answer.items() if key != name}) is None
    assert engine_view(None) is None
    assert engine_view({**answer, "blocks": []}) is None
    assert ENGINE.prices == PRICES
