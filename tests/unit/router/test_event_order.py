"""KV events in order: losses, replays, repetitions, restarts, rubbish, against the true cache."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from quire.router.event_order import CLEARED, Change, EventOrder, changes_of
from tests.cases import each_case

_encode = msgspec.msgpack.encode


class Publisher:
    """Publishes what its cache does; keeps the newest `kept` batches."""

    def __init__(self, drawn: Random, kept: int) -> None:
        self.drawn, self.kept, self.time_s = drawn, kept, 0.0
        self.restart()

    def restart(self) -> None:
        self.cache: set[int] = set()
        self.batches: list[tuple[int, bytes]] = []
        self.number = 0
        self.put(["AllBlocksCleared"])

    def put(self, *events: Any) -> tuple[int, bytes]:
        self.time_s += 1.0
        batch = (self.number, _encode([self.time_s, events, 0]))
        self.batches = [*self.batches, batch][-self.kept :]
        self.number += 1
        return batch

    def step(self) -> tuple[int, bytes]:
        drawn = self.drawn
        if self.cache and drawn.random() < 0.4:
            gone = drawn.sample(sorted(self.cache), drawn.randint(1, min(3, len(self.cache))))
            self.cache -= set(gone)
            return self.put(["BlockRemoved", gone, "GPU"])
        if drawn.random() < 0.02:
            self.cache.clear()
            return self.put(["AllBlocksCleared"])
        new = [drawn.getrandbits(64) for _ in range(drawn.randint(1, 4))]
        self.cache |= set(new)
        return self.put(["BlockStored", new, None, [1] * 16 * len(new), 16, None, "GPU", None])

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        return [one for one in self.batches if one[0] >= first]


class Follower:
    """Applies changes to a set."""

    def __init__(self, publisher: Publisher, *, can_replay: bool = True) -> None:
        self.known: set[int] = set()
        self.publisher = publisher
        self.order = EventOrder(can_replay=can_replay)
        self.num_replays = 0
        self.act(*self.order.begin())

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            if not change.hashes:
                self.known.clear()
            elif change.block_size:
                self.known |= set(change.hashes)
            else:
                self.known -= set(change.hashes)

    def act(self, changes: list[Change], ask: int | None) -> None:
        self.apply(changes)
        if ask is not None:
            self.num_replays += 1
            for number, raw in self.publisher.replay(ask):
                self.apply(self.order.replayed(number, raw))
            self.act(*self.order.replay_ended())

    def live(self, batch: tuple[int, bytes]) -> None:
        self.act(*self.order.live(*batch))

    def check(self) -> None:
        self.act([], self.order.check())


@pytest.mark.parametrize("seed", range(6))
def test_losses_repetitions_and_restarts_end_in_the_true_cache(seed: int) -> None:
    drawn = Random(seed)
    publisher = Publisher(drawn, kept=10**6)
    follower, old = Follower(publisher), list[tuple[int, bytes]]()
    for _ in range(600):
        if drawn.random() < 0.01:
            publisher.restart()
            follower.live(publisher.batches[-1])
        batch = publisher.step()
        old.append(batch)
        if drawn.random() < 0.8:  # else it is lost
            follower.live(batch)
            assert follower.known == publisher.cache
        if drawn.random() < 0.1:
            follower.live(drawn.choice(old))  # sent again, by anyone
    follower.check()
    assert follower.known == publisher.cache
    assert follower.order.num_gaps > 20
    assert follower.order.num_invalid == 0


def test_old_events_that_are_sent_again_change_nothing() -> None:
    publisher = Publisher(Random(1), kept=10**6)
    follower = Follower(publisher)
    batches = [publisher.step() for _ in range(40)]
    for batch in batches:
        follower.live(batch)
    before, num_replays = set(follower.known), follower.num_replays
    for batch in batches:
        follower.live(batch)
    assert follower.known == before == publisher.cache
    assert follower.num_replays == num_replays + len(batches), "each costs one short replay"


def test_what_is_no_longer_kept_is_forgotten_with_all_before_it() -> None:
    publisher = Publisher(Random(2), kept=3)
    follower = Follower(publisher)
    for _ in range(10):
        follower.live(publisher.step())
    for _ in range(10):
        publisher.step()
    follower.live(publisher.step())
    assert follower.known <= publisher.cache, "nothing is believed that may be gone"


def test_without_replays_a_gap_forgets_what_was_known() -> None:
    publisher = Publisher(Random(3), kept=3)
    follower = Follower(publisher, can_replay=False)
    publisher.put(["BlockStored", [1, 2], None, [], 16, None, "GPU", None])
    follower.live(publisher.put(["BlockStored", [3], None, [], 16, None, "GPU", None]))
    assert follower.known == {3}
    publisher.put(["BlockRemoved", [3], "GPU"])
    follower.live(publisher.put(["BlockStored", [4], None, [], 16, None, "GPU", None]))
    assert follower.known == {4}
    assert follower.order.num_gaps == 2


def test_a_publisher_that_answers_no_replay_is_followed_without() -> None:
    order = EventOrder(can_replay=True)
    assert order.begin() == ([CLEARED], 0)
    raw = _encode([0.5, [["BlockStored", [9], None, [1] * 16, 16, None, "GPU", None]], 0])
    assert order.live(5, raw) == ([], None)
    asked = [order.check() for _ in range(3)]
    assert asked[-1] is None
    assert order.live(6, raw) == ([CLEARED, Change((9,), 16)], None)


@each_case(
    "events",
    [
        [["BlockStored", [1], None, [1], 0, None, "GPU", None]],
        [["BlockStored", [2**70], None, [1], 16, None, "GPU", None]],
        [["BlockStored", [-1], None, [1], 16, None, "GPU", None]],
        [["BlockStored", ["a"], None, [1], 16]],
        [["BlockStored", 5, None, [1], 16]],
        [["BlockStored", [1], None, [1], "16"]],
        [["BlockRemoved"]],
        [["Other", 1]],
        [[]],
        "text",
        [7],
    ],
)
def test_rubbish_forgets_what_was_known(events: Any) -> None:
    follower = Follower(Publisher(Random(4), kept=10))
    follower.live(follower.publisher.put(["BlockStored", [1], None, [], 16]))
    assert follower.known == {1}
    try:
        raw = _encode([0.5, events, 0])
    except OverflowError:
        raw = b"\xc1"
    follower.live((follower.publisher.number, raw))
    follower.publisher.number += 1
    assert follower.known == set()
    assert follower.order.num_invalid == 1
    follower.live(follower.publisher.put(["BlockStored", [2], None, [], 16]))
    assert follower.known == {2}


def test_batches_of_another_engine_are_not_taken() -> None:
    order = EventOrder(can_replay=False, engine=1)
    stored = [["BlockStored", [9], None, [1] * 16, 16, None, "GPU", None]]
    assert order.live(0, _encode([0.5, stored, 1])) == ([Change((9,), 16)], None)
    assert order.live(1, _encode([0.5, stored])) == ([Change((9,), 16)], None), "without a rank"
    assert order.other_engine is None
    assert order.live(2, _encode([0.5, stored, 3])) == ([CLEARED], None)
    assert order.live(3, _encode([0.5, stored, 4])) == ([CLEARED], None)
    assert (order.other_engine, order.num_invalid) == (3, 2), "logged once, whatever comes"


def test_blocks_of_other_media_are_not_counted() -> None:
    batch = [
        0.5,
        [["BlockStored", [1], None, [], 16, None, "CPU", None], ["BlockRemoved", [1], "DISK"]],
    ]
    assert changes_of(batch) == []
