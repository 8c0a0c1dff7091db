"""One Answer on an asynchronous device: step N+1 is submitted before the tokens of step N are read.

Every request must get what it gets alone, one step at a time, on the host. The cases are those of
test_one_answer.py, as drawn and again without what prevents overlap (rare sampling parameters,
prompt scores, beams). QUIRE_OVERLAP_CASES draws more.
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

NUM_CASES = int(os.environ.get("QUIRE_OVERLAP_CASES", "12"))
KEPT = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "repeat_last_n", "logit_bias", "seed", "min_tokens", "logprobs"),
    "structured_outputs",
)


def plain(case: Case, *, reads_tokens: bool) -> Case:
    """Drop what is sampled on the host from the case; keep penalties with `reads_tokens`."""

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
    """Allow two, sometimes three, plans in flight; most tiers are in host memory, some on disk."""
    in_flight, in_host = 3 if number % 5 == 4 else 2, number % 4 != 3
    settings = replace(case.settings, plans_in_flight=in_flight, tier_in_host=in_host)
    return replace(case, settings=settings)


DRAWS: dict[str, Callable[[Case], Case]] = {
    "as drawn": lambda case: case,
    "with penalties and grammars": lambda case: plain(case, reads_tokens=True),
    "with penalties": lambda case: with_penalties(case),
    "plain": lambda case: plain(case, reads_tokens=False),
}


def run(
    model: Model, case: Case, alone: AloneRuns | None = None
) -> tuple[Outcome, DeferredExecutor]:
    """Run the case and return its outcome and the device."""
    devices: list[DeferredExecutor] = []

    def wrap(executor: Executor) -> Executor:
        devices.append(DeferredExecutor(executor))
        return cast(Executor, devices[-1])

    return run_case(model, case, wrap_executor=wrap, alone=alone), devices[0]


@pytest.mark.parametrize("drawn", DRAWS)
def test_overlapped_requests_match_requests_run_alone(
    drawn: str, models: list[Model], alone: AloneRuns
) -> None:
    if drawn != "as drawn":  # changed requests have the names of those as drawn
        alone = AloneRuns()
    lines, seen = [], dict.fromkeys(SEEN, 0)
    missed = list(SEEN)
    for number in range(3 * NUM_CASES):
        if number >= NUM_CASES and not missed:
            break  # further cases only where a tier, which may be late, had too little in time
        first = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        case = overlapped(DRAWS[drawn](first), number)
        outcome, device = run(models[case.model], case, alone)
        lines += differences(models[case.model], outcome, alone)
        for name, is_seen in SEEN.items():
            seen[name] += is_seen(outcome, device.log)
        missed = [name for name, count in seen.items() if count < NUM_CASES / 24]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:10])
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
    "accepted drafts": lambda outcome, _: outcome.accepted,
    "rejected drafts": lambda outcome, _: outcome.rejected,
    "fetched from it": lambda outcome, _: outcome.fetched and outcome.case.settings.tier_in_host,
}


def _drops(outcome: Outcome) -> bool:
    """Return whether more tokens were sampled than streams received."""
    chosen = sum(len(result.token_ids) for _, result in outcome.plans)
    return chosen > sum(len(stream.tokens) for stream in outcome.streams.values())


def with_penalties(case: Case) -> Case:
    """Drop grammars and add a penalty to every request."""

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
def test_each_wait_follows_the_submission_of_the_next_step(
    has_penalties: bool, models: list[Model]
) -> None:
    """Each step is waited for once, after the next step and its sampling have been submitted."""
    waits = idle = 0
    for number in range(NUM_CASES // 2):
        first = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        drawn = with_penalties(first) if has_penalties else plain(first, reads_tokens=False)
        case = replace(drawn, number=1)  # no stream is paused
        settings = replace(
            case.settings, plans_in_flight=2, max_samples=8, tier_blocks=0, proposer=""
        )
        outcome, device = run(models[case.model], replace(case, settings=settings))
        assert ("settle",) not in device.log
        logged = [entry for entry in device.log if entry[0] == "wait"]
        assert len(logged) == sum(len(plan.slots) > 0 for plan, _ in outcome.plans)
        waits += len(logged)
        idle += sum(entry[1] == 1 for entry in logged)
    assert waits > 5 * NUM_CASES
    assert idle < waits / 4, f"{idle} of {waits} waits with nothing submitted behind them"


def test_with_penalties_and_grammars_waits_follow_the_next_forward_pass(
    models: list[Model],
) -> None:
    """The next forward pass is always submitted before a wait; for requests with grammars its
    sampling is not, for the others it is.
    """
    behind = unchosen = waits = 0
    for number in range(NUM_CASES // 2):
        first = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        case = plain(first, reads_tokens=True)
        settings = replace(
            case.settings, plans_in_flight=2, max_samples=8, tier_blocks=0, proposer=""
        )
        _, device = run(models[case.model], replace(case, settings=settings))
        trunks = chosen = waited = 0
        for kind, *_ in device.log:
            trunks += kind == "trunk"
            chosen += kind == "choose"
            waited += kind == "wait"
            behind += kind == "wait" and trunks > waited
            unchosen += kind == "wait" and trunks > chosen
        waits += waited
    assert behind > waits * 0.75, (
        f"{behind} of {waits} waits with a forward pass submitted behind them"
    )
    assert unchosen > waits / 8, f"{unchosen} of {waits} waits with only a forward pass behind them"
