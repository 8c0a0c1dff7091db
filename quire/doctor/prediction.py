"""Predict what levers do, by simulating the server's load without and with each of them.

A finding's levers are tried in their order; the recommended one meets the goals at the smallest
change, or else improves most. A lever that is predicted to improve nothing is not recommended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.doctor.finding import Effect, Finding, Lever, Verdict
from quire.doctor.levers import texts
from quire.doctor.scenario import Scenario, scenario_metrics, scenario_of
from quire.doctor.situation import Situation
from quire.obs.timing import Goals

# An improvement by less than this share is none.
MIN_IMPROVEMENT = 0.1
# A simulated metric this many times the measured one, or the reverse, is pointed out.
MAX_DEVIATION = 2.0
# Multiples of the load that are tried to find a server's capacity.
LOAD_FACTORS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_SATURATED = "output_tokens_per_s"
Metrics = Mapping[str, float]


def with_predictions(findings: list[Finding], situation: Situation) -> list[Finding]:
    """Return the findings with the predicted effects of their levers."""
    scenario = scenario_of(situation)
    if isinstance(scenario, str):
        return [replace(one, note=one.note or scenario) if _open(one) else one for one in findings]
    known: dict[tuple[Scenario, bool], Metrics] = {}

    def simulated(scenario: Scenario, saturated: bool) -> Metrics:
        key = (scenario, saturated)
        if key not in known:
            known[key] = scenario_metrics(scenario, saturated=saturated)
        return known[key]

    scenario = _calibrated(scenario, situation, simulated)
    measured = measured_metrics(situation)
    return [
        _compared(_predicted(one, scenario, situation.goals, simulated), measured)
        if _open(one)
        else one
        for one in findings
    ]


def _calibrated(scenario: Scenario, situation: Situation, simulated: Simulated) -> Scenario:
    """Slow the steps down to the measured throughput where requests waited at both readings.

    That throughput is then all that the server could do. Steps are never made faster: at the end of
    a simulation batches are smaller than in service.
    """
    if not situation.waiting:
        return scenario
    tokens = situation.window.count("quire_generated_tokens_total")
    simulated_per_s = simulated(scenario, True).get(_SATURATED, 0.0)
    factor = simulated_per_s * situation.window.seconds / tokens if tokens else 1.0
    return scenario.changed({"calibration": min(max(factor, 1.0), MAX_DEVIATION)})


def measured_metrics(situation: Situation) -> dict[str, float]:
    """Return the metrics of a simulation as far as the readings have them."""
    found = {
        f"{name}_p{share}_ms": 1e3 * times.quantile(share / 100)
        for name, times in (("ttft", situation.ttft), ("tpot", situation.tpot))
        for share in (50, 95, 99)
        if times.num
    }
    return found | {"preemptions_per_100": 100.0 * situation.preemption_share}


def _compared(finding: Finding, measured: Metrics) -> Finding:
    """Add a note where the simulated load is unlike the measured one."""
    if not finding.effects or not measured.get(finding.metric):
        return finding
    ratio = finding.effects[0].before[finding.metric] / measured[finding.metric]
    if 1.0 / MAX_DEVIATION <= ratio <= MAX_DEVIATION:
        return finding
    note = (
        f"the synthetic load gives {ratio:.2g} times the measured value, as real arrivals or "
        "lengths are less or more even: trust the direction more than the numbers"
    )
    return replace(finding, note=note)


Simulated = Callable[[Scenario, bool], Metrics]


def _open(finding: Finding) -> bool:
    """Return whether a finding asks for a prediction."""
    return finding.verdict is not Verdict.OK and bool(finding.levers or finding.metric)


def _predicted(finding: Finding, scenario: Scenario, goals: Goals, simulated: Simulated) -> Finding:
    if finding.metric == "capacity":
        return _capacity(finding, scenario, goals, simulated)
    saturated = finding.metric == _SATURATED
    before = simulated(scenario, saturated)
    effects = []
    for lever in finding.levers:
        after = simulated(scenario.changed(lever.change), saturated) if lever.change else {}
        if finding.metric in before and finding.metric in after:
            effects.append(Effect(lever=lever, before=before, after=after))
    if not effects:
        return (
            replace(finding, note="none of the levers can be simulated")
            if finding.levers
            else (finding)
        )
    best = [one for one in effects if improvement(one, finding.metric) >= MIN_IMPROVEMENT]
    if not best:
        note = f"the simulation predicts no improvement from {texts(e.lever for e in effects)}"
        return replace(finding, note=note)
    best.sort(key=lambda one: _badness(one, finding.metric, goals))  # stable: keeps their order
    return replace(finding, effects=tuple(best))


def improvement(effect: Effect, metric: str) -> float:
    """Return by what share of its value a lever improves a metric; negative where it harms."""
    before, after = effect.before[metric], effect.after[metric]
    if metric == _SATURATED:
        return after / before - 1.0 if before else 0.0
    return 1.0 - after / before if before else 0.0


def _badness(effect: Effect, metric: str, goals: Goals) -> tuple[int, float]:
    """Order effects: first those that meet the goals, in their order; else by what they leave."""
    missed = missed_goals(effect.after, goals)
    newly = len(missed - missed_goals(effect.before, goals))
    value = effect.after[metric]
    if metric == _SATURATED:
        return newly, -value
    return (0, 0.0) if not missed else (1 + newly, value)


def missed_goals(metrics: Metrics, goals: Goals) -> set[str]:
    """Return which of the goals the 95th percentiles miss."""
    bounds = {"ttft_p95_ms": 1e3 * goals.ttft_s, "tpot_p95_ms": 1e3 * goals.tpot_s}
    return {name for name, bound in bounds.items() if metrics.get(name, 0.0) > bound}


def _capacity(finding: Finding, scenario: Scenario, goals: Goals, simulated: Simulated) -> Finding:
    """Add how much more load the server would hold within the goals."""
    before = simulated(scenario, False)
    held, after = 1.0, before
    for factor in LOAD_FACTORS:
        found = simulated(scenario.changed({"load": factor}), False)
        if not found or missed_goals(found, goals):
            break
        held, after = factor, found
    if held == 1.0:
        return replace(finding, note="the simulation finds no more load within the goals")
    lever = Lever(
        text=f"{held:g} times the load on this server ({100 / held:.0f} % of the cost a token)",
        change={"load": held},
    )
    return replace(finding, effects=(Effect(lever=lever, before=before, after=after),))
