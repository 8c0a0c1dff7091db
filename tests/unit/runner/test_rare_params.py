"""Rarely used sampling parameters: from admissions to batches, and mirostat's mu in between."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_RULES, Admission, StepPlan, StepResult, TokenRules
from quire.base.sampling_params import SamplingParams
from quire.runner.model_runner import ModelRunner
from quire.runner.rare_params import RareParamsTables, ragged
from quire.sampling.batch import SampleBatch, TokenChoice
from tests.cases import each_case
from tests.unit.runner.scripted_executor import ScriptedExecutor

RULES = TokenRules(banned_sequences=((4,), (5, 6)), breaker_ids=(7, 8))


def _admission(
    slot: int, *, rules: TokenRules = NO_RULES, mu: float | None = None, **settings: Any
) -> Admission:
    return Admission(
        slot=slot,
        request_id=f"r{slot}",
        stream=0,
        token_ids=np.array([1, 2, 3], np.int32),
        num_prompt_tokens=3,
        stop_ids=(),
        sampling=SamplingParams(seed=1, **settings),
        rules=rules,
        mirostat_mu=mu,
    )


def _ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_plain_rows_have_no_rare_parameters() -> None:
    tables = RareParamsTables(4)
    tables.admit(_admission(2, temperature=0.5, top_k=3, logit_bias={1: 2.0}))
    assert not tables.uses[_ints(2, 1)].any()
    tables.admit(_admission(1, typical_p=0.5))
    assert not tables.uses[2]
    assert tables.uses[_ints(2, 1)].tolist() == [False, True]


@each_case(
    "fields",
    [
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0},
        {"epsilon_cutoff": 0.1},
        {"eta_cutoff": 0.1},
        {"xtc_probability": 0.1},
        {"dry_multiplier": 0.1},
        {"no_repeat_ngram_size": 2},
        {"mirostat": 2},
        {"mirostat": 1},
        {"samplers": ("top_k", "temperature")},
        {"allowed_token_ids": (3,)},
        {"rules": RULES},
    ],
)
def test_each_of_them_makes_a_row_rare_until_it_retires(fields: dict[str, Any]) -> None:
    tables = RareParamsTables(2)
    tables.admit(_admission(1, **fields))
    assert tables.uses.tolist() == [False, True]
    tables.retire(1)
    assert not tables.uses.any()
    assert not tables.has_history.any()
    tables.admit(_admission(0, typical_p=0.5))
    left, plain = tables.parameters(_ints(1, 0)), tables.parameters(_ints(0, 0))
    assert left is not None
    assert plain is not None
    names = [item.name for item in dataclasses.fields(left)]
    parts = {name for name in names if getattr(left, name) is not None}
    assert parts == {"truncation"}
    assert left.truncation is not None
    assert left.truncation.typical_p.tolist() == [1.0, 0.5]


def test_ragged_arrays_belong_to_their_rows() -> None:
    tables = RareParamsTables(3)
    tables.admit(_admission(0, rules=RULES, dry_multiplier=0.8))
    tables.admit(_admission(1, allowed_token_ids=(9, 3)))
    tables.admit(_admission(2, rules=replace(RULES, banned_sequences=((1, 2, 3),))))
    rare = tables.parameters(_ints(2, 1, 0))
    assert rare is not None
    assert rare.banned_sequences is not None
    assert rare.banned_sequences.rows.tolist() == [0, 1, 1, 3]
    assert rare.banned_sequences.tokens.starts.tolist() == [0, 3, 4, 6]
    assert rare.banned_sequences.tokens.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert rare.allowed is not None
    assert rare.allowed.starts.tolist() == [0, 0, 2, 2]
    assert rare.allowed.ids.tolist() == [9, 3]
    assert rare.dry is not None
    assert rare.dry.breakers.starts.tolist() == [0, 2, 2, 4]
    assert tables.has_history.tolist() == [True, False, True]


def test_mu_begins_at_twice_tau_or_at_the_requests_last_value() -> None:
    tables = RareParamsTables(2)
    tables.admit(_admission(0, mirostat=2, mirostat_tau=3.0))
    tables.admit(_admission(1, mirostat=2, mu=-1.25))
    assert tables.mirostat_mu.tolist() == [6.0, -1.25]


class Steering(ScriptedExecutor):
    """Move the mu of each row with mirostat by 1."""

    def sample(self, logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
        choice = super().sample(logits, batch)
        mirostat = None if batch.rare is None else batch.rare.mirostat
        if mirostat is None:
            return choice
        mus = np.where(mirostat.mode == 2, mirostat.mu + np.float32(1), 0)
        return replace(choice, mus=mus.astype(np.float32))


def _step(runner: ModelRunner, number: int, start: int, **more: Any) -> StepResult:
    count = 3 if start == 0 else 1
    plan = StepPlan(
        step=number,
        slots=_ints(0, 1, 2),
        starts=_ints(start, start, start),
        counts=_ints(count, count, count),
        store_from=_ints(start, start, start),
        sample_counts=np.ones(3, np.int32),
        **more,
    )
    return runner.collect(runner.submit(plan))


def test_mu_is_kept_between_steps_and_reported_for_all_rows_of_all_slices() -> None:
    executor = Steering()
    runner = ModelRunner(executor, num_slots=3, max_model_len=32, block_size=16, max_samples=2)
    admissions = (
        _admission(0, mirostat=2, mirostat_tau=2.0),
        _admission(1),
        _admission(2),
    )
    first = _step(runner, 1, 0, admissions=admissions)
    assert first.mirostat_mus.tolist() == [5.0, 0.0, 0.0]
    second = _step(runner, 2, 3)
    assert second.mirostat_mus.tolist() == [6.0, 0.0, 0.0]
    assert runner.tables.rare.mirostat_mu.tolist() == [6.0, 0.0, 0.0]
    plain = StepPlan(
        step=3,
        slots=_ints(1),
        starts=_ints(4),
        counts=_ints(1),
        store_from=_ints(4),
        sample_counts=np.ones(1, np.int32),
    )
    assert len(runner.collect(runner.submit(plain)).mirostat_mus) == 0
    assert runner.tables.rare.mirostat_mu[0] == 6.0


def test_a_failed_row_moves_no_mu() -> None:
    executor = Steering(lambda positions: _ints(-1, 4, 4)[: len(positions)])
    runner = ModelRunner(executor, num_slots=3, max_model_len=32, block_size=16, max_samples=8)
    admissions = tuple(_admission(slot, mirostat=2) for slot in range(3))
    result = _step(runner, 1, 0, admissions=admissions)
    assert result.mirostat_mus.tolist() == [11.0, 11.0]
    assert [error.row for error in result.errors] == [0]
    assert runner.tables.rare.mirostat_mu.tolist() == [10.0, 11.0, 11.0]


def test_rows_without_rare_parameters_mix_with_rows_with_some() -> None:
    tables = RareParamsTables(4)
    tables.admit(_admission(0))
    tables.admit(_admission(1, rules=RULES))
    tables.admit(_admission(2))
    tables.admit(_admission(3, allowed_token_ids=(9, 3), typical_p=0.5))
    rare = tables.parameters(_ints(0, 3, 2, 1, 0))
    assert rare is not None
    assert rare.allowed is not None
    assert rare.allowed.starts.tolist() == [0, 0, 2, 2, 2, 2]
    assert rare.banned_sequences is not None
    assert rare.banned_sequences.rows.tolist() == [0, 0, 0, 0, 2, 2]
    assert rare.truncation is not None
    assert rare.truncation.typical_p.tolist() == [1.0, 0.5, 1.0, 1.0, 1.0]
    assert (rare.dry, rare.mirostat, rare.ngram_size) == (None, None, None)


def test_what_few_rows_have_is_put_at_their_places() -> None:
    some = ragged([_ints(5, 6), _ints(), _ints(7)], np.array([1, 2, 4]), 6)
    assert some.starts.tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert some.ids.tolist() == [5, 6, 7]
    assert [some[row].tolist() for row in (0, 1, 2, 4)] == [[], [5, 6], [], [7]]
    taken = some.take(np.array([4, 0, 1]))
    assert (taken.starts.tolist(), taken.ids.tolist()) == ([0, 1, 1, 3], [7, 5, 6])
    none = ragged([], np.empty(0, np.intp), 2)
    assert (none.starts.tolist(), none.ids.tolist()) == ([0, 0, 0], [])
