"""Blocks of a pool: copied in order, exported and imported byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.execute.gpu.kernels.block_copy import (  # noqa: E402
    copy_blocks,
    export_blocks,
    import_blocks,
)
from quire.execute.gpu.kernels.cache_layout import CachePool, token_bytes  # noqa: E402

pytestmark = pytest.mark.gpu

PRECISIONS = ["f32", "bf16", "int8", "fp8"]


def _pool(precision: str, seed: int) -> CachePool:
    pool = CachePool.zeros(
        precision, layers=3, blocks=7, kv_heads=3, block_size=16, head_dim=20, device="cpu"
    )
    draw = np.random.default_rng(seed)
    for part in _bytes(pool):
        part.copy_(torch.from_numpy(draw.integers(0, 256, tuple(part.shape), np.uint8)))
    return pool


def _bytes(pool: CachePool) -> list[torch.Tensor]:
    held = [pool.values] if pool.scales is None else [pool.values, pool.scales]
    return [part.view(torch.uint8) for part in held]


def _same(x: CachePool, y: CachePool) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_bytes(x), _bytes(y), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "pairs",
    [[], [(0, 5)], [(1, 2), (2, 3), (3, 1)], [(0, 1), (0, 2), (4, 0), (6, 6), (5, 1)]],
    ids=str,
)
def test_blocks_are_copied_in_order(precision: str, pairs: list[tuple[int, int]]) -> None:
    pool, wanted = _pool(precision, 1), _pool(precision, 1)
    for source, target in pairs:
        for part in _bytes(wanted):
            part[:, target] = part[:, source]
    listed = np.array(pairs, np.int32).reshape(-1, 2)
    copy_blocks(pool, listed[:, 0], listed[:, 1])
    assert _same(pool, wanted)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_exported_blocks_are_imported_by_an_equal_pool(precision: str) -> None:
    pool, other, untouched = (_pool(precision, seed) for seed in (1, 2, 2))
    blocks = torch.tensor([4, 0, 6], dtype=torch.int32)
    raw = torch.zeros((3, pool.block_bytes), dtype=torch.uint8)
    assert pool.block_bytes == 16 * token_bytes(precision, layers=3, kv_heads=3, head_dim=20)
    export_blocks(pool, blocks, raw)
    # The values of every layer, then the scales of every layer.
    for row, block in enumerate([4, 0, 6]):
        wanted = torch.cat([part[:, block].reshape(-1) for part in _bytes(pool)])
        assert torch.equal(raw[row], wanted)
    import_blocks(other, torch.tensor([1, 2, 3], dtype=torch.int32), raw)
    for mine, got, before in zip(_bytes(pool), _bytes(other), _bytes(untouched), strict=True):
        assert torch.equal(got[:, [1, 2, 3]], mine[:, [4, 0, 6]])
        assert torch.equal(got[:, [0, 4, 5, 6]], before[:, [0, 4, 5, 6]])


def test_bytes_of_another_geometry_are_rejected() -> None:
    pool = _pool("int8", 1)
    with pytest.raises(ValueError, match=r"uint8 \[1, 6912\], side by side, is needed"):
        export_blocks(pool, torch.zeros(1, dtype=torch.int32), torch.zeros((1, 8)))
