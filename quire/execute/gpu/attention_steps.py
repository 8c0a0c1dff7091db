"""AttentionSteps: what the attention launches of a step do, planned on the host for all layers.

Sequences with one token row go through narrow tiles, cut so that the whole device is busy; others
through wide tiles, uncut. Each plan has a place in the step's buffers, so a captured graph finds
its items at the same address in every step, as many as it was captured with: those beyond a step's
own name no tokens, and a program that reads one of them ends at once. Knows geometry and rows; no
weights and no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.execute.executor import StepLimits
from quire.execute.gpu.kernels.attention import DeviceTiles, Partials, narrow_rows, wide_rows
from quire.execute.gpu.kernels.attention_plan import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    PIECE_POSITIONS,
    TileItems,
    max_items,
    padded,
    plan_tiles,
)
from quire.execute.gpu.step_sizes import Size
from quire.program.batch import ForwardBatch
from quire.program.ops import Attention
from quire.program.program import Program

Int32s = NDArray[np.int32]
PARTIAL_BYTES = 256 * 2**20  # at most, for what pieces give before they are merged
PROGRAMS_OF_CPU = 6  # in the interpreter: enough that tiles are cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What tiles depend on: query heads of a KV head, and how many rows tiles have."""

    group: int
    kv_heads: int
    head_dim: int
    narrow: int
    wide: int

    def max_partials(self, max_positions: int, max_sequences: int) -> int:
        """Return pieces that there is room for: no more than all sequences can have."""
        each = self.kv_heads * self.group * (self.head_dim + 2) * 4
        needed = max_sequences * -(-max_positions // PIECE_POSITIONS)
        return max(min(PARTIAL_BYTES // each, needed), 1)

    def max_wide(self, tokens: int, chunks: int) -> int:
        """Return wide tiles of so many token rows in so many chunks, at most: each may end in a
        part of a tile."""
        return tokens // (self.wide // self.group) + chunks


class AttentionSteps:
    """Plans for the geometries of a program; `programs` keep the device busy."""

    def __init__(
        self,
        program: Program,
        *,
        limits: StepLimits,
        exact: bool,
        programs: int,
    ) -> None:
        self._programs = programs
        self._max_sequences = limits.max_sequences
        self._max_tokens = limits.max_tokens
        self._max_positions = program.max_positions
        self.geometries = geometries(program, exact=exact)
        self._partials: dict[int, Partials] = {}
        self._tiles: dict[int, list[DeviceTiles]] = {}
        self._counts: dict[str, int] = {}

    def sizes(self) -> dict[str, int]:
        """Return elements of each place in the step's buffers, by name."""
        found: dict[str, int] = {}
        for group, geometry in self.geometries.items():
            wide = geometry.max_wide(self._max_tokens, self._max_sequences)
            found[f"narrow_items_{group}"] = ITEM_FIELDS * self._max_items(
                geometry, self._max_sequences
            )
            found[f"merges_{group}"] = MERGE_FIELDS * self._max_sequences
            found[f"wide_items_{group}"] = ITEM_FIELDS * wide
        return found

    def allocate(self, device: torch.device) -> None:
        """Make room for partials."""
        for group, geometry in self.geometries.items():
            self._partials[group] = Partials.empty(
                geometry.max_partials(self._max_positions, self._max_sequences),
                kv_heads=geometry.kv_heads,
                rows=geometry.group,  # narrow tiles are of one token
                head_dim=geometry.head_dim,
                device=device,
            )

    def plan(self, batch: ForwardBatch, *, size: Size | None = None) -> dict[str, Int32s]:
        """Return what goes to the places of `sizes` for a step; padded for a captured one's
        `size`."""
        tokens = np.diff(batch.seq_starts)
        at = np.minimum(batch.seq_starts[:-1], max(len(batch.positions) - 1, 0))
        firsts = batch.positions[at]
        written: dict[str, Int32s] = {}
        for group, geometry in self.geometries.items():
            narrow = plan_tiles(
                batch.seq_starts,
                firsts,
                np.flatnonzero(tokens == 1),
                group=group,
                rows=geometry.narrow,
                kv_heads=geometry.kv_heads,
                programs=self._programs,
                max_partials=geometry.max_partials(self._max_positions, self._max_sequences),
            )
            wide = plan_tiles(
                batch.seq_starts,
                firsts,
                np.flatnonzero(tokens > 1),
                group=group,
                rows=geometry.wide,
                kv_heads=geometry.kv_heads,
                programs=0,
                max_partials=0,
            )
            if size is not None:
                narrow = padded(
                    narrow,
                    items=self._max_items(geometry, size.sequences),
                    merges=size.sequences,
                )
                tiles = geometry.max_wide(size.tokens, size.chunks) if size.chunks else 0
                wide = padded(wide, items=tiles, merges=0)
            written |= self._written(group, narrow, wide)
        return written

    def mirror(self, places: Mapping[str, torch.Tensor]) -> None:
        """Say where the step's buffers have what `plan` gave last."""
        for group, geometry in self.geometries.items():
            items, merges, wide = (
                places[name][: self._counts[name]].view(-1, fields)
                for name, fields in (
                    (f"narrow_items_{group}", ITEM_FIELDS),
                    (f"merges_{group}", MERGE_FIELDS),
                    (f"wide_items_{group}", ITEM_FIELDS),
                )
            )
            tiles = []
            if len(items):
                partials = self._partials[group]
                tiles.append(
                    DeviceTiles(rows=geometry.narrow, items=items, merges=merges, partials=partials)
                )
            if len(wide):
                tiles.append(
                    DeviceTiles(rows=geometry.wide, items=wide, merges=merges, partials=None)
                )
            self._tiles[group] = tiles

    def tiles(self, group: int) -> Sequence[DeviceTiles]:
        """Return the launches of an attention operation in this step."""
        return self._tiles[group]

    def _written(self, group: int, narrow: TileItems, wide: TileItems) -> dict[str, Int32s]:
        written = {
            f"narrow_items_{group}": narrow.items.reshape(-1),
            f"merges_{group}": narrow.merges.reshape(-1),
            f"wide_items_{group}": wide.items.reshape(-1),
        }
        self._counts |= {name: len(values) for name, values in written.items()}
        return written

    def _max_items(self, geometry: Geometry, num_sequences: int) -> int:
        return max_items(num_sequences, kv_heads=geometry.kv_heads, programs=self._programs)


def geometries(program: Program, *, exact: bool) -> dict[int, Geometry]:
    """By query heads of a KV head, of all attention operations over whole caches; context_steps.py
    plans the others."""
    found: dict[int, Geometry] = {}
    for ops in program.segments.values():
        for op in ops:
            if isinstance(op, Attention) and op.degree == 1:
                itemsize = program.caches[op.cache].dtype.itemsize  # of queries too
                group = op.heads // op.kv_heads
                found[group] = Geometry(
                    group=group,
                    kv_heads=op.kv_heads,
                    head_dim=op.head_dim,
                    narrow=narrow_rows(group, is_exact=exact, itemsize=itemsize),
                    wide=wide_rows(group, op.head_dim, itemsize=itemsize),
                )
    return found


def partial_bytes(program: Program, limits: StepLimits, *, exact: bool) -> int:
    """Return bytes of room for partials."""
    return sum(
        geometry.max_partials(program.max_positions, limits.max_sequences)
        * geometry.kv_heads
        * geometry.group
        * (geometry.head_dim + 2)
        * 4
        for geometry in geometries(program, exact=exact).values()
    )


def num_programs(device: torch.device) -> int:
    """Programs that keep a device busy: a few a multiprocessor."""
    if device.type != "cuda":
        return PROGRAMS_OF_CPU
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)
