"""Native sampling matches its NumPy reference bit for bit for any threads, rows and row order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.sampling import native, reference
from tests.drawn import examples
from tests.kernels.isas import ISAS
from tests.kernels.sampling_cases import (
    assert_same_choice,
    make_batch,
    random_batch,
    random_logits,
    take_rows,
)

POOLS = [(isa, num_threads) for isa in ISAS for num_threads in (1, 2, 3)]


@settings(max_examples=examples(250), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 12),
    vocabulary=st.sampled_from([1, 2, 3, 31, 32, 33, 255, 256, 257, 1000, 5000]),
    pool=st.sampled_from(POOLS),
)
def test_any_batch_matches_the_reference(
    seed: int, num_rows: int, vocabulary: int, pool: tuple[str, int]
) -> None:
    draw = np.random.default_rng(seed)
    logits = random_logits(draw, num_rows, vocabulary)
    batch = random_batch(draw, num_rows, vocabulary)
    choice = native.choose(logits, batch, _native.Pool(pool[1], isa=pool[0]))
    assert_same_choice(choice, reference.choose(logits, batch))


@pytest.mark.parametrize(("isa", "num_threads"), POOLS)
def test_rows_split_over_threads_match_the_reference(isa: str, num_threads: int) -> None:
    draw = np.random.default_rng(num_threads)
    for vocabulary in (32_768, 49_999, 150_001):
        logits = random_logits(draw, 3, vocabulary)
        batch = random_batch(draw, 3, vocabulary)
        choice = native.choose(logits, batch, _native.Pool(num_threads, isa=isa))
        assert_same_choice(choice, reference.choose(logits, batch))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("fill", ["equal", "two values", "falling", "one peak"])
def test_adversarial_rows_match_the_reference(num_threads: int, fill: str) -> None:
    vocabulary = 40_000
    row = np.zeros(vocabulary, np.float32)
    if fill == "two values":
        row[::3] = 1e-7
    elif fill == "falling":
        row = -np.arange(vocabulary, dtype=np.float32) / 1024  # bin borders are met exactly
    elif fill == "one peak":
        row[vocabulary // 2] = 60.0
    top_p = np.array([0.1, 0.25, 0.5, 0.75, 0.999, 0.9999999], np.float32)
    for top_k in (0, 1, 7, 20_000, 39_999, 40_000):
        batch = make_batch(
            6, temperature=1.0, top_p=top_p, top_k=top_k, seeds=range(6), num_logprobs=20
        )
        logits = np.tile(row, (6, 1))
        choice = native.choose(logits, batch, _native.Pool(num_threads))
        assert_same_choice(choice, reference.choose(logits, batch))


def test_row_count_order_and_threads_change_nothing() -> None:
    draw = np.random.default_rng(5)
    logits = random_logits(draw, 65, 700)
    num_logprobs = draw.choice([-1, 20, 20], 65).astype(np.int32)
    batch = replace(random_batch(draw, 65, 700), num_logprobs=num_logprobs)
    whole = native.choose(logits, batch, _native.Pool(1))
    for num_threads in (1, 2, 3):
        pool = _native.Pool(num_threads)
        for count in (1, 2, 3, 7, 64, 65):
            rows = draw.permutation(65)[:count]
            if (num_logprobs[rows] < 0).all():
                continue
            choice = native.choose(logits[rows], take_rows(batch, rows), pool)
            np.testing.assert_array_equal(choice.token_ids, whole.token_ids[rows])
            np.testing.assert_array_equal(choice.logprobs, whole.logprobs[rows])
            np.testing.assert_array_equal(choice.top_ids, whole.top_ids[rows])
            np.testing.assert_array_equal(choice.top_logprobs, whole.top_logprobs[rows])


def test_a_prepared_batch_is_reusable_at_other_positions() -> None:
    draw = np.random.default_rng(8)
    logits, pool = random_logits(draw, 9, 600), _native.Pool(2)
    batch = random_batch(draw, 9, 600)
    native.choose(logits, batch, pool)
    later = batch.at(batch.positions + np.int32(5))
    assert later.prepared is batch.prepared
    fresh = take_rows(later, np.arange(9))
    found = native.choose(logits, later, pool)
    assert_same_choice(found, native.choose(logits, fresh, pool))
    assert_same_choice(found, reference.choose(logits, fresh))
    assert not np.array_equal(found.token_ids, native.choose(logits, batch, pool).token_ids)


def test_a_row_alone_and_split_equals_the_row_in_a_batch() -> None:
    draw = np.random.default_rng(6)
    logits = random_logits(draw, 20, 50_000)
    batch = replace(random_batch(draw, 20, 50_000), num_logprobs=np.full(20, 4, np.int32))
    pool = _native.Pool(2)
    whole = native.choose(logits, batch, pool)
    for row in range(20):
        rows = np.array([row])
        choice = native.choose(logits[rows], take_rows(batch, rows), pool)
        np.testing.assert_array_equal(choice.token_ids, whole.token_ids[rows])
        np.testing.assert_array_equal(choice.top_logprobs, whole.top_logprobs[rows])


def test_the_largest_allowed_batch_and_vocabulary_work() -> None:
    draw = np.random.default_rng(7)
    pool = _native.Pool(2)
    many = draw.standard_normal((1024, 300)).astype(np.float32)
    batch = make_batch(1024, temperature=1.0, top_p=0.9, seeds=range(1024))
    assert_same_choice(native.choose(many, batch, pool), reference.choose(many, batch))
    wide = draw.standard_normal((2, 262_144)).astype(np.float32)
    batch = make_batch(2, temperature=1.0, top_p=0.9, top_k=[0, 1000], num_logprobs=20)
    assert_same_choice(native.choose(wide, batch, pool), reference.choose(wide, batch))


def test_logits_are_read_in_place_and_never_written() -> None:
    draw = np.random.default_rng(8)
    buffer = draw.standard_normal((9, 400)).astype(np.float32)
    before = buffer.copy()
    batch = random_batch(draw, 9, 301)
    view = buffer[:, 50:351]
    choice = native.choose(view, batch, _native.Pool(2))
    assert_same_choice(choice, reference.choose(view.copy(), batch))
    assert_same_choice(
        native.choose(buffer[:, 350:49:-1], batch, _native.Pool(1)),
        reference.choose(buffer[:, 350:49:-1], batch),
    )
    np.testing.assert_array_equal(buffer, before)
