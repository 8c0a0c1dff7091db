"""Scores of known tokens: semantics, and the native kernel matches its NumPy reference bit
for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire import _native
from quire.base.sampling_checks import MAX_TOP_LOGPROBS
from quire.sampling import native_scoring, reference, scoring
from quire.sampling.scoring import FAILED, MAX_TOP, ScoreBatch, Scores
from tests.drawn import examples
from tests.kernels.isas import ISAS
from tests.kernels.sampling_cases import make_batch, random_logits

POOLS = [(isa, num_threads) for isa in ISAS for num_threads in (1, 2, 3)]
PARTS = ("logprobs", "ranks", "top_ids", "top_logprobs", "listed_logprobs")


def _batch(
    targets: list[int], num_top: list[int] | int = 0, listed: list[list[int]] | None = None
) -> ScoreBatch:
    rows = listed if listed is not None else [[] for _ in targets]
    return ScoreBatch(
        targets=np.array(targets, np.int32),
        num_top=np.broadcast_to(np.array(num_top, np.int32), len(targets)).copy(),
        listed_starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        listed_ids=np.array([id_ for row in rows for id_ in row], np.int32),
    )


def _random_batch(draw: np.random.Generator, num_rows: int, vocabulary: int) -> ScoreBatch:
    counts = draw.integers(0, 6, num_rows) * draw.integers(0, 2, num_rows)
    return _batch(
        draw.integers(-1, vocabulary, num_rows).tolist(),
        draw.choice([0, 0, 1, 2, 5, MAX_TOP], num_rows).tolist(),
        [draw.integers(0, vocabulary, count).tolist() for count in counts],
    )


def _take(batch: ScoreBatch, rows: NDArray[np.intp]) -> ScoreBatch:
    starts = batch.listed_starts
    return _batch(
        batch.targets[rows].tolist(),
        batch.num_top[rows].tolist(),
        [batch.listed_ids[starts[row] : starts[row + 1]].tolist() for row in rows],
    )


def _assert_same(actual: Scores, expected: Scores) -> None:
    for name in PARTS:
        one, other = getattr(actual, name), getattr(expected, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, err_msg=name)


def _both(logits: NDArray[np.float32], batch: ScoreBatch) -> list[Scores]:
    return [
        scoring.score(logits, batch),
        native_scoring.score(logits, batch, _native.Pool(2)),
    ]


def test_scores_are_log_probabilities_of_the_raw_logits() -> None:
    draw = np.random.default_rng(1)
    logits = (draw.standard_normal((5, 1000)) * 3).astype(np.float32)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    order = np.argsort(-exact, axis=1)
    targets = [int(order[row, rank]) for row, rank in enumerate((0, 1, 7, 500, 999))]
    for scores in _both(logits, _batch(targets, 3, [[4, 900, 4]] * 5)):
        np.testing.assert_allclose(scores.logprobs, exact[range(5), targets], atol=3e-6)
        assert scores.ranks.tolist() == [1, 2, 8, 501, 1000]
        np.testing.assert_array_equal(scores.top_ids, order[:, :3])
        listed = scores.listed_logprobs.reshape(5, 3)
        np.testing.assert_allclose(listed, exact[:, [4, 900, 4]], atol=3e-6)


def test_scores_have_the_bits_of_token_choice() -> None:
    draw = np.random.default_rng(2)
    logits = (draw.standard_normal((8, 777)) * 4).astype(np.float32)
    choice = reference.choose(
        logits, make_batch(8, temperature=1.0, seeds=range(8), num_logprobs=MAX_TOP)
    )
    for scores in _both(logits, _batch(choice.token_ids.tolist(), MAX_TOP)):
        np.testing.assert_array_equal(scores.logprobs, choice.logprobs)
        np.testing.assert_array_equal(scores.top_ids, choice.top_ids)
        np.testing.assert_array_equal(scores.top_logprobs, choice.top_logprobs)


def test_equal_logits_rank_by_id_and_impossible_ids_have_a_rank() -> None:
    logits = np.array([[2, 1, 2, -np.inf, 1, -np.inf]] * 6, np.float32)
    for scores in _both(logits, _batch([0, 2, 1, 4, 3, 5], 6)):
        assert scores.ranks.tolist() == [1, 2, 3, 4, 5, 6]
        assert scores.top_ids[0].tolist() == [0, 2, 1, 4, -1, -1]
        assert np.isnan(scores.top_logprobs[0, 4:]).all()
        assert scores.logprobs[4] == scores.logprobs[5] == -np.inf
        assert scores.logprobs[0] == scores.top_logprobs[0, 0]


@pytest.mark.parametrize("poison", [np.nan, np.inf, None])
def test_an_invalid_distribution_fails_its_row_alone(poison: float | None) -> None:
    draw = np.random.default_rng(3)
    logits = draw.standard_normal((3, 90)).astype(np.float32)
    fine = logits.copy()
    if poison is None:
        logits[1] = -np.inf
    else:
        logits[1, 89] = poison
    batch = _batch([3, 4, 5], 2, [[1], [2, 3], [4]])
    for scores, alone in zip(_both(logits, batch), _both(fine, batch), strict=True):
        assert scores.ranks[1] == FAILED
        assert np.isnan(scores.logprobs[1])
        assert scores.top_ids[1].tolist() == [-1, -1]
        assert np.isnan(scores.listed_logprobs[1:3]).all()
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(scores, name)[::2], getattr(alone, name)[::2])
        assert scores.listed_logprobs[[0, 3]].tolist() == alone.listed_logprobs[[0, 3]].tolist()


def test_no_requested_scores_return_none() -> None:
    logits = np.zeros((2, 4), np.float32)
    for scores in _both(logits, _batch([-1, 1])):
        assert np.isnan(scores.logprobs[0])
        assert scores.ranks.tolist() == [0, 2]
        assert scores.top_ids.shape == (2, 0)
        assert scores.listed_logprobs.shape == (0,)
    for scores in _both(np.zeros((0, 4), np.float32), _batch([])):
        assert len(scores.logprobs) == 0


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 12),
    vocabulary=st.sampled_from([1, 2, 3, 31, 32, 33, 63, 64, 65, 257, 1000, 5000]),
    pool=st.sampled_from(POOLS),
)
def test_any_batch_matches_the_reference(
    seed: int, num_rows: int, vocabulary: int, pool: tuple[str, int]
) -> None:
    draw = np.random.default_rng(seed)
    logits = random_logits(draw, num_rows, vocabulary)
    batch = _random_batch(draw, num_rows, vocabulary)
    scores = native_scoring.score(logits, batch, _native.Pool(pool[1], isa=pool[0]))
    _assert_same(scores, scoring.score(logits, batch))


@pytest.mark.parametrize(("isa", "num_threads"), POOLS)
def test_large_vocabularies_match_the_reference(isa: str, num_threads: int) -> None:
    draw = np.random.default_rng(num_threads)
    for vocabulary in (49_999, 150_001, 2**19):
        logits = random_logits(draw, 3, vocabulary)
        batch = _random_batch(draw, 3, vocabulary)
        scores = native_scoring.score(logits, batch, _native.Pool(num_threads, isa=isa))
        _assert_same(scores, scoring.score(logits, batch))


def test_row_count_order_and_threads_change_nothing() -> None:
    draw = np.random.default_rng(5)
    logits = random_logits(draw, 65, 700)
    batch = _random_batch(draw, 65, 700)
    whole = native_scoring.score(logits, batch, _native.Pool(1))
    for num_threads in (1, 2, 3):
        pool = _native.Pool(num_threads)
        for count in (1, 2, 3, 7, 64, 65):
            rows = draw.permutation(65)[:count]
            scores = native_scoring.score(logits[rows], _take(batch, rows), pool)
            width = scores.top_ids.shape[1]
            np.testing.assert_array_equal(scores.logprobs, whole.logprobs[rows])
            np.testing.assert_array_equal(scores.ranks, whole.ranks[rows])
            np.testing.assert_array_equal(scores.top_ids, whole.top_ids[rows, :width])
            np.testing.assert_array_equal(scores.top_logprobs, whole.top_logprobs[rows, :width])


def test_logits_are_read_in_place_and_never_written() -> None:
    draw = np.random.default_rng(8)
    buffer = draw.standard_normal((9, 400)).astype(np.float32)
    before = buffer.copy()
    batch = _random_batch(draw, 9, 301)
    pool = _native.Pool(2)
    for view in (buffer[:, 50:351], buffer[:, 350:49:-1]):
        _assert_same(native_scoring.score(view, batch, pool), scoring.score(view.copy(), batch))
    np.testing.assert_array_equal(buffer, before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": [5, 0]}, "targets holds 0 to 5; -1 to 4"),
        ({"targets": [-2, 0]}, "targets holds -2"),
        ({"num_top": [21, 0]}, "num_top holds 0 to 21; 0 to 20"),
        ({"num_top": [1]}, "1 num_top"),
        ({"listed_ids": [5]}, "listed_ids holds 5"),
        ({"listed_starts": [0, 1]}, "2 starts for 2 rows"),
        ({"listed_starts": [0, 0, 0]}, "do not span 1"),
        ({"listed_starts": [0, 2, 1]}, "do not span 1"),
    ],
)
def test_invalid_ids_and_shapes_are_rejected(changes: dict[str, Any], words: str) -> None:
    given = {"targets": [1, 2], "num_top": [0, 0], "listed_starts": [0, 0, 1], "listed_ids": [4]}
    arrays = {name: np.array(values, np.int32) for name, values in {**given, **changes}.items()}
    for refuse in (
        lambda: scoring.score(np.zeros((2, 5), np.float32), ScoreBatch(**arrays)),
        lambda: native_scoring.score(
            np.zeros((2, 5), np.float32), ScoreBatch(**arrays), _native.Pool(1)
        ),
    ):
        with pytest.raises(ValueError, match=words):
            refuse()


def test_the_limit_of_alternatives_agrees_everywhere() -> None:
    assert _native.MAX_SCORE_TOP == MAX_TOP == MAX_TOP_LOGPROBS
