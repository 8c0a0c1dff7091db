"""The rare steps of native sampling match their NumPy reference bit for bit."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.sampling import native, reference
from quire.sampling.parts import RareParameters
from tests.drawn import examples
from tests.kernels.isas import ISAS
from tests.kernels.rare_cases import OFF, OFF_COUNTS, RARE_PARTS, make_rare
from tests.kernels.sampling_cases import (
    assert_same_choice,
    make_batch,
    random_batch,
    random_logits,
    take_rows,
)

POOLS = [(isa, num_threads) for isa in ISAS for num_threads in (1, 2, 3)]


def test_the_cases_know_every_parameter() -> None:
    parts = {name: {field.name for field in fields(part)} for name, (part, _) in RARE_PARTS.items()}
    ragged = {"dry": {"breakers"}}
    for name, (_, parameters) in RARE_PARTS.items():
        assert parts[name] == {*parameters} | ragged.get(name, set())
    others = {"ngram_size", "allowed", "banned_sequences", "order"}
    assert {field.name for field in fields(RareParameters)} == {*RARE_PARTS} | others
    known = {name for _, parameters in RARE_PARTS.values() for name in parameters.values()}
    assert known | {"ngram_size"} == {*OFF, *OFF_COUNTS}


@settings(max_examples=examples(400), deadline=None)
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
    batch = random_batch(draw, num_rows, vocabulary, rarely=True)
    choice = native.choose(logits, batch, _native.Pool(pool[1], isa=pool[0]))
    assert_same_choice(choice, reference.choose(logits, batch))


@pytest.mark.parametrize(("isa", "num_threads"), POOLS)
def test_rows_split_over_threads_match_the_reference(isa: str, num_threads: int) -> None:
    draw = np.random.default_rng(num_threads)
    for vocabulary in (32_768, 49_999, 150_001):
        logits = random_logits(draw, 3, vocabulary)
        batch = random_batch(draw, 3, vocabulary, rarely=True)
        choice = native.choose(logits, batch, _native.Pool(num_threads, isa=isa))
        assert_same_choice(choice, reference.choose(logits, batch))


def test_row_count_order_and_threads_change_nothing() -> None:
    draw = np.random.default_rng(5)
    logits = random_logits(draw, 65, 700)
    batch = random_batch(draw, 65, 700, rarely=True)
    whole = native.choose(logits, batch, _native.Pool(1))
    for num_threads in (1, 2, 3):
        pool = _native.Pool(num_threads)
        for count in (1, 2, 3, 7, 64, 65):
            rows = draw.permutation(65)[:count]
            choice = native.choose(logits[rows], take_rows(batch, rows), pool)
            np.testing.assert_array_equal(choice.token_ids, whole.token_ids[rows])
            if len(choice.mus):
                np.testing.assert_array_equal(choice.mus, whole.mus[rows])


def test_parameters_that_are_off_change_nothing() -> None:
    draw = np.random.default_rng(6)
    for vocabulary in (300, 40_000):
        logits = random_logits(draw, 9, vocabulary)
        plain = random_batch(draw, 9, vocabulary)
        off = make_rare(
            9,
            **OFF,
            **OFF_COUNTS,
            breakers=[[1]] * 9,
            allowed=[[]] * 9,
            sequences=[[]] * 9,
            order=[[]] * 9,
        )
        assert all(getattr(off, field.name) is not None for field in fields(off))
        choice = native.choose(logits, replace(plain, rare=off), _native.Pool(2))
        assert_same_choice(choice, native.choose(logits, plain, _native.Pool(2)))
        assert len(choice.mus) == 0


def test_a_long_history_of_one_token_takes_bounded_work() -> None:
    """Followed back over 50 tokens, each place once: as many comparisons as 50 histories."""
    history = [7] * 100_000
    batch = make_batch(
        1,
        history=[history],
        rare={"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 2, "ngram_size": 40},
    )
    logits = np.zeros((1, 300), np.float32)
    logits[0, 7] = 50.0
    choice = native.choose(logits, batch, _native.Pool(1))
    assert_same_choice(choice, reference.choose(logits, batch))
    assert choice.token_ids[0] == 0
