"""PrefixHistory: which replica probably has the beginning of a prompt in its cache.

Approximate: the router remembers what it sent where, in blocks of bytes. A block is named by a hash
of itself and all blocks before it, so equal names mean equal beginnings. Each replica has a bit in
the mask of a block; its oldest blocks are forgotten beyond a limit, about as its cache evicts them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

BLOCK_BYTES = 256
MAX_BLOCKS = 4096


def block_names(scope: str, prompt: bytes) -> list[int]:
    """Return the names of the full blocks of a prompt. scope: prompts of others share no cache."""
    name = hash(scope)
    names = []
    for at in range(0, min(len(prompt) - BLOCK_BYTES + 1, MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        name = hash((name, prompt[at : at + BLOCK_BYTES]))
        names.append(name)
    return names


class History(Protocol):
    """What is remembered of the prompts that replicas were sent."""

    def matched_blocks(self, names: Sequence[int], mask: int) -> dict[int, int]:
        """Return how many blocks each replica of `mask` has, by its number; none is left out."""

    def note(self, names: Sequence[int], number: int) -> None:
        """Note that a prompt with these blocks was sent to replica `number`."""

    def forget(self, number: int) -> None:
        """Note that replica `number` has an empty cache now, or is gone."""


class PrefixHistory:
    """max_blocks: remembered for each replica."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._masks: dict[int, int] = {}
        self._of_replica: dict[int, OrderedDict[int, None]] = {}

    def matched_blocks(self, names: Sequence[int], mask: int) -> dict[int, int]:
        """Return how many blocks each replica of `mask` has, by its number; none is left out."""
        found: dict[int, int] = {}
        for count, name in enumerate(names):
            have = self._masks.get(name, 0) & mask
            if have != mask:
                for number in _bits(mask & ~have):
                    found[number] = count
                mask = have
                if not mask:
                    return found
        for number in _bits(mask):
            found[number] = len(names)
        return found

    def note(self, names: Sequence[int], number: int) -> None:
        """Note that a prompt with these blocks was sent to replica `number`."""
        blocks, bit = self._of_replica.setdefault(number, OrderedDict()), 1 << number
        for name in names:
            if name in blocks:
                blocks.move_to_end(name)
            else:
                blocks[name] = None
                self._masks[name] = self._masks.get(name, 0) | bit
        while len(blocks) > self._max_blocks:
            self._drop(blocks.popitem(last=False)[0], bit)

    def forget(self, number: int) -> None:
        """Note that replica `number` has an empty cache now, or is gone."""
        for name in self._of_replica.pop(number, ()):
            self._drop(name, 1 << number)

    def _drop(self, name: int, bit: int) -> None:
        left = self._masks.get(name, 0) & ~bit
        if left:
            self._masks[name] = left
        else:
            self._masks.pop(name, None)


def _bits(mask: int) -> list[int]:
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
