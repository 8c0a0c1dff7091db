"""Which program of an attention launch reads what: tiles of query rows, cut into items of pieces.

A tile is up to `rows` query rows of one KV head: consecutive tokens of one sequence, times the
query heads that share the head. Its cache positions are taken in pieces of 256, aligned to
absolute position. An item is a tile and a run of its pieces. Where few tiles must fill a GPU,
tiles are cut into several items; then each piece's result is kept apart (a partial) and merged in
order afterwards. Pieces never change, so cutting changes no bit: a row does not know how many
others there are. NumPy only; knows neither windows (kernels skip what a window hides) nor devices.
Letters: S sequences, N items, R merged rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

PIECE_POSITIONS = 256
ITEM_FIELDS = 6
MERGE_FIELDS = 3
NO_ITEMS = np.empty((0, ITEM_FIELDS), np.int32)
NO_MERGES = np.empty((0, MERGE_FIELDS), np.int32)
WHOLE = -1  # an item's first partial where the item is all of its tile


@dataclass(frozen=True, slots=True, kw_only=True)
class TileItems:
    """What one launch does. `rows` query rows a tile at most.

    items [N, 6]: sequence, first token row, tokens (0: nothing to do), first piece, end piece,
    first partial or -1. merges [R, 3]: token row (-1: nothing to do), partial of piece 0, the
    token's place in its tile. Partials are numbered 0 .. num_partials - 1.
    """

    rows: int
    items: Int32s
    merges: Int32s
    num_partials: int


def plan_tiles(
    seq_starts: Int32s,
    first_positions: Int32s,
    sequences: NDArray[np.integer],
    *,
    group: int,
    rows: int,
    kv_heads: int,
    programs: int,
    max_partials: int,
) -> TileItems:
    """Return tiles and items of the given `sequences`.

    seq_starts [S + 1] and first_positions [S], the position of a sequence's first row, are of all
    sequences. group: query heads of a KV head. programs: how many programs keep the GPU busy (a
    few a multiprocessor); 0 cuts nothing. max_partials: pieces that there is room for.
    """
    if not 0 < group <= rows:
        raise ValueError(f"{group} query heads share a KV head; tiles of {rows} rows hold at most")
    if not len(sequences):
        return TileItems(rows=rows, items=NO_ITEMS, merges=NO_MERGES, num_partials=0)
    most = rows // group  # tokens a tile
    tokens = (seq_starts[1:] - seq_starts[:-1]).astype(np.int64)[sequences]
    tiles = -(-tokens // most)
    nth, owner = _runs(tiles)
    count = np.minimum(most, tokens[owner] - nth * most)
    start = seq_starts[:-1].astype(np.int64)[sequences][owner] + nth * most
    last = first_positions.astype(np.int64)[sequences][owner] + nth * most + count - 1
    pieces = last // PIECE_POSITIONS + 1
    parts = _parts(pieces, kv_heads=kv_heads, programs=programs, max_partials=max_partials)
    is_cut = parts > 1
    kept = np.where(is_cut, pieces, 0)
    first_partial = np.cumsum(kept) - kept

    part, tile = _runs(parts)
    first_piece = part * pieces[tile] // parts[tile]
    end_piece = (part + 1) * pieces[tile] // parts[tile]
    partial = np.where(is_cut[tile], first_partial[tile] + first_piece, WHOLE)
    columns = (sequences[owner][tile], start[tile], count[tile], first_piece, end_piece, partial)
    items = np.stack(columns, axis=1)
    # The longest first: what ends late had better begin early.
    items = items[np.argsort(first_piece - end_piece, kind="stable")]

    place, cut = _runs(np.where(is_cut, count, 0))
    merges = np.stack((start[cut] + place, first_partial[cut], place), axis=1)
    return TileItems(
        rows=rows,
        items=np.ascontiguousarray(items, np.int32),
        merges=np.ascontiguousarray(merges, np.int32),
        num_partials=int(kept.sum()),
    )


def max_items(num_sequences: int, *, kv_heads: int, programs: int) -> int:
    """Return items that `num_sequences` tiles become at most, whatever their lengths: a tile's
    share of `programs`, rounded, or one, is less than that share and one."""
    return num_sequences + programs // kv_heads


def padded(plan: TileItems, *, items: int, merges: int) -> TileItems:
    """Return the same with exactly so many items and merges, idle ones last: a captured
    launch's."""
    if len(plan.items) > items or len(plan.merges) > merges:
        raise ValueError(
            f"{len(plan.items)} items and {len(plan.merges)} merged rows; "
            f"the launch was made for {items} and {merges}"
        )
    idle = np.zeros((items, ITEM_FIELDS), np.int32)
    idle[: len(plan.items)] = plan.items
    padded = np.full((merges, MERGE_FIELDS), -1, np.int32)
    padded[: len(plan.merges)] = plan.merges
    return TileItems(rows=plan.rows, items=idle, merges=padded, num_partials=plan.num_partials)


def _runs(counts: Int64s) -> tuple[Int64s, Int64s]:
    """For counts (2, 0, 3): places 0 1 0 1 2 and owners 0 0 2 2 2."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts), owner


def _parts(pieces: Int64s, *, kv_heads: int, programs: int, max_partials: int) -> Int64s:
    """Return items each tile is cut into: of about as many pieces each as keep all programs busy.
    To the nearest, so that tiles which are enough by themselves stay whole and need no merge."""
    if not programs or not len(pieces):
        return np.ones(len(pieces), np.int64)
    total = int(pieces.sum()) * kv_heads
    parts = np.clip((2 * pieces * programs + total) // (2 * total), 1, pieces)
    # Room for partials goes to the longest.
    order = np.argsort(-pieces, kind="stable")
    wanted = np.where(parts > 1, pieces, 0)
    has_room = np.empty(len(pieces), bool)
    has_room[order] = np.cumsum(wanted[order]) <= max_partials
    return np.where(has_room, parts, 1)
