"""Launches of attention over a paged cache: decode and prefill rows, any mix, by planned items.

`attention` runs a list of tiles (attention_plan.py) through the kernels of attention_walk.py, their
docstring says what holds of a row's bits. Tiles of few rows (narrow) suit decode, tiles of 128
suit prefill; both run the same recipe, so one launch of either may hold any rows. Letters: T token
rows, S sequences, C table columns, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.execute.gpu.kernels.attention_plan import PIECE_POSITIONS
from quire.execute.gpu.kernels.attention_walk import attention_items, merge_partials
from quire.execute.gpu.kernels.cache_layout import LayerCache
from quire.execute.gpu.kernels.launch import EXACT, launch_staged, power_of_two

MAX_GROUP = 128
MIN_ROWS = 16  # of a matrix instruction
EXACT_ROWS = 64  # the instruction for 64 rows and more is one: see attention_walk.py


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTiles:
    """A TileItems on the device; `partials` where tiles may be cut."""

    rows: int
    items: torch.Tensor  # int32 [N, 6]
    merges: torch.Tensor  # int32 [R, 3]
    partials: Partials | None


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for what pieces give: y f32 [partials, kv_heads, rows, D], sums f32 [..., 2].

    rows: of the tiles that are cut, used ones only: one token's heads, where each has one token.
    """

    y: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(
        cls, count: int, *, kv_heads: int, rows: int, head_dim: int, device: torch.device | str
    ) -> Partials:
        """Uninitialised room for `count` pieces of tiles of which `rows` rows are used."""
        y = torch.empty((count, kv_heads, rows, head_dim), dtype=torch.float32, device=device)
        sums = torch.empty((count, kv_heads, rows, 2), dtype=torch.float32, device=device)
        return cls(y, sums)


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a kernel is compiled for tiles; `positions` is part of the recipe, the rest is not."""

    positions: int
    warps: int
    stages: int


def narrow_rows(group: int, *, is_exact: bool, itemsize: int = 2) -> int:
    """Return rows of a narrow tile: one token's heads, in exact mode in the instruction of all
    rows.

    itemsize: bytes of a query's element. Products of f32 use no matrix instruction: any rows do.
    """
    least = EXACT_ROWS if is_exact and itemsize < 4 else MIN_ROWS
    return max(least, power_of_two(group))


def wide_rows(group: int, head_dim: int, *, itemsize: int = 2) -> int:
    """Return rows of a wide tile: as many as sums of two pieces fit into registers for."""
    most = 64 if head_dim > 128 else 128
    if itemsize == 4:  # long to compile, and few models
        most = 32 if head_dim <= 64 else MIN_ROWS
    return max(most, power_of_two(group))


def tile_shape(rows: int, head_dim: int, *, itemsize: int = 2) -> TileShape:
    """By rows of a tile, head_dim and bytes of a query's element.

    Positions do not depend on rows: they are of the recipe. Neither does which warp has which
    columns of a row's scores, from 64 rows on: 16 rows a warp. Stages: the table is read before the
    tile it names, and each of the two loads is half of them ahead.
    """
    if itemsize == 4:
        return TileShape(32 if head_dim <= 64 else 16, 4, 3)
    if head_dim > 128:
        return TileShape(32, 4, 5) if rows < 64 else TileShape(32, 8, 3)
    if rows < 64:
        return TileShape(64, 4, 7 if head_dim <= 64 else 5)
    return TileShape(64, 4 if rows == 64 else 8, 3)


def attention(
    q: torch.Tensor,
    cache: LayerCache,
    y: torch.Tensor,
    *,
    tiles: DeviceTiles,
    positions: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the rows of y that `tiles` names; q and y [T, heads * D], columns side by side.

    positions int32 [T], tables int32 [S, C] as in ForwardBatch. sinks: f32 [heads], a score of
    each head that no position has. The cache is of q's dtype, or int8 or fp8 with scales.
    """
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    heads = q.shape[1] // head_dim
    group = heads // kv_heads
    if not 0 < group <= min(MAX_GROUP, tiles.rows):
        raise ValueError(
            f"{heads} heads over {kv_heads} KV heads in tiles of {tiles.rows} rows; at most "
            f"{min(MAX_GROUP, tiles.rows)} heads may share one"
        )
    if cache.scales is None and cache.values.dtype != q.dtype:
        raise ValueError(f"a cache of {cache.values.dtype} without scales for rows of {q.dtype}")
    shape = tile_shape(tiles.rows, head_dim, itemsize=q.element_size())
    partials = tiles.partials
    room_y, room_sums = (y, y) if partials is None else (partials.y, partials.sums)
    same = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": max(MIN_ROWS, power_of_two(head_dim)),
        "PIECE": PIECE_POSITIONS,
        "PARTIAL_ROWS": 1 if partials is None else partials.y.shape[2],
        "HAS_WINDOW": window > 0,
        "HAS_SINKS": sinks is not None,
    }
    no_sinks = q if sinks is None else sinks
    if len(tiles.items):
        launch_staged(
            attention_items,
            (len(tiles.items) * kv_heads,),
            q,
            cache.values,
            cache.values if cache.scales is None else cache.scales,
            y,
            no_sinks,
            room_y,
            room_sums,
            tiles.items,
            positions,
            tables,
            q.stride(0),
            y.stride(0),
            tables.stride(0),
            cache.values.stride(0),
            0 if cache.scales is None else cache.scales.stride(0),
            scale,
            soft_cap,
            window,
            BLOCK_SIZE=cache.block_size,
            BLOCK_M=tiles.rows,
            BLOCK_N=shape.positions,
            HAS_SCALES=cache.scales is not None,
            HAS_CAP=soft_cap > 0,
            IS_CUT=partials is not None,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **same,
            **EXACT,
        )
    if partials is not None and len(tiles.merges):
        merge_partials[(len(tiles.merges) * heads,)](
            room_y,
            room_sums,
            y,
            no_sinks,
            tiles.merges,
            positions,
            y.stride(0),
            window,
            num_warps=1,
            **same,
            **EXACT,
        )
