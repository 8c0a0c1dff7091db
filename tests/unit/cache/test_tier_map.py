"""The metadata of a tier's places, against a plain model in random operations."""

from __future__ import annotations

from random import Random

import numpy as np

from quire.cache.tier_map import TierMap
from tests.cases import each_case


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def filled(num_places: int) -> TierMap:
    """Return a map with key(place) in all places."""
    tier = TierMap(num_places)
    for number in range(num_places):
        place = tier.await_block(key(number))
        assert place == number
        tier.land(place, arrived=True)
    return tier


def test_a_block_is_found_only_after_it_has_arrived() -> None:
    tier = TierMap(3)
    place = tier.await_block(key(7))
    assert place is not None
    assert tier.knows(key(7))
    assert tier.run([key(7)]) == []
    tier.land(place, arrived=True)
    assert tier.run([key(7), key(8)]) == [place]
    assert tier.problems() == []


def test_a_block_that_did_not_arrive_leaves_its_place_free() -> None:
    tier = TierMap(1)
    assert tier.await_block(key(1)) == 0
    tier.land(0, arrived=False)
    assert not tier.knows(key(1))
    assert tier.await_block(key(2)) == 0


def test_least_recently_used_places_are_replaced_ends_of_chains_first() -> None:
    tier = filled(4)
    chain = np.array(tier.run([key(0), key(1)]), np.int32)
    tier.begin_fetch(chain)
    for place in chain.tolist():
        tier.end_fetch(place)
    gone = []
    for number in range(10, 14):
        place = tier.await_block(key(number))
        assert place is not None
        gone.append(place)
        tier.land(place, arrived=True)
    assert gone == [2, 3, 1, 0]


def test_places_being_fetched_are_not_replaced() -> None:
    tier = filled(2)
    tier.begin_fetch(np.array([0], np.int32))
    assert tier.await_block(key(5)) == 1
    assert tier.await_block(key(6)) is None
    tier.end_fetch(0)
    assert tier.await_block(key(6)) == 0


def test_a_forgotten_place_gets_another_block_only_after_its_last_fetch() -> None:
    """Another fetch may read it, or a lease send its bytes under the digest of the first block."""
    tier = filled(1)
    twice = np.array([0, 0], np.int32)
    tier.begin_fetch(twice)
    tier.forget(0)
    assert not tier.knows(key(0))
    assert tier.await_block(key(5)) is None
    tier.end_fetch(0)
    tier.forget(0)  # the second fetch has failed, too
    assert tier.await_block(key(5)) is None
    assert tier.problems() == []
    tier.end_fetch(0)
    assert tier.await_block(key(5)) == 0
    tier.land(0, arrived=True)
    assert tier.run([key(5)]) == [0]
    assert tier.problems() == []


def test_restored_places_are_found_and_replaced_in_order() -> None:
    tier = TierMap(4)
    tier.load([(key(3), 2), (key(1), 0), (key(2), 3)])
    assert tier.run([key(1), key(2), key(3)]) == [0, 3, 2]
    assert [tier.await_block(key(number)) for number in (10, 11, 12)] == [1, 2, 0]
    assert tier.problems() == []


def test_everything_can_be_cleared_during_transfers() -> None:
    tier = filled(2)
    tier.begin_fetch(np.array([0], np.int32))
    assert tier.await_block(key(9)) == 1
    tier.forget_all()
    tier.land(1, arrived=True)
    tier.end_fetch(0)
    assert len(tier) == 0
    assert not tier.knows(key(9))
    assert tier.problems() == []


@each_case("seed", range(20))
def test_random_operations_agree_with_a_plain_model(seed: int) -> None:
    random, tier = Random(seed), TierMap(6)
    held: list[tuple[bytes, int]] = []  # least recently used first
    awaited: dict[int, bytes] = {}
    fetching: list[int] = []
    forgotten: set[int] = set()  # while they are being fetched
    for _ in range(300):
        what = random.randrange(5)
        if what == 0:
            name = key(random.randrange(12))
            if tier.knows(name):
                continue
            place = tier.await_block(name)
            used = [*(at for _, at in held), *awaited, *forgotten]
            if len(used) < 6:
                assert place is not None
                assert place not in used
            else:
                oldest = next((at for _, at in held if at not in fetching), None)
                assert place == oldest
                held = [(one, at) for one, at in held if at != place]
            if place is not None:
                awaited[place] = name
        elif what == 1 and awaited:
            place = random.choice(list(awaited))
            arrived = random.random() < 0.8
            tier.land(place, arrived=arrived)
            name = awaited.pop(place)
            if arrived:
                held.append((name, place))
        elif what == 2 and held:
            name, place = random.choice(held)
            tier.begin_fetch(np.array([place], np.int32))
            fetching.append(place)
            held.remove((name, place))
            held.append((name, place))
        elif what == 3 and fetching:
            tier.end_fetch(fetching.pop(random.randrange(len(fetching))))
            forgotten &= set(fetching)
        elif what == 4 and held and random.random() < 0.2:
            name, place = random.choice(held)
            tier.forget(place)
            held.remove((name, place))
            if place in fetching:
                forgotten.add(place)
        assert tier.problems() == []
        assert len(tier) == len(held)
        assert all(tier.run([name]) == [place] for name, place in held)
