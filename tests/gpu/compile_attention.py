"""Launches of attention and of the cache that are compiled for an H200: heads of an 8B model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.execute.gpu.kernels import attention as kernels
from quire.execute.gpu.kernels import block_copy, store_kv
from quire.execute.gpu.kernels.cache_layout import CachePool
from tests.gpu.compile_for import tensor

F32, I32 = torch.float32, torch.int32
LAYERS, BLOCKS, KV_HEADS, GROUP = 2, 64, 8, 4


def _pool(precision: str, head_dim: int, block_size: int = 16) -> CachePool:
    return CachePool.zeros(
        precision,
        layers=LAYERS,
        blocks=BLOCKS,
        kv_heads=KV_HEADS,
        block_size=block_size,
        head_dim=head_dim,
        device="meta",
    )


def attention(
    *,
    precision: str = "bf16",
    head_dim: int = 128,
    exact: bool = False,
    wide: bool = False,
    block_size: int = 16,
    sinks: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Wide tiles, or narrow ones cut into items and merged."""
    dtype = F32 if precision == "f32" else torch.bfloat16
    size = dtype.itemsize
    rows = kernels.narrow_rows(GROUP, is_exact=exact, itemsize=size)
    if wide:
        rows = kernels.wide_rows(GROUP, head_dim, itemsize=size)
    q = tensor(64, KV_HEADS * GROUP * head_dim, dtype=dtype)
    room = {"kv_heads": KV_HEADS, "rows": GROUP, "head_dim": head_dim, "device": "meta"}
    kernels.attention(
        q,
        _pool(precision, head_dim, block_size).layer(0),
        q,
        tiles=kernels.DeviceTiles(
            rows=rows,
            items=tensor(64, 6, dtype=I32),
            merges=tensor(64, 3, dtype=I32),
            partials=None if wide else kernels.Partials.empty(64, **room),
        ),
        positions=tensor(64, dtype=I32),
        tables=tensor(64, 128, dtype=I32),
        scale=0.088,
        window=window,
        soft_cap=soft_cap,
        sinks=tensor(KV_HEADS * GROUP, dtype=F32) if sinks else None,
    )


def _heads(precision: str) -> None:
    dtype = F32 if precision == "f32" else torch.bfloat16
    q, k = (tensor(64, heads * 128, dtype=dtype) for heads in (KV_HEADS * GROUP, KV_HEADS))
    slots, table, weight = (
        tensor(64, dtype=I32),
        tensor(4096, 64, dtype=F32),
        tensor(128, dtype=F32),
    )
    angles, norm = store_kv.Angles(table, table, slots), store_kv.HeadNorm(weight, weight, 1e-6)
    cache = _pool(precision, 128).layer(0)
    store_kv.prepare_heads(q, k, k, cache, slots, angles=angles, norm=norm)
    store_kv.store_kv(k, k, cache, slots)
    store_kv.rope(q, angles, head_dim=128)


def _blocks() -> None:
    pool, listed = _pool("bf16", 128), tensor(2, dtype=I32)
    block_copy.copy_blocks(pool, np.array([0], np.int32), np.array([1], np.int32))
    raw = tensor(2, pool.block_bytes, dtype=torch.uint8)
    block_copy.export_blocks(pool, listed, raw)
    block_copy.import_blocks(pool, listed, raw)


CASES: dict[str, Callable[[], Any]] = {
    "decode attention": lambda: attention(),
    "decode attention, fp8": lambda: attention(precision="fp8"),
    "prefill attention": lambda: attention(wide=True),
    "prefill attention, window, cap and sinks": lambda: attention(
        wide=True, window=1024, soft_cap=30.0, sinks=True
    ),
    "heads into int8": lambda: _heads("int8"),
    "heads into fp8": lambda: _heads("fp8"),
    "blocks": _blocks,
}
# By name only: what differs little from those.
MORE: dict[str, Callable[[], Any]] = {
    "decode attention, blocks of 64": lambda: attention(block_size=64),
    "decode attention, exact": lambda: attention(exact=True),
    "decode attention, heads of 64": lambda: attention(head_dim=64),
    "decode attention, heads of 256": lambda: attention(head_dim=256),
    "decode attention, int8": lambda: attention(precision="int8"),
    "decode attention, f32": lambda: attention(precision="f32", head_dim=64),
    "prefill attention, blocks of 64": lambda: attention(wide=True, block_size=64),
    "prefill attention, heads of 80": lambda: attention(wide=True, head_dim=80),
    "prefill attention, heads of 256": lambda: attention(wide=True, head_dim=256),
    "prefill attention, int8": lambda: attention(wide=True, precision="int8"),
    "heads into bf16": lambda: _heads("bf16"),
    "heads into f32": lambda: _heads("f32"),
}
