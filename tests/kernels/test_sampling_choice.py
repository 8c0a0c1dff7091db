"""Sampling semantics of both implementations: the NumPy reference and the native kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.runner.slot_tables import SMALLEST_TOP_P
from quire.sampling import native, reference
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.noise import gumbel
from quire.sampling.parts import WHOLE
from tests.drawn import examples
from tests.kernels.sampling_cases import make_batch

Choose = Callable[[NDArray[np.float32], SampleBatch], TokenChoice]


@pytest.fixture(params=["reference", "native"])
def choose(request: pytest.FixtureRequest) -> Choose:
    if request.param == "reference":
        return reference.choose
    pool = _native.Pool(2)
    return lambda logits, batch: native.choose(logits, batch, pool)


def f32(*rows: list[float]) -> NDArray[np.float32]:
    return np.array(rows, np.float32)


def tokens_drawn(choose: Choose, row: list[float], **given: object) -> set[int]:
    """Return the tokens that 500 seeds choose from one row of logits."""
    batch = make_batch(500, temperature=given.pop("temperature", 1.0), seeds=range(500), **given)
    return set(choose(np.tile(f32(row), (500, 1)), batch).token_ids.tolist())


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_ties(choose: Choose) -> None:
    logits = f32([1, 3, 2, 3], [-1, -0.0, 0.0, -2], [5, 5, 5, 5], [-np.inf, -3, -np.inf, -9])
    assert choose(logits, make_batch(4)).token_ids.tolist() == [1, 1, 0, 1]


def test_sampling_is_the_largest_of_scaled_logit_plus_noise(choose: Choose) -> None:
    draw = np.random.default_rng(0)
    logits = draw.standard_normal((40, 500)).astype(np.float32)
    batch = make_batch(40, temperature=0.7, seeds=range(40), streams=2, positions=range(9, 49))
    chosen = choose(logits, batch).token_ids
    for row in range(40):
        noise = gumbel(row, 2, 9 + row, token_ids=np.arange(500))
        assert chosen[row] == np.argmax(logits[row] / np.float32(0.7) + noise)


def test_token_frequencies_match_their_probabilities(choose: Choose) -> None:
    row = np.array([2.0, 1.0, 0.0, -1.0, -30.0], np.float32)
    draws = 40_000 if choose is not reference.choose else examples(40_000)
    batch = make_batch(draws, temperature=1.0, seeds=77, positions=range(draws))
    counts = np.bincount(choose(np.tile(row, (draws, 1)), batch).token_ids, minlength=5)
    expected = np.exp(row) / np.exp(row).sum() * draws
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected) + 1).all()


def test_top_k_keeps_the_k_largest_and_the_lower_ids_of_ties(choose: Choose) -> None:
    assert tokens_drawn(choose, [1, 2, 2, 0, 2], top_k=2) == {1, 2}
    assert tokens_drawn(choose, [1, 2, 2, 0, 2], top_k=4) == {0, 1, 2, 4}
    assert tokens_drawn(choose, [1, 2, 2, 0, 2], top_k=1) == {1}
    assert tokens_drawn(choose, [0, 0, 0], top_k=99) == {0, 1, 2}


def test_top_p_keeps_the_shortest_prefix_that_reaches_it(choose: Choose) -> None:
    row = np.log([0.25, 0.5, 0.125, 0.125]).tolist()
    assert tokens_drawn(choose, row, top_p=0.4) == {1}
    assert tokens_drawn(choose, row, top_p=0.6) == {0, 1}
    assert tokens_drawn(choose, row, top_p=0.8) == {0, 1, 2}
    assert tokens_drawn(choose, row, top_p=0.95) == {0, 1, 2, 3}


def test_the_smallest_top_p_keeps_the_most_likely_token(choose: Choose) -> None:
    assert tokens_drawn(choose, [1, 3, 3, 2], top_p=SMALLEST_TOP_P) == {1}


def test_top_p_reached_exactly_needs_no_further_token(choose: Choose) -> None:
    assert tokens_drawn(choose, [0, 0, 0, 0], top_p=0.5) == {0, 1}
    assert tokens_drawn(choose, [0, 0, 0, 0], top_p=0.25) == {0}
    assert tokens_drawn(choose, [0, 0, 0, 0], top_p=0.2500001) == {0, 1}


def test_top_p_is_applied_after_top_k_and_min_p(choose: Choose) -> None:
    row = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert tokens_drawn(choose, row, top_p=0.55) == {0, 1}
    assert tokens_drawn(choose, row, top_p=0.55, top_k=2) == {0}
    assert tokens_drawn(choose, row, top_p=0.99, min_p=0.6) == {0, 1}


def test_min_p_drops_what_is_far_below_the_largest(choose: Choose) -> None:
    row = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert tokens_drawn(choose, row, min_p=0.4) == {0, 1, 2}
    assert tokens_drawn(choose, row, min_p=1.0) == {0}


def test_temperature_comes_before_the_filters(choose: Choose) -> None:
    row = np.log([0.6, 0.3, 0.1]).tolist()
    assert tokens_drawn(choose, row, min_p=0.4) == {0, 1}
    assert tokens_drawn(choose, row, min_p=0.4, temperature=0.5) == {0}


@pytest.mark.parametrize("temperature", [1e-13, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy(choose: Choose, temperature: float) -> None:
    assert tokens_drawn(choose, [1, 2, 3, 2.9999998], temperature=temperature) == {2}


def test_edits_are_bias_then_penalties_then_bans(choose: Choose) -> None:
    history = [[0, 0, 1, 2, 2, 2]]  # prompt 0, 0, 1; output 2, 2, 2

    def best(logits: list[float], **given: object) -> int:
        batch = make_batch(1, history=history, num_prompt_tokens=3, **given)
        return int(choose(f32(logits), batch).token_ids[0])

    assert best([1, 0, 0, 0], bias=[[(3, 1.5)]]) == 3
    assert best([3, 0, 0, 2], repetition_penalty=2.0) == 3  # 3 / 2 < 2
    assert best([-1, -9, -9, -1.5], repetition_penalty=2.0) == 3  # -1 * 2 < -1.5
    assert best([2, 2, 3, 2], presence_penalty=1.5) == 0  # the prompt is not counted
    assert best([2, 0, 3, 0], frequency_penalty=0.5) == 0  # 3 - 3 * 0.5 < 2
    assert best([2, 0, 3, 0], frequency_penalty=0.25) == 2
    assert best([5, 4, 0, 0], banned=[[0]], bias=[[(0, 9.0)]]) == 1
    assert best([3, 0, 0, 2], repetition_penalty=2.0, bias=[[(0, 2.0)]]) == 0  # (3 + 2) / 2


def test_a_window_counts_the_last_tokens_of_prompt_and_output(choose: Choose) -> None:
    """Bit for bit what the same penalties make of a history of these tokens only, all of output."""
    draw = np.random.default_rng(8)
    logits = (draw.standard_normal((60, 12)) * 3).astype(np.float32)
    history = [draw.integers(0, 12, draw.integers(0, 30)).tolist() for _ in range(60)]
    windows = draw.choice([-1, 0, 1, 2, 7, 100], 60)
    penalties = {
        "repetition_penalty": draw.choice([1, 1.3, 0.7], 60),
        "presence_penalty": draw.choice([0, 1.5], 60),
        "frequency_penalty": draw.choice([0, 0.4, -0.2], 60),
        "temperature": 1.0,
        "seeds": range(60),
    }
    seen = [
        row if last_n < 0 else row[max(0, len(row) - last_n) :]
        for row, last_n in zip(history, windows, strict=True)
    ]
    prompts = [len(row) // 2 for row in history]
    windowed = make_batch(
        60, history=history, num_prompt_tokens=prompts, last_n=windows, **penalties
    )
    chosen = choose(logits, windowed).token_ids
    plain = make_batch(60, history=seen, num_prompt_tokens=0, **penalties)
    np.testing.assert_array_equal(chosen, choose(logits, plain).token_ids)
    whole = make_batch(60, history=history, num_prompt_tokens=prompts, **penalties)
    assert (choose(logits, whole).token_ids != chosen).any()
    same = make_batch(60, history=history, num_prompt_tokens=prompts, last_n=WHOLE, **penalties)
    np.testing.assert_array_equal(choose(logits, whole).token_ids, choose(logits, same).token_ids)


def test_logprobs_are_of_the_raw_logits(choose: Choose) -> None:
    logits = f32([2, 1, 0, -1])
    batch = make_batch(1, temperature=3.0, bias=[[(3, 50.0)]], num_logprobs=2)
    choice = choose(logits, batch)
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert choice.token_ids.tolist() == [3]
    np.testing.assert_allclose(choice.logprobs, expected[3:], atol=1e-6)
    assert choice.top_ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(choice.top_logprobs[0], expected[:2], atol=1e-6)


@pytest.mark.parametrize("vocabulary", [3, 1000, 150_000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 20.0])
def test_logprobs_are_within_1e_5(choose: Choose, vocabulary: int, spread: float) -> None:
    draw = np.random.default_rng(vocabulary)
    logits = (draw.standard_normal((2, vocabulary)) * spread).astype(np.float32)
    choice = choose(logits, make_batch(2, num_logprobs=3))
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    rows = np.arange(2)[:, None]
    np.testing.assert_allclose(choice.top_logprobs, exact[rows, choice.top_ids], atol=1e-5)
    np.testing.assert_allclose(choice.logprobs, exact.max(axis=1), atol=1e-5)


def test_alternatives_are_best_first_then_by_id_and_never_impossible(choose: Choose) -> None:
    logits = f32([1, 2, 2, -np.inf, 3], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5], [4, 3, 2, 1, 0])
    choice = choose(logits, make_batch(4, num_logprobs=[5, 3, -1, 0]))
    nothing = [-1] * 5
    assert choice.top_ids.tolist() == [[4, 1, 2, 0, -1], [0, 1, 2, -1, -1], nothing, nothing]
    assert np.isnan(choice.top_logprobs[choice.top_ids < 0]).all()
    assert np.isnan(choice.logprobs).tolist() == [False, False, True, False]


def test_a_failed_row_fails_alone(choose: Choose) -> None:
    logits = np.tile(f32([1, 5, 3, 2]), (7, 1))
    logits[1, 2] = np.nan
    logits[2] = -np.inf
    logits[3, 0] = np.inf
    logits[4, 1] = np.nan  # banned below, and still a failure
    banned = [[], [], [], [], [1], [0, 1, 2, 3], []]
    for temperature in (0.0, 1.0):
        batch = make_batch(7, temperature=temperature, banned=banned, num_logprobs=2, top_k=1)
        choice = choose(logits, batch)
        assert choice.token_ids.tolist() == [1, -1, -1, -1, -1, -1, 1]
        failed = choice.token_ids < 0
        assert np.isnan(choice.logprobs[failed]).all()
        assert (choice.top_ids[failed] == -1).all()
        assert np.isfinite(choice.top_logprobs[~failed]).all()


def test_overflow_by_parameters_fails_the_row(choose: Choose) -> None:
    batch = make_batch(
        2, temperature=[1e-10, 1.0], repetition_penalty=[1.0, 1e-30], history=[[0], [0]]
    )
    logits = f32([1e30, 0], [1e20, 0])
    assert choose(logits, batch).token_ids.tolist() == [-1, -1]


def test_an_empty_batch_is_accepted(choose: Choose) -> None:
    choice = choose(np.empty((0, 10), np.float32), make_batch(0))
    assert choice.token_ids.shape == (0,)
    assert choice.top_ids.shape == (0, 0)


def test_inconsistent_shapes_are_rejected(choose: Choose) -> None:
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"\[1, vocabulary\]"):
        choose(logits, make_batch(1))
    with pytest.raises(ValueError, match="float64"):
        choose(logits.astype(np.float64), make_batch(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"history\.tokens holds ids from 0 to 8"):
        choose(logits, make_batch(2, history=[[0], [8]]))
    with pytest.raises(ValueError, match="banned holds ids from -1"):
        choose(logits, make_batch(2, banned=[[-1], []]))
    with pytest.raises(ValueError, match="vocabulary of 524289"):
        choose(np.zeros((1, 2**19 + 1), np.float32), make_batch(1))
