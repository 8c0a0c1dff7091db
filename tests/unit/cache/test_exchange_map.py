"""ExchangeMap, and what TierTransfers saves with it."""

from __future__ import annotations

import numpy as np

from quire.cache.exchange_map import ExchangeMap
from quire.cache.pool import BlockPool
from quire.cache.prefix_index import PrefixIndex
from quire.cache.tier_transfers import TierTransfers

KEYS = [bytes([at]) * 16 for at in range(8)]
BLOCKS = np.arange(8, dtype=np.int32)


def transfers(tier: ExchangeMap) -> TierTransfers:
    pool, index = BlockPool(8), PrefixIndex(8)
    index.insert(np.frombuffer(b"".join(KEYS), np.uint64).reshape(-1, 2), BLOCKS)
    return TierTransfers(tier, pool, index, lambda keys, blocks: None)


def test_only_wanted_blocks_are_saved() -> None:
    tier = ExchangeMap(8, max_saving=8)
    made = transfers(tier)
    tier.want(KEYS[2:4])
    made.evicted(KEYS, BLOCKS)
    made.swap_out(BLOCKS)
    made.findable(KEYS, BLOCKS)
    copies = made.take_copies(idle=True)
    assert copies is not None
    assert copies.from_blocks.tolist() == [2, 3]
    tier.want_no_more(KEYS[2:4])
    assert not tier.wants(KEYS[2])


def test_a_want_is_counted() -> None:
    tier = ExchangeMap(8, max_saving=8)
    tier.want(KEYS[:1])
    tier.want(KEYS[:1])
    tier.want_no_more(KEYS[:1])
    assert tier.wants(KEYS[0])
    tier.want_no_more(KEYS[:1])
    assert not tier.wants(KEYS[0])


def test_blocks_asked_for_are_saved_with_the_next_plans() -> None:
    tier = ExchangeMap(8, max_saving=8)
    made = transfers(tier)
    made.save_soon(BLOCKS[:3])
    assert made.num_to_save == 3
    copies = made.take_copies(idle=False)
    assert copies is not None
    assert copies.from_blocks.tolist() == [0, 1, 2]
    assert made.num_to_save == 0


def test_held_places_give_way_to_nothing() -> None:
    tier, landed = ExchangeMap(2, max_saving=8), []
    tier.listeners.append(lambda key, place: landed.append((key, place)))
    places = [tier.await_block(key) for key in KEYS[:2]]
    for place in places:
        assert place is not None
        tier.land(place, arrived=True)
    assert landed == list(zip(KEYS[:2], places, strict=True))
    tier.hold([0, 1])
    assert tier.await_block(KEYS[2]) is None
    tier.end_fetch(0)
    assert tier.await_block(KEYS[2]) == 0
    assert not tier.problems()


def test_a_block_that_does_not_arrive_is_not_announced() -> None:
    tier, landed = ExchangeMap(2, max_saving=8), []
    tier.listeners.append(lambda key, place: landed.append(key))
    place = tier.await_block(KEYS[0])
    assert place is not None
    tier.land(place, arrived=False)
    tier.forget_all()
    tier.land(place, arrived=True)  # all was forgotten meanwhile
    assert not landed
    assert not tier.problems()
