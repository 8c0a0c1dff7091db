"""RoleBalance: servers change sides by load, after draining, and not back and forth."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router.discovery import StaticList
from quire.router.fleet import Fleet
from quire.router.replica import Load, Replica
from quire.router.role_balance import (
    MovableServers,
    RoleBalance,
    SideDiscovery,
)
from quire.router.settings import RouterSettings
from quire.routing.role_shortage import Side

HOLD_S = 10.0
FIXED_DECODE, FIXED_PREFILL = server_url("http://10.0.0.1:8000"), server_url("http://10.0.0.2:8000")
MOVABLE = tuple(server_url(f"http://10.0.1.{at}:8000") for at in range(2))


class Story:
    """A fixed server on each side, and movable ones; time moves by hand."""

    def __init__(self, *, movable: int = 2, fixed_prefill: bool = True) -> None:
        log = Log("test")
        first = Side.DECODE if fixed_prefill else Side.PREFILL
        self.movable = MovableServers(MOVABLE[:movable], first)
        prefill = StaticList((FIXED_PREFILL,)) if fixed_prefill else None
        self.fleets = {
            Side.DECODE: Fleet(
                RouterSettings(),
                SideDiscovery(StaticList((FIXED_DECODE,)), self.movable, Side.DECODE),
                log,
            ),
            Side.PREFILL: Fleet(
                RouterSettings(), SideDiscovery(prefill, self.movable, Side.PREFILL), log
            ),
        }
        self.balance = RoleBalance(
            self.fleets[Side.DECODE], self.fleets[Side.PREFILL], self.movable, hold_s=HOLD_S
        )
        self.now_s = 1.0

    def names(self, side: Side) -> set[str]:
        return {one.url.host for one in self.fleets[side].replicas.values()}

    def ready(self) -> None:
        """Let all servers be as after a probe."""
        for fleet in self.fleets.values():
            for replica in fleet.replicas.values():
                replica.state, replica.is_fenced = "ready", False

    def work(self, seconds: float, done: dict[Side, int], open_: dict[Side, int]) -> None:
        """Pass time in which each server computes so many tokens a second and has others open."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.ready()
            for side, fleet in self.fleets.items():
                for replica in fleet.replicas.values():
                    replica.computed_tokens += done[side]
                    replica.backlog_tokens = open_[side]
            self.balance.look(self.now_s)

    def close(self) -> None:
        for fleet in self.fleets.values():
            fleet.close()


def run_story(story: Any, **settings: Any) -> None:
    async def go() -> None:
        made = Story(**settings)
        try:
            story(made)
        finally:
            made.close()

    asyncio.run(go())


RATES = {Side.PREFILL: 1000, Side.DECODE: 50}
CALM = {Side.PREFILL: 500, Side.DECODE: 25}  # half a second on both sides
PROMPTS = {Side.PREFILL: 9000, Side.DECODE: 25}
ANSWERS = {Side.PREFILL: 500, Side.DECODE: 900}


def test_a_short_side_gets_a_server_after_a_while_and_then_rests() -> None:
    def story(made: Story) -> None:
        made.work(HOLD_S - 2, RATES, PROMPTS)
        assert len(made.names(Side.PREFILL)) == 1
        made.work(4, RATES, PROMPTS)
        assert len(made.names(Side.PREFILL)) == 2
        made.work(3 * HOLD_S, RATES, PROMPTS)
        assert made.balance.num_changes == 1
        made.work(3 * HOLD_S, RATES, PROMPTS)
        assert made.balance.num_changes == 2
        assert made.names(Side.DECODE) == {FIXED_DECODE.host}

    run_story(story)


def test_a_burst_or_a_small_difference_moves_nothing() -> None:
    def story(made: Story) -> None:
        for _ in range(6):
            made.work(HOLD_S - 2, RATES, PROMPTS)
            made.work(2, RATES, CALM)
        made.work(60, RATES, {Side.PREFILL: 9000, Side.DECODE: 300})  # 9 and 6 seconds
        made.work(60, RATES, {Side.PREFILL: 900, Side.DECODE: 5})  # 0.9 and 0.1: nothing waits
        assert made.balance.num_changes == 0

    run_story(story)


def test_a_server_drains_before_it_changes_over() -> None:
    def story(made: Story) -> None:
        made.ready()
        load = Load(tokens=10, cut=print, began_s=0.0, last_s=lambda: 0.0, is_paused=lambda: False)
        replicas = made.fleets[Side.DECODE].replicas.values()
        busy = [one for one in replicas if one.url in MOVABLE]
        for replica in busy:
            replica.begin(load)
        made.work(HOLD_S + 3, RATES, PROMPTS)
        assert len(made.names(Side.DECODE)) == 2  # it gets no more requests
        assert made.names(Side.PREFILL) == {FIXED_PREFILL.host}
        for replica in busy:
            replica.end(load)
        made.work(1, RATES, PROMPTS)
        assert len(made.names(Side.PREFILL)) == 2
        assert not made.names(Side.DECODE) & made.names(Side.PREFILL)

    run_story(story)


def test_it_comes_back_when_answers_lack_servers() -> None:
    def story(made: Story) -> None:
        made.work(HOLD_S + 3, RATES, PROMPTS)
        made.work(5 * HOLD_S, RATES, ANSWERS)
        assert made.balance.num_changes == 2
        assert made.names(Side.PREFILL) == {FIXED_PREFILL.host}

    run_story(story)


@pytest.mark.parametrize("side", list(Side))
def test_each_side_keeps_an_available_server(side: Side) -> None:
    """The fixed server of the other side is down: its only one is not taken from it."""

    def story(made: Story) -> None:
        wanted = PROMPTS if side is Side.PREFILL else ANSWERS
        for _ in range(60):
            made.now_s += 1.0
            made.ready()
            for fleet in made.fleets.values():
                for replica in fleet.replicas.values():
                    is_fixed = replica.url in (FIXED_DECODE, FIXED_PREFILL)
                    replica.is_fenced = is_fixed
                    own = Side.DECODE if fleet is made.fleets[Side.DECODE] else Side.PREFILL
                    replica.computed_tokens += RATES[own]
                    replica.backlog_tokens = wanted[own]
            made.balance.look(made.now_s)
        assert made.balance.num_changes == 0

    run_story(story, fixed_prefill=False)


def test_without_a_prefill_server_the_first_movable_one_is_it() -> None:
    def story(made: Story) -> None:
        assert made.names(Side.PREFILL) == {MOVABLE[0].host}
        assert made.names(Side.DECODE) == {FIXED_DECODE.host, MOVABLE[1].host}

    run_story(story, fixed_prefill=False)


def test_tokens_of_whole_answers_count_as_computed_at_their_end() -> None:
    replica = Replica(FIXED_PREFILL, 0)
    load = Load(tokens=700, cut=print, began_s=0.0, last_s=lambda: 0.0, is_paused=lambda: False)
    replica.begin(load)
    replica.end(load)
    assert (replica.computed_tokens, replica.backlog_tokens) == (700, 0)
    begun = Load(tokens=700, cut=print, began_s=0.0, last_s=lambda: 0.0, is_paused=lambda: False)
    replica.begin(begun)
    replica.reduce(begun, 600)
    begun.is_new = False
    replica.end(begun)
    assert (replica.computed_tokens, replica.backlog_tokens) == (1300, 0)
