"""The hits of an optimal cache: Belady's rule, and a tighter practical bound.

A request is a chain of block ids (equal ids: equal prefixes), all of which must be in the cache
when it ends, up to the capacity. Hits are the run of ids from the first on that is cached. Belady
evicts the block needed furthest in the future; ends of chains are evicted before their beginnings,
which are needed at least as soon, so the run is never broken.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence

Chain = Sequence[int]
_NEVER = 1 << 60


def footprint(chains: Sequence[Chain]) -> int:
    """Return the number of distinct blocks."""
    return len({block for chain in chains for block in chain})


def belady_hits(chains: Sequence[Chain], num_asked: Sequence[int], capacity: int) -> int:
    """Return hits of the offline optimum; of chain i the first num_asked[i] blocks are
    looked up.
    """
    next_use = _next_uses(chains)
    cached: dict[int, tuple[int, int]] = {}  # block: (next use, depth), both negative
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for at, chain in enumerate(chains):
        if len(chain) > capacity:
            continue
        hits += _run(chain[: num_asked[at]], cached)
        used = set(chain)
        room = capacity - len(cached) - sum(block not in cached for block in chain)
        while room < 0:
            next_at, depth, block = heapq.heappop(heap)
            if block not in used and cached.get(block) == (next_at, depth):
                del cached[block]
                room += 1
        for depth, block in enumerate(chain):
            entry = (-next_use[at][depth], -depth)
            cached[block] = entry
            heapq.heappush(heap, (*entry, block))
    return hits


def lru_without_dead_hits(chains: Sequence[Chain], num_asked: Sequence[int], capacity: int) -> int:
    """Return hits of LRU with knowledge of blocks that are never requested again.

    It does not know when others are: an upper limit for practical policies.
    """
    left = Counter(block for chain in chains for block in chain)
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for at, chain in enumerate(chains):
        left.subtract(chain)
        if len(chain) > capacity:
            continue
        hits += _run(chain[: num_asked[at]], cached)
        for block in reversed(chain):
            cached[block] = None
            cached.move_to_end(block, last=left[block] > 0)
        used, surplus = set(chain), len(cached) - capacity
        gone: list[int] = []
        for block in cached:
            if len(gone) >= surplus:
                break
            if block not in used:
                gone.append(block)
        for block in gone:
            del cached[block]
    return hits


def _run(chain: Chain, cached: dict[int, tuple[int, int]] | OrderedDict[int, None]) -> int:
    for count, block in enumerate(chain):
        if block not in cached:
            return count
    return len(chain)


def _next_uses(chains: Sequence[Chain]) -> list[list[int]]:
    """Return for each block of each chain the next chain that uses it."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = []
    for at in range(len(chains) - 1, -1, -1):
        uses.append([coming.get(block, _NEVER) for block in chains[at]])
        coming.update(dict.fromkeys(chains[at], at))
    return uses[::-1]
