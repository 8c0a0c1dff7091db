"""Sampling on the device chooses the tokens of quire.sampling.reference.choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.execute.gpu.kernels.choose_tokens import choose_tokens
from quire.execute.gpu.kernels.device_params import DeviceSamplingParams
from quire.sampling import reference
from quire.sampling.batch import SampleBatch
from tests.kernels.sampling_cases import make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
VOCABULARY = 2500


def chosen(logits: NDArray[np.float32], batch: SampleBatch) -> list[int]:
    """Sample by the kernels."""
    token_ids = torch.full((len(logits),), -7, dtype=torch.int32)
    choose_tokens(torch.from_numpy(logits), DeviceSamplingParams.of(batch), token_ids)
    return token_ids.tolist()


def drawn_logits(rng: np.random.Generator, rows: int, vocabulary: int) -> NDArray[np.float32]:
    """Return normal logits, coarse so that some are equal, some -inf."""
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32) * 3
    coarse = np.round(logits * 4) / 4
    logits[::2] = coarse[::2]
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = 0.5
    return logits


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.0**-41},
    {"temperature": 0.01},
    {"top_k": [1, 2, 7, 40, 2499, 2500, 3000]},
    {"top_p": [0.0, 1e-6, 0.1, 0.5, 0.9, 0.9999, 1.0]},
    {"min_p": [1.0, 0.5, 0.1, 0.01, 1e-6, 1e-39, 0.0]},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    {"top_k": [1, 3, 9, 20, 60, 100, 500], "top_p": 0.95, "temperature": 1.7},
]


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_tokens_match_the_reference(given: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    logits = drawn_logits(rng, 7, VOCABULARY)
    seeds, places = rng.integers(-(2**63), 2**63 - 1, 7), rng.integers(0, 2**31 - 1, (2, 7))
    batch = make_batch(
        7, **{"temperature": 1.0} | given, seeds=seeds, streams=places[0], positions=places[1]
    )
    assert chosen(logits, batch) == reference.choose(logits, batch).token_ids.tolist()


def test_ties_go_to_the_lowest_ids() -> None:
    """With all logits equal, the first ids are kept, across several blocks."""
    logits = np.zeros((6, 2100), np.float32)
    batch = make_batch(6, temperature=1.0, top_k=1030, seeds=np.arange(6))
    tokens = chosen(logits, batch)
    assert tokens == reference.choose(logits, batch).token_ids.tolist()
    assert max(tokens) < 1030
    batch = make_batch(6, temperature=1.0, top_p=0.7, seeds=np.arange(6))
    assert chosen(logits, batch) == reference.choose(logits, batch).token_ids.tolist()
    assert chosen(logits[:2], make_batch(2)) == [0, 0]


def test_rows_without_a_valid_token_fail_alone() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, 1100)).astype(np.float32)
    logits[1, 1050], logits[2, 3], logits[3], logits[4, 9] = np.nan, np.inf, -np.inf, 3e38
    for given in ({}, {"top_k": 5}):
        batch = make_batch(6, temperature=[1.0, 1.0, 1.0, 1.0, 0.5, 1.0], **given)
        tokens = chosen(logits, batch)
        assert tokens == reference.choose(logits, batch).token_ids.tolist()
        assert tokens[1:5] == [-1] * 4
        assert min(tokens[0], tokens[5]) >= 0


@pytest.mark.parametrize("vocabulary", [1, 5, 1024, 1025])
def test_vocabularies_of_all_sizes(vocabulary: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((3, vocabulary)).astype(np.float32)
    batch = make_batch(3, temperature=[0.0, 1.0, 1.0], top_k=[0, 0, 3], top_p=[1.0, 1.0, 0.9])
    assert chosen(logits, batch) == reference.choose(logits, batch).token_ids.tolist()


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_a_row_is_sampled_alone_as_in_a_batch(given: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    logits = drawn_logits(rng, 7, VOCABULARY)
    params = {"temperature": 1.0, "seeds": rng.integers(-(2**63), 2**63 - 1, 7)} | given
    together = chosen(logits, make_batch(7, **params))
    for row in (0, 3, 6):
        one = {
            name: [value[row]] if isinstance(value, (list, np.ndarray)) else value
            for name, value in params.items()
        }
        assert chosen(logits[row : row + 1], make_batch(1, **one)) == [together[row]]
