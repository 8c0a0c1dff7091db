"""BlockSets: which KV blocks each replica has, by the public hashes of KV events.

A block's hash stands for all tokens up to its end, so the longest cached prefix of a prompt is
found by a binary search over the hashes of its blocks. A set takes 8 bytes a place and is at most
two thirds full. Knows no events and no sockets. Always holds: each set is bounded, whatever is
reported; places are spread by a secret factor, so that no reported hashes can crowd together.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_EMPTY, _GONE = 0, 1
_BITS, _FIRST_BITS = 64, 10
_MAX_HASH = 2**_BITS - 1
# Blocks of prompts that were sent and are not reported yet: they will be, unless evicted at once.
_MAX_EXPECTED = 4096


class BlockSet:
    """A set of 64-bit numbers. max_blocks: further ones are left out."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._factor = secrets.randbits(_BITS) | 1
        self._places = array("Q")
        self.clear()

    def __len__(self) -> int:
        return self._num

    def clear(self) -> None:
        """Remove all."""
        self._num = self._num_used = 0
        self._resize(_FIRST_BITS)

    def __contains__(self, number: int) -> bool:
        number = number if number > _GONE else number + 2
        places, mask = self._places, self._mask
        at = (number * self._factor & _MAX_HASH) >> self._shift
        while found := places[at]:
            if found == number:
                return True
            at = (at + 1) & mask
        return False

    def add(self, number: int) -> None:
        """Add a number, unless the set is full."""
        number = number if number > _GONE else number + 2
        places, mask, free = self._places, self._mask, -1
        at = (number * self._factor & _MAX_HASH) >> self._shift
        while found := places[at]:
            if found == number:
                return
            if found == _GONE and free < 0:
                free = at
            at = (at + 1) & mask
        if self._num >= self._max_blocks:
            return
        self._num += 1
        if free >= 0:
            places[free] = number
            return
        places[at] = number
        self._num_used += 1
        if 3 * self._num_used > 2 * len(places):
            self._resize(self._bits + (2 * self._num > len(places) // 2))

    def discard(self, number: int) -> None:
        """Remove a number if it is there."""
        number = number if number > _GONE else number + 2
        places, mask = self._places, self._mask
        at = (number * self._factor & _MAX_HASH) >> self._shift
        while found := places[at]:
            if found == number:
                places[at] = _GONE
                self._num -= 1
                return
            at = (at + 1) & mask

    def _resize(self, bits: int) -> None:
        """Take 2**bits places, without those of numbers that are gone."""
        old = self._places if self._num else ()
        self._bits, self._shift, self._mask = bits, _BITS - bits, (1 << bits) - 1
        self._places = places = array("Q", bytes(8 << bits))
        factor, shift, mask = self._factor, self._shift, self._mask
        for number in old:
            if number > _GONE:
                at = (number * factor & _MAX_HASH) >> shift
                while places[at]:
                    at = (at + 1) & mask
                places[at] = number
        self._num_used = self._num


class _Blocks:
    """What the engines of one replica have. stored: by engine. block_size: 0 until it was
    reported."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.stored: dict[int, BlockSet] = {}
        self.expected: OrderedDict[int, None] = OrderedDict()
        self.block_size = 0

    def of_engine(self, engine: int) -> BlockSet:
        """Return what one engine has."""
        stored = self.stored.get(engine)
        if stored is None:
            stored = self.stored[engine] = BlockSet(self._max_blocks)
        return stored

    def matched(self, hashes: Sequence[int]) -> int:
        """Return how many of the first blocks are there, at the engine that has the most."""
        return max((self._matched(hashes, one) for one in self.stored.values()), default=0)

    def _matched(self, hashes: Sequence[int], stored: BlockSet) -> int:
        expected = self.expected
        if not (hashes and (hashes[0] in stored or hashes[0] in expected)):
            return 0  # as most replicas
        low, high = 1, len(hashes)  # hashes[:low] are there; hashes[high:] are not
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in stored or hashes[middle] in expected:
                low = middle + 1
            else:
                high = middle
        return low


class BlockSets:
    """max_blocks: remembered of each engine. A replica has one engine, or several that publish
    their blocks apart."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._of: dict[int, _Blocks] = {}

    @property
    def block_size(self) -> int:
        """Tokens of a block, as most replicas report; 0 before any has."""
        sizes = [one.block_size for one in self._of.values() if one.block_size]
        return max(set(sizes), key=sizes.count) if sizes else 0

    def num_blocks(self, number: int) -> int:
        """Return how many blocks replica `number` has reported."""
        found = self._of.get(number)
        return 0 if found is None else sum(map(len, found.stored.values()))

    def store(
        self, number: int, hashes: Iterable[int], block_size: int, *, engine: int = 0
    ) -> None:
        """Add blocks that an engine of replica `number` has cached."""
        blocks = self._of.get(number)
        if blocks is None:
            blocks = self._of[number] = _Blocks(self._max_blocks)
        if blocks.block_size != block_size:
            blocks.stored.clear()
            blocks.block_size = block_size
        stored = blocks.of_engine(engine)
        for one in hashes:
            stored.add(one)
            blocks.expected.pop(one, None)

    def remove(self, number: int, hashes: Iterable[int], *, engine: int = 0) -> None:
        """Remove blocks that an engine of replica `number` has evicted."""
        blocks = self._of.get(number)
        if blocks is not None:
            stored = blocks.of_engine(engine)
            for one in hashes:
                stored.discard(one)
                blocks.expected.pop(one, None)

    def clear(self, number: int, *, engine: int = 0) -> None:
        """Remove all blocks of an engine of replica `number`."""
        blocks = self._of.get(number)
        if blocks is not None:
            blocks.of_engine(engine).clear()
            blocks.expected.clear()

    def forget(self, number: int) -> None:
        """Forget all blocks of replica `number`."""
        self._of.pop(number, None)

    def sent(self, number: int, hashes: Sequence[int]) -> None:
        """Note that a prompt of these blocks was sent to replica `number`, which will report
        them."""
        blocks = self._of.get(number)
        if blocks is None:
            return
        for one in hashes[blocks.matched(hashes) :]:
            blocks.expected[one] = None
        while len(blocks.expected) > _MAX_EXPECTED:
            blocks.expected.popitem(last=False)

    def matched_tokens(
        self, hashes: Sequence[int], block_size: int, numbers: Iterable[int] | None = None
    ) -> dict[int, int]:
        """Return the cached tokens of a prompt by replica, for those that report such blocks.

        numbers: of the replicas that are looked at; None: all.
        """
        return {
            number: blocks.matched(hashes) * block_size
            for number in (self._of if numbers is None else numbers)
            if (blocks := self._of.get(number)) is not None and blocks.block_size == block_size
        }
