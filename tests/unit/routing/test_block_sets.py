"""Blocks that replicas report: sets against plain ones, prefixes, and the choice by them."""

from __future__ import annotations

from array import array
from random import Random

import numpy as np
import pytest

from quire._native import hash_chains
from quire.base.server_url import server_url
from quire.cache.chain import FIXED_KEY, seed_of
from quire.router.block_hashes import MAX_BLOCKS, PUBLIC_KEY, block_hashes
from quire.router.replica import Load, Replica
from quire.routing.block_sets import BlockSet, BlockSets
from quire.routing.policy import RouteKey
from quire.routing.prefix_history import PrefixHistory, block_names
from quire.routing.warm_cache import WarmCache

SIZE = 4


def hashes_of(*tokens: int) -> list[int]:
    return block_hashes(array("i", tokens), SIZE)


def replicas(count: int) -> list[Replica]:
    return [Replica(server_url(f"http://127.0.0.1:{9000 + at}"), at) for at in range(count)]


def load(replica: Replica, tokens: int) -> None:
    replica.begin(Load(tokens, lambda reason: None, 0.0, lambda: 0.0, lambda: False))


@pytest.mark.parametrize("size", [1, 16, 64])
def test_hashes_are_those_of_the_cache(size: int) -> None:
    tokens = np.array([(at * 7919) % 50_000 for at in range(5 * size + size // 2)], np.int32)
    public = hash_chains([tokens], [seed_of("", FIXED_KEY)], size, FIXED_KEY)
    assert block_hashes(array("i", tokens.tolist()), size) == public[:, 1].tolist()
    assert PUBLIC_KEY == FIXED_KEY


def test_hashes_of_a_prompt_are_bounded() -> None:
    assert len(block_hashes(array("i", [1] * (MAX_BLOCKS + 7)), 1)) == MAX_BLOCKS
    assert block_hashes(array("i", [1, 2, 3]), 4) == []


def test_a_set_equals_a_plain_one() -> None:
    found, plain, drawn = BlockSet(10**6), set[int](), Random(3)
    numbers = [drawn.getrandbits(64) | 1024 for _ in range(3000)]
    for _ in range(30_000):
        one = drawn.choice(numbers)
        if drawn.random() < 0.55:
            found.add(one)
            plain.add(one)
        else:
            found.discard(one)
            plain.discard(one)
        assert len(found) == len(plain)
    assert [one in found for one in numbers] == [one in plain for one in numbers]
    found.clear()
    assert not len(found)
    assert numbers[0] not in found


def test_a_set_is_bounded_and_keeps_its_places_under_steady_change() -> None:
    found, drawn = BlockSet(500), Random(4)
    window = [drawn.getrandbits(64) | 1024 for _ in range(500)]
    for one in window:
        found.add(one)
    found.add(12345)
    assert len(found) == 500
    assert 12345 not in found
    for _ in range(20_000):
        found.discard(window.pop(0))
        window.append(drawn.getrandbits(64) | 1024)
        found.add(window[-1])
    assert all(one in found for one in window)
    assert len(found._places) <= 4096


def test_the_longest_prefix_is_found_for_each_replica() -> None:
    sets, drawn = BlockSets(10**6), Random(5)
    prompt = hashes_of(*(drawn.randrange(1000) for _ in range(40 * SIZE)))
    depths = {number: drawn.randrange(len(prompt) + 1) for number in range(6)}
    for number, depth in depths.items():
        sets.store(number, [drawn.getrandbits(64) for _ in range(50)], SIZE)
        sets.store(number, prompt[:depth], SIZE)
    assert sets.block_size == SIZE
    assert sets.matched_tokens(prompt, SIZE) == {n: SIZE * d for n, d in depths.items()}
    sets.remove(0, prompt[1:])
    assert sets.matched_tokens(prompt, SIZE)[0] == SIZE * min(depths[0], 1)
    sets.clear(1)
    assert sets.matched_tokens(prompt, SIZE)[1] == 0
    sets.forget(1)
    assert 1 not in sets.matched_tokens(prompt, SIZE)
    assert sets.matched_tokens(prompt, 2 * SIZE) == {}, "blocks of another size are not compared"


def test_a_replica_has_what_any_of_its_engines_has_from_the_beginning_on() -> None:
    sets, prompt = BlockSets(100), hashes_of(*range(40))
    sets.store(0, prompt[:4], SIZE)
    sets.store(0, prompt[4:], SIZE, engine=1)  # without the beginning
    assert sets.matched_tokens(prompt, SIZE) == {0: 16}
    sets.store(0, prompt[:7], SIZE, engine=2)
    assert sets.matched_tokens(prompt, SIZE, [0, 5]) == {0: 28}
    assert sets.num_blocks(0) == 17
    sets.remove(0, prompt[:1], engine=2)
    assert sets.matched_tokens(prompt, SIZE) == {0: 16}, "engine 0 still has it"
    sets.clear(0)
    assert sets.matched_tokens(prompt, SIZE) == {0: 0}
    assert sets.num_blocks(0) == 12


def test_a_prompt_that_was_sent_counts_until_it_is_reported_or_removed() -> None:
    sets, prompt = BlockSets(100), hashes_of(*range(20))
    sets.sent(0, prompt)
    assert sets.matched_tokens(prompt, SIZE) == {}, "nothing is known of a silent replica"
    sets.store(0, [7777], SIZE)
    sets.sent(0, prompt)
    assert sets.matched_tokens(prompt, SIZE) == {0: 20}
    sets.store(0, prompt[:3], SIZE)
    sets.remove(0, prompt[3:])
    assert sets.matched_tokens(prompt, SIZE) == {0: 12}


def _policy(sets: BlockSets) -> WarmCache:
    return WarmCache(PrefixHistory(1000), 500, sets)


def test_what_a_replica_reports_counts_before_what_was_sent_there() -> None:
    sets, (first, second) = BlockSets(1000), replicas(2)
    policy, text, prompt = _policy(sets), b"a long prompt " * 60, hashes_of(*range(80))
    key = RouteKey(blocks=block_names("box", text), hashes=prompt, block_size=SIZE)
    policy.sent(first, key)
    load(second, 100)
    assert policy.choose([first, second], key) is first, "by the history"
    sets.store(0, [1], SIZE)  # it has evicted the prompt since
    sets.store(1, prompt, SIZE)
    assert policy.choose([first, second], key) is second
    without = RouteKey(blocks=key.blocks)
    assert policy.choose([first, second], without) is first
    policy.forget(second)
    assert policy.choose([first, second], key) is first


def test_a_false_publisher_gets_no_more_than_the_backlog() -> None:
    """It claims each prompt; the others share what exceeds the allowed backlog."""
    sets, all_ = BlockSets(10**5), replicas(3)
    policy = _policy(sets)
    for at in range(200):
        prompt = hashes_of(*(at * 100 + step for step in range(40)))
        sets.store(0, prompt, SIZE)
        key = RouteKey(hashes=prompt, block_size=SIZE, tokens=40)
        chosen = policy.choose(all_, key)
        load(chosen, 40)
    tokens = [one.backlog_tokens for one in all_]
    assert tokens[0] <= min(tokens) + 500 + 40, tokens


def test_blocks_of_isolated_tenants_are_routed_by_the_history() -> None:
    sets, (first, second) = BlockSets(1000), replicas(2)
    policy = _policy(sets)
    for number in (0, 1):
        sets.store(number, [5000 + number], SIZE)
    key = RouteKey(
        blocks=block_names("box", b"of a tenant " * 60),
        hashes=hashes_of(*range(80)),
        block_size=SIZE,
    )
    policy.sent(second, key)
    sets.remove(1, key.hashes)  # they are never reported
    load(second, 100)
    assert policy.choose([first, second], key) is second
