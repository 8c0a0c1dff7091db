"""Scoring in the runner: positions, slices of the head, and failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.base.records import Admission, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.runner.model_runner import ModelRunner
from quire.runner.row_errors import NOT_FINITE
from tests.unit.runner.scripted_executor import FAILS, ScriptedExecutor


def _runner(executor: ScriptedExecutor, max_samples: int = 64) -> ModelRunner:
    return ModelRunner(
        executor, num_slots=8, max_model_len=64, block_size=16, max_samples=max_samples
    )


def _admission(
    slot: int, token_ids: list[int], *, scores_from: int | None = 0, **settings: Any
) -> Admission:
    num_prompt_tokens = settings.pop("num_prompt_tokens", len(token_ids))
    return Admission(
        slot=slot,
        request_id=f"r{slot}",
        stream=0,
        token_ids=np.array(token_ids, np.int32),
        num_prompt_tokens=num_prompt_tokens,
        stop_ids=(),
        sampling=SamplingParams(**{"seed": 7, "prompt_logprobs": 0, **settings}),
        scores_from=scores_from,
    )


def _run(
    runner: ModelRunner, rows: list[tuple[int, int, int, bool]], *admissions: Admission
) -> StepResult:
    """rows: (slot, start, count, samples)."""
    slots, starts, counts, samples = (np.array(column) for column in zip(*rows, strict=True))
    plan = StepPlan(
        step=1,
        admissions=admissions,
        table_slots=np.repeat(np.arange(8, dtype=np.int32), 4),
        table_columns=np.tile(np.arange(4, dtype=np.int32), 8),
        table_blocks=np.arange(32, dtype=np.int32),
        slots=slots.astype(np.int32),
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        sample_counts=samples.astype(np.int32),
        store_from=starts.astype(np.int32),
    )
    return runner.collect(runner.submit(plan))


def _ranks(result: StepResult) -> list[list[int]]:
    """Return ranks by row of the plan."""
    assert result.scores is not None
    ends = np.cumsum(result.score_counts)[:-1]
    return [part.tolist() for part in np.split(result.scores.ranks, ends)]


def test_each_position_of_a_prompt_scores_the_token_after_it() -> None:
    executor = ScriptedExecutor()
    runner = _runner(executor)
    first = _run(
        runner,
        [(3, 0, 4, False), (1, 0, 3, True), (2, 0, 2, True)],
        _admission(3, [10, 11, 12, 13, 14, 15]),
        _admission(1, [20, 21, 22]),
        _admission(2, [30, 31], scores_from=None),
    )
    assert _ranks(first) == [[11, 12, 13, 14], [21, 22], []]
    assert first.token_counts.tolist() == [0, 1, 1]
    second = _run(runner, [(3, 4, 2, True), (1, 3, 1, True), (2, 2, 1, True)])
    assert _ranks(second) == [[15], [], []]
    third = _run(runner, [(3, 6, 1, True), (1, 4, 1, True)])
    assert third.scores is None
    assert len(third.score_counts) == 0


def test_scoring_continues_where_it_stopped_and_never_beyond_the_prompt() -> None:
    runner = _runner(ScriptedExecutor())
    result = _run(
        runner,
        [(0, 1, 7, True)],
        _admission(0, list(range(10, 18)), scores_from=3, num_prompt_tokens=6),
    )
    assert _ranks(result) == [[14, 15]]


@pytest.mark.parametrize("max_samples", [1, 2, 3, 64])
def test_the_head_runs_on_slices_and_the_result_does_not_depend_on_them(max_samples: int) -> None:
    executor = ScriptedExecutor()
    result = _run(
        _runner(executor, max_samples),
        [(0, 0, 6, True), (5, 0, 4, False)],
        _admission(0, list(range(10, 16)), prompt_logprobs=2),
        _admission(5, list(range(20, 30)), prompt_logprobs=3),
    )
    assert _ranks(result) == [[11, 12, 13, 14, 15], [21, 22, 23, 24]]
    assert result.scores is not None
    assert result.scores.top_ids.shape == (9, 3)
    assert result.scores.top_ids[:5].tolist() == [[id_, id_, -1] for id_ in range(11, 16)]
    assert result.scores.logprobs.tolist() == [-float(rank) for rank in result.scores.ranks]
    assert max(count for _, count in executor.heads) <= max_samples
    assert sum(count for _, count in executor.heads) == 9 + 1


def test_a_prompt_row_without_a_distribution_fails_only_its_request() -> None:
    runner = _runner(ScriptedExecutor())
    result = _run(
        runner,
        [(0, 0, 3, True), (1, 0, 3, True), (2, 0, 2, False)],
        _admission(0, [10, 11, 12]),
        _admission(1, [20, FAILS, 22]),
        _admission(2, [30, FAILS, 32]),
    )
    assert [(error.row, error.message) for error in result.errors] == [
        (1, NOT_FINITE),
        (2, NOT_FINITE),
    ]
    assert _ranks(result) == [[11, 12], [], []]
    assert result.token_counts.tolist() == [1, 0, 0]
    assert result.token_ids.tolist() == [3]
    assert runner.tables.tokens.lengths[:2].tolist() == [4, 3]  # no token for the failed row


@pytest.mark.parametrize("max_samples", [1, 2, 64])
def test_listed_ids_are_scored_with_each_token_of_requests_that_list_them(max_samples: int) -> None:
    executor = ScriptedExecutor()
    result = _run(
        _runner(executor, max_samples),
        [(0, 0, 2, True), (1, 0, 2, True), (2, 0, 2, True)],
        _admission(0, [1, 2], scores_from=None, logprob_token_ids=(9, 5, 9)),
        _admission(1, [1, 2], scores_from=None),
        _admission(2, [1, 2], scores_from=None, logprob_token_ids=(7,)),
    )
    nan = np.nan
    np.testing.assert_array_equal(
        result.listed_logprobs, [[-9, -5, -9], [nan, nan, nan], [-7, nan, nan]]
    )
    assert result.scores is None
    # not for requests without listed ids
    assert sum(len(batch.targets) for batch in executor.scored) == 2


def test_steps_look_for_prompts_to_score_only_while_a_slot_needs_it() -> None:
    runner = _runner(ScriptedExecutor())
    _run(runner, [(0, 0, 2, True)], _admission(0, [1, 2], scores_from=None))
    assert runner.tables.num_scoring == 0
    _run(runner, [(1, 0, 2, True), (2, 0, 2, True)], _admission(1, [1, 2]), _admission(2, [1, 2]))
    assert runner.tables.num_scoring == 2
    _run(runner, [(1, 0, 2, True)], _admission(1, [1, 2]))  # a slot admitted again counts once
    assert runner.tables.num_scoring == 2
    ends = StepPlan(step=2, retired=np.array([0, 1, 2], np.int32))
    runner.collect(runner.submit(ends))
    assert runner.tables.num_scoring == 0


def test_a_released_slot_drops_its_scoring_parameters() -> None:
    runner = _runner(ScriptedExecutor())
    _run(runner, [(0, 0, 2, True)], _admission(0, [1, 2], logprob_token_ids=(9,)))
    result = _run(
        runner,
        [(0, 0, 3, True)],
        _admission(0, [1, 2, 3], scores_from=None, prompt_logprobs=None),
    )
    assert result.scores is None
    assert result.listed_logprobs.shape == (1, 0)
