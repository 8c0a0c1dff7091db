"""The offline optimum for caches: never beaten by any choice of what to keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from bench.memory.belady import belady_hits, footprint, lru_without_dead_hits
from tests.cases import each_case

# Chains of a small tree of prefixes: 0-1-2, 0-1-3, 0-4, 5-6, 7.
CHAINS = ((0, 1, 2), (0, 1, 3), (0, 4), (0, 1), (5, 6), (5,), (7,), (0,))


def best_hits(chains: Sequence[Sequence[int]], asked: Sequence[int], capacity: int) -> int:
    """Return the hits of an exhaustive search over what is kept after each chain."""
    reachable: dict[frozenset[int], int] = {frozenset(): 0}
    for chain, num_asked in zip(chains, asked, strict=True):
        if len(chain) > capacity:
            continue
        after: dict[frozenset[int], int] = {}
        for kept, hits in reachable.items():
            found = 0
            while found < num_asked and chain[found] in kept:
                found += 1
            others = sorted(kept - set(chain))
            room = min(capacity - len(chain), len(others))
            for more in combinations(others, room):
                now = frozenset((*chain, *more))
                after[now] = max(after.get(now, 0), hits + found)
        reachable = after
    return max(reachable.values())


@each_case("seed", range(40))
def test_no_choice_of_kept_blocks_finds_more_than_beladys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chains = [CHAINS[at] for at in rng.integers(0, len(CHAINS), 9)]
    asked = [int(rng.integers(0, len(chain) + 1)) for chain in chains]
    whole = [len(chain) for chain in chains]
    capacity = int(rng.integers(1, 7))
    assert belady_hits(chains, whole, capacity) == best_hits(chains, whole, capacity)
    assert belady_hits(chains, asked, capacity) <= best_hits(chains, asked, capacity)
    assert lru_without_dead_hits(chains, whole, capacity) <= best_hits(chains, whole, capacity)


def test_with_enough_capacity_both_find_every_earlier_block() -> None:
    chains = [CHAINS[0], CHAINS[1], CHAINS[0], CHAINS[2]]
    whole = [len(chain) for chain in chains]
    assert footprint(chains) == 5
    assert belady_hits(chains, whole, 5) == lru_without_dead_hits(chains, whole, 5) == 6


def test_a_chain_longer_than_the_cache_is_skipped_by_both() -> None:
    chains = [(0, 1, 2), (0, 1), (0, 1, 2), (0, 1)]
    whole = [len(chain) for chain in chains]
    assert belady_hits(chains, whole, 2) == lru_without_dead_hits(chains, whole, 2) == 2
