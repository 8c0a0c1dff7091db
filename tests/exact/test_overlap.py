"""One answer on a device beside the host: tokens stay there, the next step is begun before they are
read, and every request gets what it gets alone, one step at a time, on the host.

Cases are those of test_one_answer, as drawn and again without what ends the overlap (rare
parameters, scores, beams). QUIRE_OVERLAP_CASES draws more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from quire.base.records import NO_RULES, Request
from quire.base.sampling_params import SamplingParams
from quire.execute.executor import Executor
from tests.exact.rig import AloneRuns, Model, Outcome, differences, run_case
from tests.exact.workload import VOCAB_SIZE, Case, draw_case
from tests.unit.runner.deferred_executor import DeferredExecutor

NUM_CASES = int(os.environ.get("QUIRE_OVERLAP_CASES", "16"))
KEPT = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "min_tokens", "logprobs", "structured_outputs"),
)


def plain(case: Case, *, reads_tokens: bool) -> Case:
    """The case without what is chosen on the host; reads_tokens: with penalties and grammars."""

    def changed(request: Request) -> Request:
        kept = {name: getattr(request.sampling, name) for name in KEPT}
        if not reads_tokens:
            kept |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
            kept["structured_outputs"] = None
        most = max(request.max_total_tokens, len(request.prompt_ids) + 10)
        sampling = SamplingParams(**kept)
        return replace(request, sampling=sampling, rules=NO_RULES, max_total_tokens=most)

    arrivals = [
        replace(arrival, requests=tuple(map(changed, arrival.requests)))
        for arrival in case.arrivals
        if not arrival.requests[0].sampling.use_beam_search
    ]
    settings = case.settings
    longest = max(request.max_total_tokens for one in arrivals for request in one.requests)
    settings = replace(
        settings,
        num_blocks=max(settings.num_blocks, -(-longest // settings.block_size)),
        tenants=(),
    )
    return replace(case, arrivals=tuple(arrivals), settings=settings)


def overlapped(case: Case, number: int) -> Case:
    """Two plans out, now and then three; tiers mostly in the host's memory, some on disk."""
    in_flight, in_host = 3 if number % 5 == 4 else 2, number % 4 != 3
    settings = replace(case.settings, plans_in_flight=in_flight, tier_in_host=in_host)
    return replace(case, settings=settings)


DRAWS: dict[str, Callable[[Case], Case]] = {
    "as drawn": lambda case: case,
    "with penalties and grammars": lambda case: plain(case, reads_tokens=True),
    "with penalties": lambda case: with_penalties(case),
    "plain": lambda case: plain(case, reads_tokens=False),
}


def run(model: Model, case: Case) -> tuple[Outcome, DeferredExecutor]:
    """The case, and the device it ran on."""
    devices: list[DeferredExecutor] = []

    def wrap(executor: Executor) -> Executor:
        devices.append(DeferredExecutor(executor))
        return cast(Executor, devices[-1])

    return run_case(model, case, wrap_executor=wrap), devices[0]


@pytest.mark.parametrize("drawn", DRAWS)
def test_every_request_gets_what_it_gets_alone(drawn: str, models: list[Model]) -> None:
    alone, lines, seen = AloneRuns(), [], dict.fromkeys(SEEN, 0)
    for number in range(NUM_CASES):
        first = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        case = overlapped(DRAWS[drawn](first), number)
        outcome, device = run(models[case.model], case)
        lines += differences(models[case.model], outcome, alone)
        for name, is_seen in SEEN.items():
            seen[name] += is_seen(outcome, device.log)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:10])
    missed = [name for name, count in seen.items() if count < NUM_CASES / 16]
    assert not missed, f"too few cases have {missed}: {seen}"


def _has_late_rows(_: Outcome, log: list[tuple[Any, ...]]) -> bool:
    return any(entry[0] == "trunk" and entry[2] for entry in log)


SEEN: dict[str, Callable[[Outcome, list[tuple[Any, ...]]], bool]] = {
    "late rows": _has_late_rows,
    "dropped rows": lambda outcome, _: _drops(outcome),
    "preemption": lambda outcome, _: outcome.preempted,
    "cancelled": lambda outcome, _: outcome.cancelled,
    "forks": lambda outcome, _: outcome.forked,
    "saved to the host": lambda outcome, _: outcome.saved and outcome.case.settings.tier_in_host,
    "fetched from it": lambda outcome, _: outcome.fetched and outcome.case.settings.tier_in_host,
}


def _drops(outcome: Outcome) -> bool:
    """Whether more tokens were chosen than anybody was told."""
    chosen = sum(len(result.token_ids) for _, result in outcome.plans)
    return chosen > sum(len(stream.tokens) for stream in outcome.streams.values())


def with_penalties(case: Case) -> Case:
    """Without grammars, and with a penalty in every request."""

    def changed(request: Request) -> Request:
        penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        kept = {name: getattr(request.sampling, name) for name in KEPT} | penalties
        return replace(request, sampling=SamplingParams(**(kept | {"structured_outputs": None})))

    arrivals = [
        replace(arrival, requests=tuple(map(changed, arrival.requests)))
        for arrival in plain(case, reads_tokens=True).arrivals
    ]
    return replace(plain(case, reads_tokens=True), arrivals=tuple(arrivals))


@pytest.mark.parametrize("has_penalties", [False, True])
def test_nothing_waits_before_the_next_step_is_told(
    has_penalties: bool, models: list[Model]
) -> None:
    """Of plain requests, and with penalties, each step is waited for once, and then the next one
    has been told with its token choice, unless there is none."""
    waits = idle = 0
    for number in range(NUM_CASES):
        first = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        drawn = with_penalties(first) if has_penalties else plain(first, reads_tokens=False)
        case = replace(drawn, number=1)  # nobody is held
        settings = replace(case.settings, plans_in_flight=2, max_samples=8, tier_blocks=0)
        outcome, device = run(models[case.model], replace(case, settings=settings))
        assert ("settle",) not in device.log
        told = [entry for entry in device.log if entry[0] == "wait"]
        assert len(told) == sum(len(plan.slots) > 0 for plan, _ in outcome.plans)
        waits += len(told)
        idle += sum(entry[1] == 1 for entry in told)
    assert waits > 10 * NUM_CASES
    assert idle < waits / 4, f"{idle} of {waits} waits with nothing told behind them"


def test_with_penalties_and_grammars_the_next_trunk_is_told_before_anything_waits(
    models: list[Model],
) -> None:
    """Of some its choice is told too; of those with a grammar only the trunk."""
    behind = unchosen = waits = 0
    for number in range(NUM_CASES):
        first = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        case = plain(first, reads_tokens=True)
        settings = replace(case.settings, plans_in_flight=2, max_samples=8, tier_blocks=0)
        _, device = run(models[case.model], replace(case, settings=settings))
        trunks = chosen = waited = 0
        for kind, *_ in device.log:
            trunks += kind == "trunk"
            chosen += kind == "choose"
            waited += kind == "wait"
            behind += kind == "wait" and trunks > waited
            unchosen += kind == "wait" and trunks > chosen
        waits += waited
    assert behind > waits * 0.75, f"{behind} of {waits} waits with a trunk behind them"
    assert unchosen > waits / 8, f"{unchosen} of {waits} waits with a trunk alone behind them"
