"""TierMap: which block of a tier holds which chain, and which gives way when room is needed.

Knows digests and places of one tier; moves no bytes and knows nothing of pools or requests. A
place is free, or awaits a block that is on its way, or holds one. What is held is found, and gives
way in the order in which it was last of use, but never while it is being fetched. Always holds: one
place a digest, one digest a place; a place that is being fetched gets no other block, unless all
were forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import Tier

Int32s = NDArray[np.int32]


class TierMap:
    """`num_blocks` places of a tier of that kind; lower ones are filled first.

    Memory grows with those that were used. block_ms: expected time to move one block, until it is
    measured. max_saving: blocks that may be on their way there at once. keeps_evicted: whether
    blocks that leave the pool are saved here. exchanges: whether blocks of other engines come here.
    is_lost: whether what stored the blocks has failed, and others go on.
    """

    keeps_evicted = True
    exchanges = False
    is_lost = False

    def __init__(
        self,
        num_blocks: int,
        kind: Tier = Tier.DISK,
        *,
        block_ms: float = 1.0,
        max_saving: int = 16,
    ) -> None:
        self.num_blocks, self.kind = num_blocks, kind
        self.block_ms, self.max_saving = block_ms, max_saving
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        self._key_of: dict[int, bytes] = {}
        self._awaited: dict[int, bytes] = {}
        self._awaited_keys: set[bytes] = set()
        self._fetching: Int32s = np.zeros(num_blocks, np.int32)
        self._free: list[int] = []  # of those used before
        self._forgotten: set[int] = set()  # places without a block that are still being fetched
        self._first_unused = 0

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._place_of)

    def load(self, held: Iterable[tuple[bytes, int]]) -> None:
        """Enter what lies there from an earlier run, the oldest first; before anything else."""
        for key, place in held:
            self._place_of[key] = place
            self._key_of[place] = key
        self._first_unused = max(self._key_of, default=-1) + 1
        below = range(self._first_unused - 1, -1, -1)
        self._free = [place for place in below if place not in self._key_of]

    def knows(self, key: bytes) -> bool:
        """Return whether a block of this digest is there or on its way there."""
        return key in self._place_of or key in self._awaited_keys

    def wants(self, key: bytes) -> bool:
        """Return whether a block of this digest is saved in any case."""
        return False

    @property
    def saving_limits(self) -> tuple[int, ...]:
        """Blocks that may be on their way at once, to each of the media behind this map."""
        return (self.max_saving,)

    def medium(self, key: bytes) -> int:
        """Return the number of the medium that a block of this digest is saved to."""
        return 0

    def medium_of(self, place: int) -> int:
        """Return the number of the medium of a place."""
        return 0

    def is_paid(self, places: Int32s) -> bool:
        """Return whether these are loaded whatever it costs: their transfer was paid for."""
        return False

    def run(self, keys: Sequence[bytes]) -> list[int]:
        """Return places of the longest run of digests from the first on."""
        places = []
        for key in keys:
            place = self._place_of.get(key)
            if place is None:
                break
            places.append(place)
        return places

    def await_block(self, key: bytes) -> int | None:
        """Return a place for a block that is on its way; None where all are being fetched or
        awaited.

        Whatever was held there is forgotten.
        """
        place = self._room()
        if place is None:
            return None
        self._awaited[place] = key
        self._awaited_keys.add(key)
        return place

    def land(self, place: int, *, arrived: bool) -> None:
        """Note that the block awaited at `place` is there, or will never be."""
        key = self._awaited.pop(place, None)
        if key is None:
            return  # all was forgotten meanwhile
        self._awaited_keys.discard(key)
        if arrived and key not in self._place_of:
            self._place_of[key] = place
            self._key_of[place] = key
        else:
            self._free.append(place)

    def begin_fetch(self, places: Int32s) -> None:
        """Keep these as they are until `end_fetch`. Of a chain's blocks the first counts as used
        last, because those behind it are useless without it."""
        np.add.at(self._fetching, places, 1)
        for place in places[::-1].tolist():
            key = self._key_of.get(place)
            if key is not None:
                self._place_of.move_to_end(key)

    def end_fetch(self, place: int) -> None:
        """Note that a fetch from there has ended."""
        self._fetching[place] -= 1
        if place in self._forgotten and not self._fetching[place]:
            self._forgotten.discard(place)
            self._free.append(place)

    def forget(self, place: int) -> None:
        """Forget the block at a place that is not what it should be: it is not found any more."""
        if place not in self._key_of:
            return
        self._drop(place)
        if self._fetching[place]:  # others still read it, or send its bytes to another engine
            self._forgotten.add(place)
        else:
            self._free.append(place)

    def forget_all(self) -> None:
        """Forget all blocks, stored or in transfer."""
        self._place_of.clear()
        self._key_of.clear()
        self._awaited.clear()
        self._awaited_keys.clear()
        self._free.clear()
        self._forgotten.clear()
        self._first_unused = 0

    def problems(self) -> list[str]:
        """Return contradictions in words."""
        found = [
            f"tier: key of place {place} leads to place {self._place_of.get(key)}"
            for place, key in self._key_of.items()
            if self._place_of.get(key) != place
        ]
        held = self._place_of.values()
        places = sorted([*self._free, *self._forgotten, *self._awaited, *held])
        if places != list(range(self._first_unused)) or self._first_unused > self.num_blocks:
            found.append(
                f"tier: {len(self._free)} free, {len(self._forgotten)} forgotten, "
                f"{len(self._awaited)} awaited and {len(held)} held places do not add up to "
                f"{self._first_unused} of {self.num_blocks}"
            )
        if set(self._awaited.values()) != self._awaited_keys:
            found.append("tier: awaited places and digests disagree")
        return found

    def _room(self) -> int | None:
        """Return a place that holds nothing, or none that cannot give way."""
        if self._free:
            return self._free.pop()
        if self._first_unused < self.num_blocks:
            self._first_unused += 1
            return self._first_unused - 1
        oldest = next((at for at in self._place_of.values() if not self._fetching[at]), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest

    def _drop(self, place: int) -> None:
        key = self._key_of.pop(place, None)
        if key is not None:
            del self._place_of[key]
