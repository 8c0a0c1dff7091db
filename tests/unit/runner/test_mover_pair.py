"""MoverPair: copies go to the mover of their places, and what ended comes back as of one."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.base.block_copies import BlockCopies, CopiesEnded, Tier
from quire.runner.mover_pair import MoverPair

FIRST = 10


class FakeMover:
    """Notes its calls, and returns what a test has set."""

    def __init__(self, order: list[BlockCopies]) -> None:
        self.begun: list[BlockCopies] = []
        self._order = order
        self.to_say: CopiesEnded | None = None
        self.calls: list[str] = []
        self.wake: Any = None

    def begin(self, copies: BlockCopies) -> None:
        self.begun.append(copies)
        self._order.append(copies)

    def wait_for(self, blocks: Any) -> None:
        self.calls.append("wait_for")

    def ended(self) -> CopiesEnded | None:
        said, self.to_say = self.to_say, None
        return said

    def clear(self) -> None:
        self.calls.append("clear")

    def close(self) -> None:
        self.calls.append("close")


def pair() -> tuple[MoverPair, FakeMover, FakeMover, list[str]]:
    order, lost = list[BlockCopies](), list[str]()
    tier, exchange = FakeMover(order), FakeMover(order)
    made = MoverPair(
        tier,  # type: ignore[arg-type]
        exchange,  # type: ignore[arg-type]
        first=FIRST,
        on_lost=lambda: lost.append("lost"),
    )
    return made, tier, exchange, lost


def copies(*parts: tuple[Tier, int, Tier, int]) -> BlockCopies:
    columns = [np.array(column, np.int32) for column in zip(*parts, strict=True)]
    digests = np.arange(2 * len(parts), dtype=np.uint64).reshape(-1, 2)
    return BlockCopies(
        from_tiers=columns[0],
        from_blocks=columns[1],
        to_tiers=columns[2],
        to_blocks=columns[3],
        digests=digests,
    )


def listed(found: BlockCopies) -> list[tuple[int, int, int]]:
    firsts = (found.digests[:, 0] // 2).tolist()
    return list(zip(found.from_blocks.tolist(), found.to_blocks.tolist(), firsts, strict=True))


def test_each_copy_goes_to_the_mover_of_its_place() -> None:
    made, tier, exchange, _ = pair()
    made.begin(
        copies(
            (Tier.POOL, 30, Tier.DISK, 2),
            (Tier.POOL, 31, Tier.DISK, FIRST + 2),
            (Tier.DISK, 3, Tier.POOL, 32),
            (Tier.DISK, FIRST, Tier.POOL, 33),
        )
    )
    assert [listed(one) for one in tier.begun] == [[(30, 2, 0)], [(3, 32, 2)]]
    assert [listed(one) for one in exchange.begun] == [[(31, 2, 1)], [(0, 33, 3)]]
    made.begin(copies((Tier.POOL, 34, Tier.DISK, 1)))
    assert (len(tier.begun), len(exchange.begun)) == (3, 2)


def test_a_block_is_saved_before_another_is_fetched_into_it() -> None:
    made, tier, exchange, _ = pair()
    made.begin(copies((Tier.POOL, 30, Tier.DISK, FIRST), (Tier.DISK, 3, Tier.POOL, 30)))
    assert tier._order == [exchange.begun[0], tier.begun[0]]


def said(*parts: tuple[Tier, int, bool], **more: Any) -> CopiesEnded:
    return CopiesEnded(
        to_tiers=np.array([tier for tier, _, _ in parts], np.int32),
        to_blocks=np.array([block for _, block, _ in parts], np.int32),
        arrived=np.array([arrived for _, _, arrived in parts], np.bool_),
        **more,
    )


def test_what_ended_has_the_places_of_the_whole_and_prices_of_the_tier() -> None:
    made, tier, exchange, _ = pair()
    assert made.ended() is None
    exchange.to_say = said((Tier.HOST, 2, True), (Tier.POOL, 33, False), fetched=5, fetch_ms=1.0)
    found = made.ended()
    assert found is not None
    assert found.to_blocks.tolist() == [FIRST + 2, 33]
    assert found.arrived.tolist() == [True, False]
    assert (found.fetched, found.fetch_ms) == (0, 0.0)
    tier.to_say = said((Tier.DISK, 7, True), saved=1, save_ms=4.0)
    exchange.to_say = said((Tier.HOST, 0, True), saved=9, save_ms=0.1)
    found = made.ended()
    assert found is not None
    assert found.to_blocks.tolist() == [7, FIRST]
    assert (found.saved, found.save_ms, found.broken) == (1, 4.0, False)


def test_a_tier_that_fails_ends_alone() -> None:
    made, tier, exchange, lost = pair()
    tier.to_say = said((Tier.DISK, 7, False), broken=True)
    found = made.ended()
    assert found is not None
    assert not found.broken
    assert lost == ["lost"]
    exchange.to_say = said(broken=True)
    found = made.ended()
    assert found is not None
    assert found.broken


def test_both_are_woken_cleared_and_closed() -> None:
    made, tier, exchange, _ = pair()
    made.wake = print
    assert tier.wake is exchange.wake is made.wake is print
    made.wait_for(np.array([1], np.int32))
    made.clear()
    made.close()
    assert tier.calls == exchange.calls == ["wait_for", "clear", "close"]
