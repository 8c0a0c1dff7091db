"""Packing: a program's weights in the kernels' layout, from a checkpoint's mapped files, or from a
file in which they were kept packed (quire/weights/pack_cache.py).

Knows parts, sources and their order; how elements are laid out and rounded is native/src/weight.cc.
Always holds: every byte of every tensor is digested once, on the way, and a tensor's pages are
given back when it was read; packed bytes are the same on every instruction set and for any number
of threads, so a file serves all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.execute.executor import Progress
from quire.program.declarations import Weight, WeightPart
from quire.program.program import Program
from quire.weights.binding import Binding, Piece, own_columns
from quire.weights.content import WeightsDigest
from quire.weights.pack_cache import (
    PackCache,
    PackedFile,
    PackWriter,
    Recipe,
    Unusable,
    read_packed,
    stamp_of,
)

PANEL_ROWS = 32  # of a packed matrix (native/include/quire/kernels.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """All weights, the digest of what they were made of, and by name the rows that 8 bits are too
    coarse for (quire/quant/int_weights.py)."""

    weights: Mapping[str, _native.Weight]
    digest: str
    coarse_rows: Mapping[str, int]


# `load`, or what stands in its place.
LoadWeights = Callable[[Program, Binding, _native.Pool, Progress | None, PackCache | None], Packed]


def load(
    program: Program,
    binding: Binding,
    pool: _native.Pool,
    progress: Progress | None,
    cache: PackCache | None,
) -> Packed:
    """Return all weights. With a cache its file is mapped, or made where it cannot be used."""
    if cache is None:
        return pack(program, binding, pool, progress)
    recipe = recipe_of(program, binding.checkpoint.path)
    path = cache.path(recipe, binding.checkpoint.path)
    try:
        found = packed_file(path, program, binding, pool, progress)
    except FileNotFoundError:
        pass
    except Unusable as why:
        cache.log.warning("packed weights are made anew", file=str(path), reason=str(why))
    else:
        cache.log.event("packed weights are mapped", file=str(path))
        weights = {
            name: _native.Weight(*weight_arguments(weight), found.weights[name])
            for name, weight in program.weights.items()
        }
        return Packed(weights=weights, digest=found.weights_digest, coarse_rows=found.coarse_rows)
    sink = _PackCacheSink(cache, path, recipe, program, binding)
    try:
        packed = pack(program, binding, pool, progress, sink)
        sink.finish(packed)
        return packed
    finally:
        sink.end()


class WeightSink(Protocol):
    """What takes weights as they are packed."""

    def add(self, name: str, weight: _native.Weight, pool: _native.Pool) -> bool:
        """Take a weight that is packed; returns whether it stays in memory, too."""


class _PackCacheSink:
    """A WeightSink. Writes weights to a cache's file while they are packed; logs a failure once."""

    def __init__(
        self, cache: PackCache, path: Path, recipe: Recipe, program: Program, binding: Binding
    ) -> None:
        self._cache, self._path = cache, path
        self._writer: PackWriter | None = None
        try:
            self._writer = PackWriter(
                path,
                recipe,
                total_bytes=program.weight_bytes,
                stamp=stamp_of(binding.checkpoint.files),
            )
        except OSError as error:
            self._give_up(error)

    def add(self, name: str, weight: _native.Weight, pool: _native.Pool) -> bool:
        """See WeightSink."""
        if self._writer is not None:
            packed = weight.packed
            try:
                self._writer.add(name, packed, _native.content_digest(packed, pool))
            except OSError as error:
                self._give_up(error)
        return True

    def finish(self, packed: Packed) -> None:
        """Note that all weights were added."""
        if self._writer is not None:
            try:
                self._writer.finish(packed.digest, packed.coarse_rows)
                self._cache.log.event(
                    "packed weights are kept",
                    file=str(self._path),
                    num_bytes=self._writer.num_bytes,
                )
                self._writer = None
            except OSError as error:
                self._give_up(error)

    def end(self) -> None:
        """Remove what was not finished."""
        if self._writer is not None:
            self._writer.abandon()

    def _give_up(self, error: OSError) -> None:
        self.end()
        self._writer = None
        self._cache.log.warning(
            "packed weights cannot be kept; the next start packs again",
            file=str(self._path),
            reason=error.strerror or str(error),
        )


def packed_file(
    path: Path, program: Program, binding: Binding, pool: _native.Pool, progress: Progress | None
) -> PackedFile:
    """Map and verify a program's weights in a file. Raises Unusable, and FileNotFoundError."""
    total, done = program.weight_bytes, 0

    def digest(content: NDArray[np.uint8]) -> tuple[int, int]:
        nonlocal done
        if progress is not None:
            progress(min(done, total), total)
        done += len(content)
        return _native.content_digest(content, pool)

    found = read_packed(
        path,
        recipe_of(program, binding.checkpoint.path),
        sizes={name: empty_weight(weight).num_bytes for name, weight in program.weights.items()},
        stamp=stamp_of(binding.checkpoint.files),
        weights_digest=lambda: _digest_of_sources(program, binding, pool),
        digest=digest,
    )
    if progress is not None:
        progress(total, total)
    return found


def _digest_of_sources(program: Program, binding: Binding, pool: _native.Pool) -> str:
    """Return what `pack` would give, without packing."""
    digest = WeightsDigest()
    for weight in program.weights.values():
        for part in weight.parts:
            if not digest.holds(stored := binding.content(part)):
                digest.add(stored, _native.content_digest(stored.raw, pool))
            binding.release(part)
    _digest_elsewhere(program, binding, pool, digest)
    return digest.text(is_part=program.is_part)


def _digest_elsewhere(
    program: Program, binding: Binding, pool: _native.Pool, digest: WeightsDigest
) -> None:
    """Add the tensors that other ranks have: the digest is that of the whole checkpoint."""
    for source in program.elsewhere:
        stored = binding.content_of(source)
        digest.add(stored, _native.content_digest(stored.raw, pool))
        binding.release_source(source)


def recipe_of(program: Program, checkpoint: Path) -> Recipe:
    """Return what a file of packed weights is made for."""
    # A weight's repr has all that says how its elements become bytes.
    text = "\n".join(repr(weight) for weight in program.weights.values())
    return Recipe(model=checkpoint.resolve().name, layout=_native.PACKED_LAYOUT, text=text)


def pack(
    program: Program,
    binding: Binding,
    pool: _native.Pool,
    progress: Progress | None,
    sink: WeightSink | None = None,
) -> Packed:
    """Return all weights in the kernels' layout that stay in memory; source pages are dropped after
    each tensor."""
    packed: dict[str, _native.Weight] = {}
    coarse: dict[str, int] = {}
    digest = WeightsDigest()
    total, done = program.weight_bytes, 0
    for name, weight in program.weights.items():
        native = empty_weight(weight)
        rows_before = 0
        for part in _joined(weight):
            stored = binding.content(part)
            is_new, makers = not digest.holds(stored), list(binding.pieces(part))
            for whole in _made_ahead(makers, pool.num_threads):
                piece = own_columns(whole, part, weight.columns)
                content = native.fill(
                    pool,
                    _packed_row(weight, rows_before),
                    piece.rows,
                    piece.raw,
                    piece.dtype,
                    weight.offset,
                    first_row=piece.first_row,
                    of_rows=piece.of_rows,
                    transposed=piece.transposed,
                    digested=is_new and piece.is_content,
                )
                if content is not None:
                    digest.add(stored, content)
                rows_before += piece.rows
                done += piece.rows * weight.row_bytes
                if progress is not None:
                    progress(done, total)
            if not digest.holds(stored):  # made from something else than its own bytes
                digest.add(stored, _native.content_digest(stored.raw, pool))
            binding.release(part)
        if native.coarse_rows:
            coarse[name] = native.coarse_rows
        if sink is None or sink.add(name, native, pool):
            packed[name] = native
    _digest_elsewhere(program, binding, pool, digest)
    return Packed(weights=packed, digest=digest.text(is_part=program.is_part), coarse_rows=coarse)


def _made_ahead(makers: Sequence[Callable[[], Piece]], num_threads: int) -> Iterator[Piece]:
    """Yield the pieces in order; of several some are made by other threads while one is used."""
    if len(makers) == 1:
        yield makers[0]()
        return
    with ThreadPoolExecutor(num_threads) as threads:
        ahead = deque(threads.submit(maker) for maker in makers[:num_threads])
        for maker in makers[num_threads:]:
            piece = ahead.popleft().result()
            ahead.append(threads.submit(maker))
            yield piece
        while ahead:
            yield ahead.popleft().result()


def _joined(weight: Weight) -> list[WeightPart]:
    """Return the same rows in fewer parts: those that follow each other in one source, and in what
    is packed, are one."""
    joined: list[WeightPart] = []
    rows_before = 0
    for part in weight.parts:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.source, last.first_column) == (part.source, part.first_column)
            and last.first_row + last.rows == part.first_row
            and (not weight.experts or rows_before % weight.expert_rows)
        ):
            joined[-1] = replace(last, rows=last.rows + part.rows)
        else:
            joined.append(part)
        rows_before += part.rows
    return joined


def _packed_rows(weight: Weight) -> int:
    """Return rows of the packed weight: each expert is filled up to whole panels."""
    if not weight.experts:
        return weight.rows
    return weight.experts * (-(-weight.expert_rows // PANEL_ROWS) * PANEL_ROWS)


def _packed_row(weight: Weight, row: int) -> int:
    """Where a row of the weight is in the packed one."""
    if not weight.experts:
        return row
    expert, inside = divmod(row, weight.expert_rows)
    return expert * (_packed_rows(weight) // weight.experts) + inside


def weight_arguments(weight: Weight) -> tuple[str, str, int, int, str]:
    """Return the first arguments of _native.Weight."""
    return (
        str(weight.form),
        str(weight.dtype),
        _packed_rows(weight),
        max(weight.columns, 1),
        weight.scheme,
    )


def empty_weight(weight: Weight) -> _native.Weight:
    """Return one to be filled; takes address space only until then."""
    return _native.Weight(*weight_arguments(weight))
