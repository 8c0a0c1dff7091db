"""TierBesideExchange: which of the two maps a block goes to, and chains that are in both."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.block_copies import CopiesEnded, Tier
from quire.cache.exchange_beside_tier import TierBesideExchange
from quire.cache.exchange_map import ExchangeMap
from quire.cache.pool import BlockPool
from quire.cache.prefix_index import PrefixIndex
from quire.cache.tier_transfers import TierTransfers

KEYS = [bytes([at]) * 16 for at in range(8)]
BLOCKS = np.arange(8, dtype=np.int32)
FIRST = 4  # place of the exchange


@pytest.fixture
def exchange() -> ExchangeMap:
    return ExchangeMap(4, max_saving=8)


@pytest.fixture
def tier(exchange: ExchangeMap) -> TierBesideExchange:
    return TierBesideExchange(FIRST, Tier.DISK, exchange=exchange, block_ms=1.0, max_saving=8)


def transfers(tier: TierBesideExchange) -> TierTransfers:
    pool, index = BlockPool(8), PrefixIndex(8)
    index.insert(np.frombuffer(b"".join(KEYS), np.uint64).reshape(-1, 2), BLOCKS)
    return TierTransfers(tier, pool, index, lambda keys, blocks: None)


def test_wanted_blocks_go_to_the_exchange_and_others_to_the_tier(
    tier: TierBesideExchange, exchange: ExchangeMap
) -> None:
    made = transfers(tier)
    exchange.want(KEYS[2:4])
    made.evicted(KEYS[1:4], BLOCKS[1:4])
    copies = made.take_copies(idle=False)
    assert copies is not None
    assert copies.from_blocks.tolist() == [1, 2, 3]
    assert copies.to_blocks.tolist() == [0, FIRST, FIRST + 1]
    made.ended(
        CopiesEnded(
            to_tiers=copies.to_tiers, to_blocks=copies.to_blocks, arrived=np.ones(3, np.bool_)
        )
    )
    assert tier.run(KEYS[1:4]) == [0, FIRST, FIRST + 1]
    assert exchange.run(KEYS[2:4]) == [0, 1]
    assert not tier.problems()


def test_what_the_tier_has_is_saved_for_a_lease_all_the_same(
    tier: TierBesideExchange, exchange: ExchangeMap
) -> None:
    tier.load([(KEYS[0], 0)])
    assert tier.knows(KEYS[0])
    exchange.want(KEYS[:1])
    assert not tier.knows(KEYS[0])
    place = tier.await_block(KEYS[0])
    assert place == FIRST
    assert tier.knows(KEYS[0])
    tier.land(place, arrived=True)
    assert tier.run(KEYS[:1]) == [FIRST]
    exchange.want_no_more(KEYS[:1])
    assert tier.knows(KEYS[0])


def test_a_chain_may_be_in_both_and_is_then_loaded_whatever_it_costs(
    tier: TierBesideExchange, exchange: ExchangeMap
) -> None:
    tier.load([(KEYS[0], 2), (KEYS[2], 3)])
    arrived = exchange.await_block(KEYS[1])
    assert arrived is not None
    exchange.land(arrived, arrived=True)
    assert tier.run(KEYS[:4]) == [2, FIRST, 3]
    assert tier.is_paid(np.array([2, FIRST, 3], np.int32))
    assert not tier.is_paid(np.array([2, 3], np.int32))
    places = np.array([2, FIRST, 3], np.int32)
    tier.begin_fetch(places)
    assert exchange.num_kept == 1
    # A place that is being fetched is not given to another block.
    assert [exchange.await_block(key) for key in KEYS[4:7]] == [1, 2, 3]
    assert exchange.await_block(KEYS[7]) is None
    for place in places.tolist():
        tier.end_fetch(place)
    assert exchange.num_kept == 0
    assert not tier.problems()


def test_a_block_that_does_not_arrive_is_forgotten_where_it_lay(
    tier: TierBesideExchange, exchange: ExchangeMap
) -> None:
    """Its place stays as it is while a lease holds it; the tier keeps a block of that digest."""
    tier.load([(KEYS[0], 0)])
    place = exchange.await_block(KEYS[0])
    assert place is not None
    exchange.land(place, arrived=True)
    exchange.hold([place])
    made = transfers(tier)
    places = made.run(KEYS[:1])
    assert places.tolist() == [FIRST + place]
    tier.begin_fetch(places)
    made.swap_in(BLOCKS[:0], BLOCKS[7:], places, KEYS[:1])
    made.ended(
        CopiesEnded(
            to_tiers=np.array([Tier.POOL], np.int32),
            to_blocks=BLOCKS[7:],
            arrived=np.zeros(1, np.bool_),
        )
    )
    assert tier.run(KEYS[:1]) == [0]
    assert exchange.num_kept == 1
    assert place not in [exchange.await_block(key) for key in KEYS[1:5]]
    exchange.end_fetch(place)
    assert exchange.await_block(KEYS[5]) == place
    assert not tier.problems()


def test_a_tier_that_fails_leaves_the_exchange(
    tier: TierBesideExchange, exchange: ExchangeMap
) -> None:
    tier.load([(KEYS[0], 0)])
    awaited = tier.await_block(KEYS[3])
    place = exchange.await_block(KEYS[1])
    assert place is not None
    tier.forget_tier()
    assert tier.is_lost
    assert awaited is not None
    tier.land(awaited, arrived=False)
    exchange.land(place, arrived=True)
    assert tier.run(KEYS[:1]) == []
    assert tier.run(KEYS[1:2]) == [FIRST + place]
    assert tier.await_block(KEYS[5]) is None
    exchange.want(KEYS[5:6])
    assert tier.await_block(KEYS[5]) == FIRST + 1
    assert not tier.problems()


def test_a_flush_forgets_both(tier: TierBesideExchange, exchange: ExchangeMap) -> None:
    tier.load([(KEYS[0], 0)])
    place = exchange.await_block(KEYS[1])
    assert place is not None
    exchange.land(place, arrived=True)
    tier.forget_all()
    assert tier.run(KEYS[:1]) == tier.run(KEYS[1:2]) == []
    assert not tier.problems()


def test_blocks_on_their_way_to_the_tier_keep_none_from_the_exchange(
    exchange: ExchangeMap,
) -> None:
    """Preempted requests may fill a disk's queue while an engine waits for a prompt's blocks."""
    made = transfers(
        TierBesideExchange(FIRST, Tier.DISK, exchange=exchange, block_ms=1.0, max_saving=2)
    )
    made.swap_out(BLOCKS[:4])
    exchange.want(KEYS[4:])
    made.save_soon(BLOCKS[4:])
    assert made.num_to_save == 8
    copies = made.take_copies(idle=False)
    assert copies is not None
    assert copies.from_blocks.tolist() == [0, 4, 5, 6, 7]
    assert (copies.to_blocks >= FIRST).tolist() == [False, True, True, True, True]
    assert made.num_to_save == 3
    made.ended(
        CopiesEnded(
            to_tiers=copies.to_tiers[1:],
            to_blocks=copies.to_blocks[1:],
            arrived=np.ones(4, np.bool_),
        )
    )
    assert made.take_copies(idle=False) is None  # the disk still writes the first block
    made.ended(
        CopiesEnded(
            to_tiers=copies.to_tiers[:1],
            to_blocks=copies.to_blocks[:1],
            arrived=np.ones(1, np.bool_),
        )
    )
    copies = made.take_copies(idle=False)
    assert copies is not None
    assert copies.from_blocks.tolist() == [1]
    assert exchange.run(KEYS[4:]) == [0, 1, 2, 3]
