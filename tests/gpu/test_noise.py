"""Gumbel noise and probability masses of the kernels match quire/sampling/noise.py bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels import noise as kernels
from quire.sampling import noise
from tests.gpu.tensors import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
COUNT = 4096


@triton.jit
def _draw(ids, seeds, streams, positions, y, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    key = kernels.row_key(tl.load(seeds + row), tl.load(streams + row), tl.load(positions + row))
    tl.store(y + row * BLOCK + at, kernels.gumbel(key, tl.load(ids + at)))


@triton.jit
def _masses(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, kernels.mass(tl.load(x + at)))


def test_gumbel_noise_matches_the_reference() -> None:
    places = [
        (0, 0, 0),
        (7, 3, 12),
        (-1, 2**31 - 1, 2**31 - 1),
        (2**63 - 1, 0, 5),
        (-(2**63), 1, 1),
    ]
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 2**19, COUNT).astype(np.int32)
    seeds, streams, positions = (np.array(part) for part in zip(*places, strict=True))
    found = torch.full((len(places), COUNT), float("nan"))
    _draw[len(places),](
        torch.from_numpy(ids),
        torch.from_numpy(seeds),
        torch.from_numpy(streams.astype(np.int32)),
        torch.from_numpy(positions.astype(np.int32)),
        found,
        BLOCK=COUNT,
    )
    for place, row in zip(places, found.numpy(), strict=True):
        assert same_bits(row, noise.gumbel(*place, token_ids=ids))


def test_masses_match_the_reference() -> None:
    rng = np.random.default_rng(2)
    x = -np.abs(rng.standard_normal(COUNT) * 12).astype(np.float32)
    x[:4] = [0.0, -np.inf, -1e30, -23.56]
    found = torch.full((COUNT,), -1, dtype=torch.int64)
    _masses[1,](torch.from_numpy(x), found, BLOCK=COUNT)
    assert (found.numpy() * noise.MASS_UNIT == noise.mass(x)).all()
