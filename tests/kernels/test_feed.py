"""Feed: rows of the batch into a buffer, as its NumPy twin has them, however many at once."""

from __future__ import annotations

import numpy as np
import pytest

from quire.weights.dtypes import round_to_bf16
from tests.kernels.isas import ISAS
from tests.kernels.one_op import OneOp, Operand, draw


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("isa", ISAS)
def test_feed_gives_the_rows_of_the_batch(isa: str, dtype: str) -> None:
    features = draw(np.random.default_rng(1), 65, 37)
    wanted = round_to_bf16(features) if dtype == "bf16" else features
    for num_threads in (1, 3):
        op = OneOp("feed", [Operand(37, dtype)], isa, num_threads)
        for count in (1, 2, 33, 65):
            (found,) = op({}, num_rows=count, batch={"features": features[:count]})
            assert np.array_equal(found, wanted[:count])


def test_features_of_another_shape_are_refused() -> None:
    op = OneOp("feed", [Operand(37)], ISAS[0])
    with pytest.raises(ValueError, match="features have not the output's width"):
        op({}, num_rows=2, batch={"features": np.zeros((2, 36), np.float32)})
    with pytest.raises(ValueError, match="features have not a row for each token"):
        op({}, num_rows=2, batch={"features": np.zeros((3, 37), np.float32)})
    with pytest.raises(ValueError, match="features have not the output's width"):
        op({}, num_rows=2)
