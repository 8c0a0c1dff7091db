"""StepBuffers: the numbers of a ForwardBatch where the device reads them, at fixed addresses.

One int32 array on the device with a place for each field at its largest, and where the device
works beside the host two more there, used in turn: a step is mirrored by one copy of what it uses,
and the next may be written while the device has not come to that copy. A captured graph
reads these places again, so they never move. Rows beyond a step's, up to the size a graph was
captured with, are made harmless: token 0 at position 0, which is stored nowhere and attends to
nothing. Knows no program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from quire.execute.gpu.step_sizes import Size
from quire.execute.gpu.stream import Mark, Stream, stream_of
from quire.program.batch import ForwardBatch

Int32s = NDArray[np.int32]
ALIGNMENT = 64  # elements; kernels read vectors
NOTHING: Mapping[str, Int32s] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Rows of a step as computed, padded to a graph's where one runs, and the batch itself, without
    padding, for what decides on the host."""

    tokens: int
    sequences: int
    samples: int
    batch: ForwardBatch

    def of_samples(self, count: int) -> Counts:
        """Return the same step with so many sample rows."""
        return replace(self, samples=count)


class StepBuffers:
    """Tensors int32: token_ids, late_slots, positions, rope_positions, kv_slots [max_tokens],
    seq_starts [max_sequences + 1], sample_rows [max_tokens], block_tables [max_sequences,
    max_columns], and `others` by name, for what is planned from a batch. max_columns
    is 0 where there is no cache."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_columns: int,
        device: torch.device,
        others: Mapping[str, int],
        stream: Stream | None = None,
    ) -> None:
        sizes = {
            "token_ids": max_tokens,
            "late_slots": max_tokens,
            "positions": max_tokens,
            "rope_positions": max_tokens,
            "kv_slots": max_tokens,
            "sample_rows": max_tokens,
            "seq_starts": max_sequences + 1,
            **others,
            "block_tables": max_sequences * max_columns,  # the last: only its used rows are copied
        }
        self._first: dict[str, int] = {}
        total = 0
        for name, size in sizes.items():
            self._first[name] = total
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._stream = stream_of(device) if stream is None else stream
        held = torch.zeros(total, dtype=torch.int32, device=device)
        self._device, self._turn = held, 0
        # On the CPU there is one array: what is written is there.
        self._hosts = [held]
        if self._stream.is_beside:
            zeros = torch.zeros(total, dtype=torch.int32)
            self._hosts = [self._stream.pinned(zeros), self._stream.pinned(zeros.clone())]
        self._marks: list[Mark | None] = [None] * len(self._hosts)
        self._host: Int32s = self._hosts[0].numpy()
        parts = {name: held[self._first[name] :][:size] for name, size in sizes.items()}
        self.token_ids, self.late_slots = parts["token_ids"], parts["late_slots"]
        self.positions = parts["positions"]
        self.rope_positions, self.kv_slots = parts["rope_positions"], parts["kv_slots"]
        self.sample_rows, self.seq_starts = parts["sample_rows"], parts["seq_starts"]
        self.block_tables = parts["block_tables"].view(max_sequences, max_columns)
        self.others = {name: parts[name] for name in others}
        self.max_columns = max_columns

    @staticmethod
    def num_bytes(*, max_tokens: int, max_sequences: int, max_columns: int) -> int:
        """Return bytes on the device, at most."""
        return 4 * (6 * max_tokens + max_sequences * (max_columns + 1) + 9 * ALIGNMENT)

    def load(
        self,
        batch: ForwardBatch,
        *,
        size: Size | None = None,
        others: Mapping[str, Int32s] = NOTHING,
    ) -> Counts:
        """Mirror a batch, and what was planned from it, padded to a captured step's `size`."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._host = self._hosts[self._turn].numpy()
        if (copied := self._marks[self._turn]) is not None:
            copied.wait()  # of the step before the last: over, or there are three
        tokens, sequences = len(batch.token_ids), len(batch.seq_starts) - 1
        padded = tokens if size is None else size.tokens
        for name in ("token_ids", "positions", "rope_positions", "sample_rows"):
            self._write(name, getattr(batch, name), padded, 0)
        (cache,) = batch.caches
        self._write("kv_slots", cache.kv_slots, padded, -1)
        self._write("late_slots", batch.late_slots, padded, -1)
        for name, values in others.items():
            self._write(name, values, len(values), 0)
        starts = self._host[self._first["seq_starts"] :]
        starts[: sequences + 1] = batch.seq_starts
        rows = sequences if size is None else size.sequences
        starts[sequences + 1 : rows + 1] = tokens  # no sequence has the rows beyond
        columns = cache.block_tables.shape[1]
        tables = self._host[self._first["block_tables"] :][: sequences * self.max_columns]
        if self.max_columns:  # else the program has no cache
            tables.reshape(sequences, self.max_columns)[:, :columns] = cache.block_tables
        if self._stream.is_beside:
            used = self._first["block_tables"] + len(tables)
            self._stream.copy(self._hosts[self._turn][:used], self._device[:used])
            self._marks[self._turn] = self._stream.mark()
        return Counts(
            tokens=padded,
            sequences=rows,
            samples=len(batch.sample_rows),
            batch=batch,
        )

    def load_samples(self, sample_rows: Int32s) -> None:
        """Put other sample rows in place, for a slice of the head."""
        given = self._stream.to_device(sample_rows)
        self._stream.copy(given, self.sample_rows[: len(sample_rows)])

    def _write(self, name: str, values: Int32s, padded: int, filler: int) -> None:
        place = self._host[self._first[name] :][:padded]
        place[: len(values)] = values
        place[len(values) :] = filler
