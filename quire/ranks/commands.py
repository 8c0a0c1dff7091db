"""What rank 0 sends the other ranks: how each starts, and every call that touches their memory.

A rank mirrors the calls of rank 0's executor, so that it needs no scheduler, no tables, no tokens
of requests and no sampling, and cannot come apart from rank 0 in any of them. msgpack with checked
fields (quire/base/wire.py); nothing is pickled. Knows no process and no executor.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.wire import Wire
from quire.program.batch import ForwardBatch, Int32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Make the KV pool. own_block_size: positions of a block in it, where the blocks of the engine
    are divided over ranks (own_pieces.py). span: bytes of each rank in the file of all pools; 0
    where there is none (shared_pools.py)."""

    num_blocks: int
    block_size: int
    own_block_size: int
    span: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """Prefault the pages of blocks [first, last) of a layer."""

    layer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlocks:
    """Copy pool blocks."""

    copy_from: Int32s
    copy_to: Int32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a segment on a batch, and `then` another; -1 for none. step: its number, where ranks are
    stages; else 0. drafts: how many first layers this is a pass of (first_layers.py); 0: it is a
    step of the whole model."""

    step: int
    segment: int
    then: int
    batch: ForwardBatch
    sample_rows: Int32s
    drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAgain:
    """Run a segment on other sample rows of the last Run's batch. first: where they begin in that
    batch's own; -1 where they are others. drafts: see Run."""

    segment: int
    first: int
    sample_rows: Int32s
    drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayers:
    """Run layers first .. end - 1 of the trunk on a part of a prompt."""

    batch: ForwardBatch
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the process."""


Command = Allocate | Touch | CopyBlocks | Run | RunAgain | RunLayers | Stop
# Bytes of a command beside its arrays.
OVERHEAD_BYTES = 4096


def command_wire() -> Wire:
    """Return the codec of commands."""
    return Wire(Allocate, Touch, CopyBlocks, Run, RunAgain, RunLayers, Stop)


def command_bytes(*, tokens: int, samples: int, sequences: int, positions: int) -> int:
    """Return the size of the largest command: a batch of so many rows, with block tables for so
    many positions in the smallest blocks (4), or copies of as many blocks."""
    columns = sequences * (-(-positions // 4) + 1)
    return OVERHEAD_BYTES + 4 * (6 * tokens + 2 * samples + sequences + 1 + 2 * columns)
