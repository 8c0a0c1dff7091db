"""StoreMap: places that threads use are not given out, whatever is forgotten meanwhile."""

from __future__ import annotations

from quire.cache.store_map import StoreMap

KEYS = [bytes([at]) * 16 for at in range(8)]


def landed(tier: StoreMap, key: bytes) -> int:
    place = tier.await_block(key)
    assert place is not None
    tier.land(place, arrived=True)
    return place


def test_only_what_a_store_lacks_is_saved() -> None:
    tier = StoreMap(4, max_saving=4)
    assert tier.knows(KEYS[0])
    tier.want(KEYS[:1])
    assert not tier.knows(KEYS[0])
    landed(tier, KEYS[0])
    assert tier.knows(KEYS[0])


def test_a_flush_keeps_places_in_use_until_their_use_ends() -> None:
    tier, seen = StoreMap(4, max_saving=4), []
    tier.listeners.append(lambda key, place: seen.append(key))
    read = landed(tier, KEYS[0])
    tier.hold((read,))
    tier.hold((read,))
    written = tier.await_block(KEYS[1])
    free = landed(tier, KEYS[2])
    assert written is not None
    seen.clear()
    tier.forget_all()
    assert tier.problems() == []
    assert len(tier) == 0
    assert not tier.is_awaited(KEYS[1])
    others = {tier.await_block(key) for key in KEYS[3:6]}
    assert others == {free, 3, None}
    tier.end_fetch(read)
    assert tier.await_block(KEYS[6]) is None
    tier.end_fetch(read)
    assert tier.await_block(KEYS[6]) == read
    tier.land(written, arrived=True)  # of before the flush: not found
    assert seen == []
    assert tier.run(KEYS[1:2]) == []
    assert tier.await_block(KEYS[7]) == written
    assert tier.problems() == []
