"""Pooling in the runner: sums do not depend on chunks or slices, and failures stay alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.rare_records import POOL_SCALE, PooledSums
from quire.base.records import StepResult
from quire.base.sampling_params import SamplingParams
from quire.program.batch import ForwardBatch
from quire.runner.logprobs import joined_scores
from quire.runner.model_runner import ModelRunner
from quire.runner.pooling import MAX_VALUE, POOL_FAILED
from tests.cases import each_case
from tests.unit.runner.scripted_executor import ScriptedExecutor
from tests.unit.runner.test_logprobs import _admission, _run

PROMPT = [10, 11, 12, 13, 14, 15, 16]


class PoolingScript(ScriptedExecutor):
    """The hidden row of a token is [id, 1 / id, -id]; some ids have other values."""

    def __init__(self, odd: dict[int, float] | None = None) -> None:
        super().__init__()
        self.slices: list[int] = []
        self._odd = odd or {}

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        self.slices.append(count)
        ids = batch.token_ids[batch.sample_rows[first : first + count]].tolist()
        rows = [[self._odd.get(id_, id_), 1 / id_, -id_] for id_ in ids]
        return np.array(rows, np.float32)


def _pooled(slot: int, ids: list[int], *, scores_from: int = 0, **settings: Any) -> Any:
    sampling = {"max_tokens": 0, "pooling": "mean", "prompt_logprobs": None, **settings}
    return _admission(slot, ids, scores_from=scores_from, **sampling)


def _runner(executor: ScriptedExecutor, max_samples: int = 64) -> ModelRunner:
    return ModelRunner(
        executor, num_slots=8, max_model_len=64, block_size=16, max_samples=max_samples
    )


def _sums(result: StepResult) -> PooledSums:
    assert result.scores is not None
    assert result.scores.pooled is not None
    return result.scores.pooled


def _expected(ids: list[int]) -> list[int]:
    rows = np.array([[id_, 1 / id_, -id_] for id_ in ids], np.float32).astype(np.float64)
    return np.rint(rows * POOL_SCALE).astype(np.int64).sum(axis=0).tolist()


@each_case("max_samples", [1, 2, 3, 64])
@each_case("cuts", [(7,), (1, 6), (3, 2, 2), (1,) * 7])
def test_sums_depend_on_neither_chunks_nor_slices(cuts: tuple[int, ...], max_samples: int) -> None:
    executor = PoolingScript()
    runner = _runner(executor, max_samples)
    total, start, counted = np.zeros(3, np.int64), 0, 0
    for at, count in enumerate(cuts):
        admissions = (_pooled(2, PROMPT),) if at == 0 else ()
        result = _run(runner, [(2, start, count, False)], *admissions)
        total += _sums(result).sums[0]
        counted += int(_sums(result).counts[0])
        start += count
        assert len(result.token_ids) == 0
    assert total.tolist() == _expected(PROMPT)
    assert counted == len(PROMPT)
    assert max(executor.slices) <= max_samples


def test_rows_that_are_not_wanted_are_not_summed() -> None:
    runner = _runner(PoolingScript())
    last = _pooled(0, PROMPT, scores_from=6, pooling="last")
    rest = _pooled(3, PROMPT, scores_from=4)
    result = _run(runner, [(0, 0, 7, False), (1, 0, 3, True), (3, 2, 5, False)],
                  last, _admission(1, [20, 21, 22]), rest)  # fmt: skip
    sums = _sums(result)
    assert sums.rows.tolist() == [0, 2]
    assert sums.counts.tolist() == [1, 3]
    assert sums.sums.tolist() == [_expected(PROMPT[6:]), _expected(PROMPT[4:])]
    # The scored prompt beside them is scored as ever.
    assert result.score_counts.tolist() == [0, 2, 0]
    assert result.scores is not None
    assert result.scores.ranks.tolist() == [21, 22]
    assert result.token_counts.tolist() == [0, 1, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2 * MAX_VALUE])
def test_a_row_without_a_sum_fails_only_its_request(value: float) -> None:
    runner = _runner(PoolingScript({13: value}))
    others = [20, 21, 22]
    result = _run(
        runner, [(0, 0, 7, False), (1, 0, 3, False)], _pooled(0, PROMPT), _pooled(1, others)
    )
    assert [(error.row, error.message) for error in result.errors] == [(0, POOL_FAILED)]
    assert _sums(result).rows.tolist() == [1]
    assert _sums(result).sums.tolist() == [_expected(others)]


def test_an_executor_without_the_segment_fails_the_step() -> None:
    runner = _runner(ScriptedExecutor())
    with pytest.raises(WorkerError, match="no rows to pool"):
        _run(runner, [(0, 0, 7, False)], _pooled(0, PROMPT))


def test_parts_of_a_split_step_are_joined_with_their_rows() -> None:
    def part(ids: list[int]) -> Any:
        runner = _runner(PoolingScript({99: np.nan}))
        rows = [(0, 0, len(ids), False), (1, 0, 2, False)]
        plan_result = _run(runner, rows, _pooled(0, ids), _pooled(1, [5, 6]))
        assert plan_result.scores is not None
        from quire.runner.logprobs import ScoredRows

        failed = np.array([bool(plan_result.errors), False])
        return ScoredRows(
            counts=np.zeros(2, np.int32),
            failed=failed,
            scores=plan_result.scores,
            messages={0: POOL_FAILED} if plan_result.errors else {},
        )

    joined = joined_scores([part(PROMPT), None, part([99, 7])], [2, 1, 2])
    assert joined is not None
    pooled = joined.scores.pooled
    assert pooled is not None
    assert pooled.rows.tolist() == [0, 1, 4]
    assert pooled.sums.tolist() == [_expected(PROMPT), _expected([5, 6]), _expected([5, 6])]
    assert joined.messages == {3: POOL_FAILED}


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"pooling": "max", "max_tokens": 0}, "pooling"),
        ({"pooling": ["last"], "max_tokens": 0}, "pooling"),
        ({"pooling": "last"}, "max_tokens"),
        ({"pooling": "last", "max_tokens": 1}, "max_tokens"),
        ({"pooling": "mean", "max_tokens": 0, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"pooling": "mean", "max_tokens": 0, "n": 2}, "n"),
        ({"pooling": "mean", "max_tokens": 0, "logprob_token_ids": (1,)}, "logprob_token_ids"),
    ],
)
def test_parameters_that_exclude_pooling_are_refused(settings: dict[str, Any], param: str) -> None:
    from quire.base.errors import InvalidParameter

    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**settings)
    assert caught.value.param == param
