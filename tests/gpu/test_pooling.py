"""The torch executor on CPU tensors: pooled rows match the reference executor, and their slices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quire.program.pooling import with_pooling  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.gpu.torch_models import program_of, reference_executor, torch_executor  # noqa: E402
from tests.models.generate import sequence_batch  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = pytest.mark.gpu

TOLERANCES = {DType.F32: 2e-5, DType.BF16: 0.02}
IDS = [5, 9, 200, 31, 7, 8, 120, 3, 4, 66, 17]


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("kernels", [False, True])
def test_pooled_rows_match_the_reference(tmp_path: Path, dtype: DType, kernels: bool) -> None:
    if kernels:
        pytest.importorskip("triton")
    folder = write_tiny_llama(tmp_path, seed=5, dtype="bf16", max_position_embeddings=64)
    program = with_pooling(program_of(folder, dtype))
    batch = sequence_batch(IDS, 0, program.max_positions)
    reference = reference_executor(folder, program)
    reference.run_trunk(batch)
    wanted = reference.run_pool(batch, 0, len(IDS)).copy()
    executor = torch_executor(folder, program, kernels=kernels)
    executor.run_trunk(batch)
    found = executor.run_pool(batch, 0, len(IDS))
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= TOLERANCES[dtype] * np.abs(wanted).max()
    executor.run_head(batch, 0, len(IDS))
    assert (executor.run_pool(batch, 3, 5) == found[3:8]).all()
    assert (executor.run_pool(batch, 10, 1) == found[10:]).all()
