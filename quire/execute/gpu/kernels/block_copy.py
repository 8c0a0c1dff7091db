"""Whole blocks of a KV pool: copied within it, gathered into one run of bytes each, and put back.

A block's bytes are, layer after layer, its values, and after those of all layers its scales, layer
after layer: what `export_blocks` gives and `import_blocks` takes, of this or of an equal pool.
Always holds: copies are as if one pair after the other, though pairs that do not touch run at once.
Knows no requests. Letters: B blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.kernels.launch import cdiv

Int32s = NDArray[np.int32]
PROGRAM_WORDS = 4096


@triton.jit
def _copy_runs(
    from_ptr,
    to_ptr,
    from_rows_ptr,
    to_rows_ptr,
    from_layer_stride,
    from_row_stride,
    to_layer_stride,
    to_row_stride,
    num_words,
    BY_ROW_FROM: tl.constexpr,
    BY_ROW_TO: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Words of one row in one layer; a row is its program's number where it is not listed."""
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    from_row = tl.load(from_rows_ptr + pair) if BY_ROW_FROM else pair
    to_row = tl.load(to_rows_ptr + pair) if BY_ROW_TO else pair
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    is_word = words < num_words
    source = from_ptr + layer * from_layer_stride + from_row.to(tl.int64) * from_row_stride
    target = to_ptr + layer * to_layer_stride + to_row.to(tl.int64) * to_row_stride
    tl.store(target + words, tl.load(source + words, mask=is_word), mask=is_word)


def copy_blocks(pool: CachePool, copy_from: Int32s, copy_to: Int32s) -> None:
    """Copy whole blocks over all layers, as if one after the other."""
    for first, end in _apart(copy_from.tolist(), copy_to.tolist()):
        listed = torch.from_numpy(np.stack((copy_from[first:end], copy_to[first:end])))
        listed = listed.to(pool.values.device)
        for words in _words(pool):
            _launch(words, words, listed[0], listed[1])


def export_blocks(pool: CachePool, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Gather blocks int32 [B] into out uint8 [B, block_bytes], on the pool's device."""
    _check_bytes(pool, blocks, out)
    for words, part in zip(_words(pool), _parts(pool, out), strict=True):
        _launch(words, part, blocks, None)


def import_blocks(pool: CachePool, blocks: torch.Tensor, raw: torch.Tensor) -> None:
    """Make blocks int32 [B] what export_blocks gave in raw uint8 [B, block_bytes]."""
    _check_bytes(pool, blocks, raw)
    for words, part in zip(_words(pool), _parts(pool, raw), strict=True):
        _launch(part, words, None, blocks)


def _words(pool: CachePool) -> list[torch.Tensor]:
    """Return the pool as words [layers, blocks, words of a block]: values, and scales where there
    are.

    Blocks are of at least 16 positions: whole words, whatever an element takes."""
    held = [pool.values] if pool.scales is None else [pool.values, pool.scales]
    return [part.flatten(2).view(torch.int32) for part in held]


def _parts(pool: CachePool, raw: torch.Tensor) -> list[torch.Tensor]:
    """Return raw bytes [B, block_bytes] as words, axes as `_words` has them."""
    found, first = [], 0
    words = raw.view(torch.int32)
    for held in _words(pool):
        layers, _, count = held.shape
        part = words[:, first : first + layers * count]
        found.append(part.unflatten(1, (layers, count)).transpose(0, 1))
        first += layers * count
    return found


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    from_rows: torch.Tensor | None,
    to_rows: torch.Tensor | None,
) -> None:
    rows = from_rows if from_rows is not None else to_rows
    assert rows is not None, "blocks are listed on one side at least"
    layers, _, num_words = source.shape
    if not len(rows):
        return
    _copy_runs[(len(rows), layers, cdiv(num_words, PROGRAM_WORDS))](
        source,
        target,
        rows if from_rows is None else from_rows,
        rows if to_rows is None else to_rows,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        num_words,
        BY_ROW_FROM=from_rows is not None,
        BY_ROW_TO=to_rows is not None,
        WORDS=PROGRAM_WORDS,
        num_warps=8,
    )


def _apart(copy_from: list[int], copy_to: list[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of pairs [first, end) in which no block is written that another pair has
    touched."""
    first, read, written = 0, set[int](), set[int]()
    for index, (source, target) in enumerate(zip(copy_from, copy_to, strict=True)):
        if source in written or target in written or target in read:
            yield first, index
            first, read, written = index, set(), set()
        read.add(source)
        written.add(target)
    if first < len(copy_from):
        yield first, len(copy_from)


def _check_bytes(pool: CachePool, blocks: torch.Tensor, raw: torch.Tensor) -> None:
    wanted = (len(blocks), pool.block_bytes)
    if tuple(raw.shape) != wanted or raw.dtype != torch.uint8 or not raw.is_contiguous():
        raise ValueError(
            f"bytes of blocks are {raw.dtype} {tuple(raw.shape)}; uint8 {list(wanted)}, side by "
            "side, is needed"
        )
