"""Peers: the choice of a prefill engine, and how long one that failed is left alone."""

from __future__ import annotations

from quire.engine.transfer.peers import FIRST_PAUSE_MS, MAX_PAUSE_MS, Peers


def test_the_peer_with_the_fewest_open_transfers_is_asked() -> None:
    peers = Peers([("a", 1), ("b", 2)])
    first, second, third = (peers.choose(0.0) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert {first.host, second.host} == {"a", "b"}
    peers.ended(second, 0.0, failed=False)
    peers.ended(first, 0.0, failed=False)
    assert third.num_open == 1
    chosen = peers.choose(0.0)
    assert chosen is not None
    assert chosen is not third


def test_a_peer_that_fails_is_left_alone_longer_each_time_and_asked_again() -> None:
    peers, now_ms, pauses = Peers([("a", 1)]), 0.0, []
    for _ in range(12):
        peer = peers.choose(now_ms)
        assert peer is not None
        peers.ended(peer, now_ms, failed=True)
        assert peers.choose(now_ms) is None
        pauses.append(peer.not_before_ms - now_ms)
        now_ms = peer.not_before_ms
    assert pauses[0] == FIRST_PAUSE_MS
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_MS
    peer = peers.choose(now_ms)
    assert peer is not None
    peers.ended(peer, now_ms, failed=False)
    assert peers.choose(now_ms) is peer
