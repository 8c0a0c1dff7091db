"""Linear products of exact mode: close to NumPy, and the same bits for any number of rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from quire.execute import reference_ops as ops
from quire.execute.gpu import products
from quire.execute.gpu.kernels import linear_fixed
from quire.execute.gpu.kernels.launch import launch_staged
from quire.execute.gpu.kernels.linear_fixed import (
    FILL,
    PIECE_STEP,
    TILES,
    Workspace,
    choose_tile,
    linear,
    max_sums,
    piece_of,
)
from tests.gpu.tensors import (
    BF16_STEP,
    TYPES,
    Float32s,
    array,
    empty,
    normal,
    rounded,
    same_bits,
    tensor,
    wide,
)

pytestmark = pytest.mark.gpu


def product(
    x: Float32s, weight: Float32s, dtype: str, *, y: str = "f32", is_split: bool = False
) -> Float32s:
    """Run the kernel without bias."""
    found = empty(len(x), len(weight), y)
    workspace = Workspace.of(2**20, "cpu") if is_split else None
    linear(wide(x, dtype), tensor(weight, dtype), found, workspace=workspace)
    if workspace is not None:
        assert not workspace.arrived.any()
    return array(found)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 5, 3), (17, 70, 130), (3, 129, 64)])
def test_products_of_odd_shapes(dtype: str, rows: int, outputs: int, columns: int) -> None:
    rng = np.random.default_rng(1)
    x, weight = normal(rng, rows, columns, dtype=dtype), normal(rng, outputs, columns, dtype=dtype)
    bias = normal(rng, outputs)
    found = empty(rows, outputs)
    linear(wide(x, dtype), wide(weight, dtype), found, bias=tensor(bias))
    expected = ops.linear(x, weight, bias)
    np.testing.assert_allclose(array(found), expected, rtol=1e-4, atol=1e-4)


def test_a_bf16_output_is_rounded_once() -> None:
    rng = np.random.default_rng(2)
    x, weight = normal(rng, 2, 64, dtype="bf16"), normal(rng, 10, 64, dtype="bf16")
    expected = rounded(product(x, weight, "bf16"), "bf16")
    assert same_bits(product(x, weight, "bf16", y="bf16"), expected)
    np.testing.assert_allclose(expected, ops.linear(x, weight, None), rtol=BF16_STEP, atol=1e-2)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_have_the_same_bits_in_every_tile_and_split(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, several and 300 rows have the same bits in each tile, split and unsplit."""
    monkeypatch.setattr(linear_fixed, "SHORTEST_PIECE", 100)
    assert piece_of(37, 300) == (128, 3)
    rng = np.random.default_rng(3)
    x, weight = normal(rng, 300, 300, dtype=dtype), normal(rng, 37, 300, dtype=dtype)
    together = product(x, weight, dtype)
    assert same_bits(product(x[299:], weight, dtype, is_split=True), together[299:])
    tiles = dict(TILES)
    monkeypatch.setattr(linear_fixed, "TILES", tiles)
    for tile in TILES[TYPES[dtype]]:
        tiles[TYPES[dtype]] = (tile,)
        for rows in (1, 17, 65):
            for is_split in (False, True):
                found = product(x[:rows], weight, dtype, is_split=is_split)
                assert same_bits(found, together[:rows]), (tile, rows, is_split)


# Weights of Llama-3.1-8B, Qwen3-8B, Qwen3-0.6B, a vocabulary, and odd ones.
SHAPES = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (24576, 4096), (4096, 12288)),
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (37, 100)),
)


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_splits_cover_all_columns_and_fill_a_gpu(outputs: int, columns: int) -> None:
    length, pieces = piece_of(outputs, columns)
    assert length % PIECE_STEP == 0
    assert (pieces - 1) * length < columns <= pieces * length
    if outputs * columns < 2**20:
        return
    for rows in (1, 16, 17, 33, 64, 65, 256, 300):
        tile, is_split = choose_tile(TILES[torch.bfloat16], rows, outputs, pieces=pieces)
        assert length % tile.columns == 0
        num_r = -(-rows // tile.rows)
        programs = num_r * -(-outputs // tile.outputs) * (pieces if is_split else 1)
        assert programs >= FILL
        assert num_r == 1 or rows > 64  # few rows read weights once
        if is_split:
            assert pieces * rows * outputs <= max_sums(outputs, columns, 4096)


def test_many_rows_use_the_tile_that_reads_least() -> None:
    for outputs, columns in SHAPES[:4]:
        _, pieces = piece_of(outputs, columns)
        found = choose_tile(TILES[torch.bfloat16], 2048, outputs, pieces=pieces)
        assert found == (TILES[torch.bfloat16][0], False)


def test_a_nan_row_and_nan_memory_affect_no_other_row() -> None:
    rng = np.random.default_rng(4)
    x, weight = normal(rng, 3, 33), normal(rng, 6, 33)
    clean = product(x, weight, "f32")
    x[1] = np.nan
    found = product(x, weight, "f32")
    assert same_bits(found[[0, 2]], clean[[0, 2]])
    assert np.isnan(found[1]).all()


def test_a_workspace_that_is_too_small_is_not_used() -> None:
    rng = np.random.default_rng(5)
    x, weight = normal(rng, 2, 512), normal(rng, 6, 512)
    workspace, found = Workspace.of(23, "cpu"), empty(2, 6)
    linear(tensor(x), tensor(weight), found, workspace=workspace)
    assert torch.isnan(workspace.sums).all()
    assert same_bits(array(found), product(x, weight, "f32", is_split=True))


def test_fast_mode_uses_the_vendors_product(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    weight = tensor(normal(rng, 6, 8, dtype="bf16"), "bf16")
    x = tensor(normal(rng, 3, 8, dtype="bf16"), "bf16")
    launched: list[int] = []
    vendors = torch.mm

    def watched(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        launched.append(len(x))
        return vendors(x, *others, **named)

    monkeypatch.setattr(torch, "mm", watched)
    product = products.fast_product(weight)
    for rows in (2, 3):
        y = torch.zeros(rows, 6, dtype=torch.bfloat16)
        product(x[:rows], y)
        assert y.any()
    assert launched == [2, 3]


def test_mixed_types_are_rejected() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="both bf16 or both f32"):
        linear(x, x.to(torch.bfloat16), torch.zeros(2, 2))


def test_a_gpu_with_less_shared_memory_gets_fewer_stages() -> None:
    tried: list[tuple[int, int]] = []

    def kernel(room: int) -> Any:
        def launch(size: int, *, num_stages: int, num_warps: int) -> None:
            tried.append((size, num_stages))
            if num_stages * size > room:
                raise OutOfResources(num_stages * size, room, "shared memory")

        return defaultdict(lambda: launch)

    launch_staged(kernel(100), (1, 2), 48, num_stages=4, num_warps=8)
    assert tried == [(48, 4), (48, 3), (48, 2)]
    with pytest.raises(OutOfResources):
        launch_staged(kernel(40), (1,), 48, num_stages=2, num_warps=8)
