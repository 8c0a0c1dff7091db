"""LinkTimes: what is known of each machine's link."""

from __future__ import annotations

import pytest

from quire.engine.transfer.link_times import LinkTimes


def test_the_first_transfer_replaces_the_guess_for_its_machine_only() -> None:
    links = LinkTimes(1.0)
    links.note("a", 2, 40.0)
    assert (links.block_ms("a"), links.block_ms("b")) == (20.0, 1.0)
    links.note("a", 1, 10.0)
    assert links.block_ms("a") == pytest.approx(19.0)
    links.note("a", 100, 1000.0)
    assert links.block_ms("a") == pytest.approx(10.0, rel=0.01)


def test_an_estimate_that_keeps_a_link_unused_fades() -> None:
    links = LinkTimes(1.0)
    links.note("a", 1, 8.0)
    for _ in range(100):
        links.fade("a")
    assert links.block_ms("a") < 1.1
    assert links.block_ms("b") == 1.0
    for _ in range(100):
        links.fade("b")
    assert links.block_ms("b") < 0.14
