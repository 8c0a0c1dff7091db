"""The KV pool on a GPU: how keys, values and their scales lie, and how many bytes they take.

values [layers, blocks, 2, kv_heads, block_size, head_dim]: within a layer a block is one run of
bytes, keys before values, and within it the positions of one KV head are one run. So a tile of
positions of one head is read in runs of block_size rows, a block is copied in one run a layer, and
one layer's keys and values lie close together, which spares the GPU's address tables.
scales [layers, blocks, 2, kv_heads, block_size] in f32 exist where values are int8 or fp8 (e4m3):
a head's row is its values times its scale. Knows no requests and no tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SCALE_BYTES = 4
VALUE_TYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
SCALED = ("fp8", "int8")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer of a pool, views: values [blocks, 2, kv_heads, block_size, head_dim] and scales
    without the last axis, None where values need none."""

    values: torch.Tensor
    scales: torch.Tensor | None

    @property
    def kv_heads(self) -> int:
        return int(self.values.shape[2])

    @property
    def block_size(self) -> int:
        return int(self.values.shape[3])

    @property
    def head_dim(self) -> int:
        return int(self.values.shape[4])


@dataclass(frozen=True, slots=True)
class CachePool:
    """All layers; see the module's docstring for the axes."""

    values: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def zeros(
        cls,
        precision: str,
        *,
        layers: int,
        blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        device: torch.device | str,
        memory: torch.Tensor | None = None,
    ) -> CachePool:
        """Return a pool of zeros. precision: "f32", "bf16", "fp8" or "int8". memory: bytes that are
        zeros, in which values come before scales; None: new memory."""
        shape, kind = (layers, blocks, 2, kv_heads, block_size, head_dim), VALUE_TYPES[precision]
        if memory is None:
            values = torch.zeros(shape, dtype=kind, device=device)
        else:
            num_bytes = math.prod(shape) * kind.itemsize
            values, memory = memory[:num_bytes].view(kind).view(shape), memory[num_bytes:]
        if precision not in SCALED:
            return cls(values, None)
        if memory is None:
            return cls(values, torch.zeros(shape[:-1], dtype=torch.float32, device=device))
        scale_bytes = math.prod(shape[:-1]) * SCALE_BYTES
        return cls(values, memory[:scale_bytes].view(torch.float32).view(shape[:-1]))

    def layer(self, index: int) -> LayerCache:
        """Return one layer, views."""
        return LayerCache(self.values[index], None if self.scales is None else self.scales[index])

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self.values.shape[1])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, scales included."""
        total = self.values.numel() * self.values.element_size()
        if self.scales is not None:
            total += self.scales.numel() * SCALE_BYTES
        return total // self.num_blocks


def token_bytes(precision: str, *, layers: int, kv_heads: int, head_dim: int) -> int:
    """Return bytes one token takes over all layers, keys and values with their scales."""
    size = torch.empty(0, dtype=VALUE_TYPES[precision]).element_size()
    scale = SCALE_BYTES if precision in SCALED else 0
    return 2 * layers * kv_heads * (head_dim * size + scale)
