"""The rare sampling steps against transformers (marked `parity`: needs torch)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.sampling import rare
from tests.kernels.rare_cases import make_rare, random_history

pytestmark = pytest.mark.parity

Rows = list[NDArray[np.float32]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Return rows of all spreads, and ties."""
    draw = np.random.default_rng(0)
    drawn = []
    for number in range(200):
        size = int(draw.choice([2, 5, 50, 1000]))
        row = draw.standard_normal(size) * draw.choice([0.1, 1, 4, 15])
        drawn.append((np.round(row) if number % 3 == 0 else row).astype(np.float32))
    return drawn


def _kept(warper: Any, row: NDArray[np.float32], history: list[int]) -> NDArray[np.bool_]:
    """Return what transformers keeps of a row; computed in f64, where it does not round."""
    torch = pytest.importorskip("torch")
    scores = warper(torch.tensor([history]), torch.tensor(row)[None].double())
    left: NDArray[np.bool_] = scores[0].numpy() > -np.inf
    return left


def _order(row: NDArray[np.float32]) -> NDArray[np.int32]:
    return np.argsort(-row, kind="stable").astype(np.int32)


def _marks(ids: NDArray[np.int32], size: int) -> NDArray[np.bool_]:
    marks = np.zeros(size, np.bool_)
    marks[ids] = True
    return marks


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_typical_keeps_what_transformers_keeps(rows: Rows, share: float) -> None:
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    warper = logits_process.TypicalLogitsWarper(mass=share)
    for row in rows:
        ours = _marks(rare.typical(row, _order(row), np.float32(share)), len(row))
        np.testing.assert_array_equal(ours, _kept(warper, row, [0]))


@pytest.mark.parametrize("limit", [3e-4, 0.02, 0.3])
def test_cutoffs_keep_what_transformers_keeps(rows: Rows, limit: float) -> None:
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    off, cutoff = np.float32(0), np.float32(limit)
    for warper, cutoffs in (
        (logits_process.EpsilonLogitsWarper(epsilon=limit), (cutoff, off)),
        (logits_process.EtaLogitsWarper(epsilon=limit, device="cpu"), (off, cutoff)),
    ):
        for row in rows:
            ours = _marks(rare.cutoffs(row, _order(row), *cutoffs), len(row))
            np.testing.assert_array_equal(ours, _kept(warper, row, [0]))


def test_n_grams_and_sequences_ban_what_transformers_bans() -> None:
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    draw = np.random.default_rng(1)
    num_banned = 0
    for _ in range(300):
        history = random_history(draw, 4) or [0]
        size = int(draw.integers(1, 5))
        sequences = [draw.integers(0, 4, draw.integers(1, 4)).tolist() for _ in range(3)]
        for warper, given in (
            (logits_process.NoRepeatNGramLogitsProcessor(size), {"ngram_size": size}),
            (logits_process.NoBadWordsLogitsProcessor(sequences), {"sequences": [sequences]}),
        ):
            values = np.zeros(8, np.float32)
            rare.ban(values, np.array(history, np.int32), make_rare(1, **given), 0)
            left = _kept(warper, np.zeros(8, np.float32), history)
            np.testing.assert_array_equal(values > -np.inf, left)
            num_banned += int((~left).sum())
    assert num_banned > 300
