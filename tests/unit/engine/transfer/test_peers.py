"""Peers: the choice of a prefill engine by its load, and how long one that failed is left alone."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.base.prefill_load import PrefillLoad
from quire.engine.transfer.peers import FIRST_PAUSE_MS, KNOWN_MS, MAX_PAUSE_MS, Peer, Peers

LOAD = PrefillLoad(token_ms=1.0, step_tokens=1000, is_measured=True)


def queue_of(load: PrefillLoad | None) -> float:
    return 0.0 if load is None else load.queue_ms


def wait_at(peer: Peer, load: PrefillLoad | None) -> float:
    return queue_of(load)


def best(peers: Peers, now_ms: float) -> Peer:
    found = peers.best(now_ms, wait_at)
    assert found is not None
    return found


def test_of_unknown_peers_the_one_with_the_fewest_open_transfers_is_asked() -> None:
    peers = Peers([("a", 1), ("b", 2)])
    asked = []
    for _ in range(4):
        asked.append(best(peers, 0.0))
        asked[-1].note_asked(0, 10, 0.0)
    assert sorted(peer.host for peer in asked) == ["a", "a", "b", "b"]
    peers.ended(asked[0], 0.0, failed=False)
    assert best(peers, 0.0) is asked[0]


def test_the_peer_that_is_free_first_is_asked() -> None:
    peers = Peers([("a", 1), ("b", 2)])
    a = best(peers, 0.0)
    a.note_asked(0, 10, 0.0)
    b = best(peers, 0.0)
    assert a is not b
    a.note_load(LOAD, 0.0, 0.0)
    b.note_load(PrefillLoad(queue_ms=250.0, token_ms=1.0, is_measured=True), 0.0, 0.0)
    asked = []
    for _ in range(4):  # of 100 ms each
        asked.append(best(peers, 0.0))
        asked[-1].note_asked(0, 100, 0.0)
    assert [peer.host for peer in asked] == ["a", "a", "a", "b"]
    assert (a.free_ms, b.free_ms) == (300.0, 350.0)


def test_idle_peers_of_about_one_speed_take_turns_and_a_slow_one_is_not_asked() -> None:
    """Estimates always differ by a little; by the least of them all engines would ask one peer."""

    def delay_ms(peer: Peer, load: PrefillLoad | None) -> float:
        assert load is not None
        return load.queue_ms + load.prompt_ms(0, 100)

    peers = Peers([("a", 1), ("b", 2), ("c", 3)])
    for token_ms in (1.05, 1.0, 1.2):
        peer = best(peers, 0.0)
        peer.note_asked(0, 10, 0.0)
        peer.note_load(replace(LOAD, token_ms=token_ms), 0.0, 0.0)
    asked = []
    for number in range(1, 5):
        found = peers.best(1_000.0 * number, delay_ms)
        assert found is not None
        found.note_asked(0, 100, 1_000.0 * number)
        peers.ended(found, 1_000.0 * number + 500.0, failed=False)
        asked.append(found.host)
    assert asked == ["a", "b", "a", "b"]


def test_a_queue_shrinks_with_time_and_a_load_is_forgotten() -> None:
    peers = Peers([("a", 1)])
    peer = best(peers, 0.0)
    assert peer.load_at(0.0) is None
    peer.note_load(PrefillLoad(queue_ms=200.0, token_ms=1.0), 50.0, 1_000.0)
    queues = [queue_of(peer.load_at(1_000.0 + later)) for later in (0.0, 100.0, 500.0)]
    assert queues == [250.0, 150.0, 0.0]
    peer.note_asked(0, 100, 2_000.0)
    assert queue_of(peer.load_at(2_000.0)) == 100.0
    assert peer.load_at(1_000.0 + KNOWN_MS + 1.0) is None


def test_a_peer_that_fails_is_left_alone_longer_each_time_and_asked_again() -> None:
    peers, now_ms, pauses = Peers([("a", 1)]), 0.0, []
    best(peers, now_ms).note_load(LOAD, 0.0, now_ms)
    for _ in range(12):
        peer = best(peers, now_ms)
        peer.note_asked(0, 10, now_ms)
        peers.ended(peer, now_ms, failed=True)
        assert peers.best(now_ms, wait_at) is None
        assert peer.load_at(now_ms) is None  # another process may be there next
        pauses.append(peer.not_before_ms - now_ms)
        now_ms = peer.not_before_ms
    assert pauses[0] == FIRST_PAUSE_MS
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_MS
    peer = best(peers, now_ms)
    peer.note_asked(0, 10, now_ms)
    peers.ended(peer, now_ms, failed=False)
    assert best(peers, now_ms) is peer
    assert math.isfinite(peer.free_ms)
