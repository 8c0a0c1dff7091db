"""ConnectedPools: the KV pools of ranks that share no memory, so that rank 0 has whole blocks.

What shared_pools.py does in one file goes through links here (quire/comm/links.py): rank 0 asks a
rank for its part of a block or sends it one, and a thread of that rank, a PoolServer, answers from
its pool, whatever the rank computes. Blocks are the same bytes as in shared memory. Knows links,
pools and parts of blocks; no program and no process. Always holds: a rank has one ask at a time;
what was imported or touched lies in the pools when the call returns; a rank that does not answer
ends the group.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import DeviceLost
from quire.comm.links import Link, LinkMemory, LinkSizes
from quire.comm.shared_memory import SharedMemoryRank
from quire.ranks.shared_pools import PoolArray, PoolShare, whole_shape

Bytes = NDArray[np.uint8]

# Parts of blocks go in pieces of at most so many bytes.
_PIECES = LinkSizes(slot_bytes=1 << 18, slots=4)
_ASK = struct.Struct("<6q")
_ASKS = LinkSizes(slot_bytes=64, slots=4)
_ALIGNMENT = 64
_LOOK_S = 0.25  # how often a wait for a pool looks whether the group is lost


class Kind(IntEnum):
    """What rank 0 asks for."""

    EXPORT = 1
    IMPORT = 2
    TOUCH = 3
    END = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """kind; allocation: which of the rank's caches it is about, by number; then the number of a
    block, or a layer of the pool with the first and the end of its blocks. section: which of the
    arrays that a pool is made of."""

    kind: Kind
    allocation: int
    at: int = 0
    first: int = 0
    end: int = 0
    section: int = 0

    def packed(self) -> bytes:
        """Return the message."""
        return _ASK.pack(self.kind, self.allocation, self.at, self.first, self.end, self.section)


def read_ask(message: bytes) -> Ask:
    """Return the ask of a message. Raises DeviceLost for another message."""
    try:
        kind, *numbers = _ASK.unpack(message)
        return Ask(Kind(kind), *numbers)
    except (struct.error, ValueError) as error:
        raise DeviceLost(f"rank 0 asked for blocks in other words ({error})") from error


def block_link_bytes(num_ranks: int) -> int:
    """Return the bytes of all links of blocks in a segment, and what aligns them."""
    return _ALIGNMENT + (num_ranks - 1) * (2 * _PIECES.total + _ASKS.total)


class BlockEnd:
    """One rank's end of the links to and from another one: asks, parts in, parts out."""

    def __init__(self, asks: Link, incoming: Link, outgoing: Link) -> None:
        self.asks, self._in, self._out = asks, incoming, outgoing
        self._received = self._sent = 0

    def send(self, part: Bytes) -> None:
        """Send a contiguous part of a block."""
        self._sent += 1
        self._out.native.begin(self._sent)
        self._out.send_rows(_pieces(part))

    def receive(self, part: Bytes) -> None:
        """Fill a contiguous part of a block."""
        self._received += 1
        self._in.native.begin(self._received)
        self._in.receive_rows(_pieces(part))


def block_ends(group: SharedMemoryRank, first_byte: int) -> dict[int, BlockEnd]:
    """Return this rank's ends by the rank at the other one: at rank 0 those to all others, at
    another rank that to rank 0. first_byte: what the segment has before the links of blocks."""
    others = group.degree - 1
    memory = LinkMemory(
        group,
        first_byte=first_byte + -first_byte % _ALIGNMENT,
        rows=_PIECES,
        messages=_ASKS,
        num_rows=2 * others,
        num_messages=others,
    )
    is_zero = group.rank == 0
    ends = {}
    for rank in range(1, group.degree) if is_zero else [group.rank]:
        number, peer = rank - 1, rank if is_zero else 0
        to_rank = memory.rows(2 * number, group, peer=peer, sends=is_zero)
        from_rank = memory.rows(2 * number + 1, group, peer=peer, sends=not is_zero)
        asks = memory.messages(number, group, peer=peer, sends=is_zero)
        ends[peer] = BlockEnd(
            asks,
            incoming=from_rank if is_zero else to_rank,
            outgoing=to_rank if is_zero else from_rank,
        )
    return ends


NO_ENDS: Mapping[int, BlockEnd] = MappingProxyType({})


def end_servers(ends: Iterable[BlockEnd]) -> None:
    """Let the threads at the other ends end; nothing is asked any more."""
    with suppress(DeviceLost):  # they have ended then
        for end in ends:
            end.asks.send(Ask(Kind.END, 0).packed())


class ConnectedPools:
    """The pools as rank 0 sees them: its own memory, and those of the others over `ends`.

    own: of rank 0. shares: of each rank. head_bytes, blocks_of_each: as in
    SharedPools. allocation: how often caches have been allocated. lost: ends the group and returns
    the error to raise. section, lock: of pools of several arrays, which of them this is, and what
    all of them ask by turns with.
    """

    def __init__(
        self,
        own: PoolArray,
        ends: Mapping[int, BlockEnd],
        shares: Sequence[PoolShare],
        *,
        head_bytes: int,
        blocks_of_each: int,
        allocation: int,
        lost: Callable[[str], DeviceLost],
        section: int = 0,
        lock: threading.Lock | None = None,
    ) -> None:
        self._own = own
        self._ends, self._shares, self._lost = ends, shares, lost
        self._shape = whole_shape(shares, blocks_of_each, head_bytes)
        self._allocation, self._section = allocation, section
        self._parts = {rank: np.empty(self._part_shape(rank), np.uint8) for rank in ends}
        self._ack = np.empty(1, np.uint8)
        self._lock = threading.Lock() if lock is None else lock

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block over all layers."""
        return int(np.prod(self._shape))

    def export_block(self, block: int, out: Bytes) -> None:
        """Copy a whole block to out [block_bytes]; any thread. Raises DeviceLost."""
        whole = out.reshape(self._shape)
        with self._asking():
            for end in self._ends.values():
                end.asks.send(self._ask(Kind.EXPORT, block))
            own = self._own.read(block).reshape(self._part_shape(0))
            whole[self._shares[0].place] = own
            for rank, end in self._ends.items():
                end.receive(self._parts[rank].reshape(-1))
                whole[self._shares[rank].place] = self._parts[rank]

    def import_block(self, block: int, raw: Bytes) -> None:
        """Make a block what export_block gave, here or in an engine of another layout; any thread.
        Raises DeviceLost."""
        whole = raw.reshape(self._shape)
        with self._asking():
            for rank, end in self._ends.items():
                end.asks.send(self._ask(Kind.IMPORT, block))
                self._parts[rank][:] = whole[self._shares[rank].place]
                end.send(self._parts[rank].reshape(-1))
            self._own.write(block, whole[self._shares[0].place])
            for end in self._ends.values():
                end.receive(self._ack)

    def touch(self, layer: int, first: int, last: int) -> None:
        """Write a zero to each page of blocks of a layer that were never written."""
        with self._asking():
            asked = []
            for rank, share in enumerate(self._shares):
                start, end = share.layers
                if not start <= layer < end:
                    continue
                if rank == 0:
                    self._own.touch(layer - start, first, last)
                    continue
                ask = self._ask(Kind.TOUCH, layer - start, first, last)
                self._ends[rank].asks.send(ask)
                asked.append(self._ends[rank])
            for one in asked:
                one.receive(self._ack)

    def _ask(self, kind: Kind, at: int, first: int = 0, end: int = 0) -> bytes:
        ask = Ask(kind, self._allocation, at, first, end, self._section)
        return ask.packed()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """One caller at a time; turn a lost rank into the end of the group."""
        with self._lock:
            try:
                yield
            except DeviceLost as error:
                raise self._lost(str(error)) from error

    def _part_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a block: layers, pool's blocks, heads, bytes of a
        head."""
        layers, heads = self._shares[rank].layers, self._shares[rank].heads
        return layers[1] - layers[0], self._shape[2], heads[1] - heads[0], self._shape[4]


class PoolServer:
    """The thread of a rank above 0 that answers what rank 0 asks of its pool. `end` is that of the
    links to rank 0."""

    def __init__(self, group: SharedMemoryRank, end: BlockEnd) -> None:
        self._group, self._end = group, end
        self._pools: tuple[PoolArray, ...] = ()
        self._allocation = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="quire-blocks", daemon=True)

    def start(self) -> None:
        """Answer from now on; the group is connected."""
        self._thread.start()

    def set_pool(self, *pools: PoolArray) -> None:
        """Answer from another pool, made of arrays: its cache was allocated anew."""
        with self._changed:
            self._pools = pools
            self._allocation += 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread: rank 0 has ended it, or the group is over."""
        if self._thread.ident is not None:
            self._thread.join()

    def _serve(self) -> None:
        try:
            while self._answer(read_ask(self._end.asks.receive())):
                pass
        except DeviceLost:
            self._group.abort()  # the other thread finds it too
        except BaseException as error:  # rank 0 must not wait for an answer
            self._group.abort(f"{type(error).__name__}: {error}")
            raise

    def _answer(self, ask: Ask) -> bool:
        """Do what is asked; return whether more may follow."""
        if ask.kind is Kind.END:
            return False
        pool, ack = self._pools_of(ask.allocation)[ask.section], np.zeros(1, np.uint8)
        if ask.kind is Kind.EXPORT:
            self._end.send(np.ascontiguousarray(pool.read(ask.at)).reshape(-1))
            return True
        if ask.kind is Kind.IMPORT:
            part = np.empty(pool.layers * pool.size, np.uint8)
            self._end.receive(part)
            pool.write(ask.at, part)
        else:
            pool.touch(ask.at, ask.first, ask.end)
        self._end.send(ack)
        return True

    def _pools_of(self, allocation: int) -> tuple[PoolArray, ...]:
        """Return the arrays of an allocation, which the rank may not have made yet."""
        with self._changed:
            while self._allocation < allocation:
                self._changed.wait(_LOOK_S)
                if self._group.native.is_aborted:
                    raise DeviceLost("the group has ended")
            return self._pools


def _pieces(part: Bytes) -> Bytes:
    """Return contiguous bytes as rows of one size, each of which fits a slot of a link."""
    size = min(len(part) & -len(part), _PIECES.slot_bytes)  # the largest power of two that divides
    return part.reshape(-1, size)
