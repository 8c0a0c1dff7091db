"""The routing policies, the prefix history, and the table of names."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.router.policies import MAKERS, make_routing_policy
from quire.router.replica import Load, Replica
from quire.router.settings import ROUTING_POLICIES, RouterSettings
from quire.routing.block_sets import BlockSets
from quire.routing.least_tokens import LeastTokens
from quire.routing.policy import RouteKey
from quire.routing.power_of_two import PowerOfTwo
from quire.routing.prefix_history import BLOCK_BYTES, PrefixHistory, block_names
from quire.routing.ttft_model import MIN_SAMPLES
from quire.routing.warm_cache import (
    DEFAULT_BACKLOG_TOKENS,
    MAX_OPEN_TOKENS,
    SLOW_EVERY,
    WarmCache,
)
from tests.repository.source_files import ROOT
from tests.unit.router.made_replicas import key_of, made_replicas, open_load


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_each_policy_chooses_an_offered_replica_and_spreads_equalopen_load(name: str) -> None:
    policy, replicas, drawn = (
        make_routing_policy(RouterSettings(policy=name)),
        made_replicas(5),
        Random(3),
    )
    used: Counter[int] = Counter()
    for at in range(400):
        offered = drawn.sample(replicas, drawn.randint(1, 5))
        key = key_of(f"{at} " * 300, session=f"s{at}")
        chosen = policy.choose(offered, key)
        assert chosen in offered
        policy.sent(chosen, key)
        open_load(chosen, 10)
        used[chosen.number] += 1
    assert min(used.values()) > 40, used


def test_round_robin_takes_turns() -> None:
    policy, replicas = make_routing_policy(RouterSettings(policy="round-robin")), made_replicas(3)
    chosen = [policy.choose(replicas, RouteKey()).number for _ in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_least_tokens_and_power_of_two_avoid_the_loaded_one() -> None:
    replicas = made_replicas(3)
    open_load(replicas[0], 1000)
    policy = make_routing_policy(RouterSettings(policy="least-tokens"))
    assert {policy.choose(replicas, RouteKey()).number for _ in range(6)} == {1, 2}
    two = PowerOfTwo(seed=1)
    assert {two.choose(replicas, RouteKey()).number for _ in range(60)} == {1, 2}


def test_a_session_stays_and_only_those_of_a_lost_replica_move() -> None:
    policy = make_routing_policy(RouterSettings(policy="session-affinity"))
    replicas = made_replicas(4)
    keys = [RouteKey(session=f"user {at}") for at in range(200)]
    before = [policy.choose(replicas, key).number for key in keys]
    assert before == [policy.choose(replicas, key).number for key in keys]
    after = [policy.choose(replicas[:3], key).number for key in keys]
    for old, new in zip(before, after, strict=True):
        assert old == new or old == 3


def test_a_warm_replica_is_kept_until_its_backlog_is_too_long() -> None:
    policy = make_routing_policy(RouterSettings(backlog_tokens=500))
    replicas = made_replicas(3)
    key = key_of("a long system prompt " * 100)
    first = policy.choose(replicas, key)
    policy.sent(first, key)
    longer = key_of("a long system prompt " * 100 + "and a question " * 40)
    load = open_load(first, 500)
    assert policy.choose(replicas, longer) is first
    other = open_load(first, 1)
    assert policy.choose(replicas, longer) is not first
    first.end(other)
    assert policy.choose(replicas, longer) is first
    policy.forget(first)
    assert policy.choose(replicas, longer) is not first
    first.end(load)


# ---- a backlog that is calibrated

EACH_S = 1e-3
PROMPT = "a long system prompt " * 400
LONG = RouteKey(blocks=block_names("box", PROMPT.encode()), tokens=2110, prompt_tokens=2100)


def measured_policy(*speeds: float) -> WarmCache:
    """Return a policy that has seen first tokens of replicas, each with its own speed."""
    policy = WarmCache(PrefixHistory(10**6), None)
    for replica, speed in zip(made_replicas(len(speeds)), speeds, strict=True):
        for at in range(MIN_SAMPLES):
            new, queued = 100 * at, 50 * (at % 7)
            policy.note_first_token(replica, new, queued, EACH_S / speed * (new + queued))
    return policy


def queue(replica: Replica, tokens: int) -> Load:
    """Open a request with so many tokens to compute."""
    load = open_load(replica, 0)
    replica.end(load)
    load.tokens = load.prompt_tokens = load.new_tokens = tokens
    replica.begin(load)
    return load


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.5)])
def test_a_warm_replica_is_kept_while_its_queue_costs_less_than_a_copy(
    speeds: tuple[float, ...],
) -> None:
    """A copy is computed, and computed again for what it displaces, at the speed of its replica."""
    policy, replicas = measured_policy(*speeds), made_replicas(3)
    policy.sent(replicas[0], LONG)
    cached = LONG.prompt_tokens - policy.new_tokens(replicas[0], LONG)
    assert 0 < LONG.prompt_tokens - cached < BLOCK_BYTES // 4, "half a block has no name"
    copy_s = 2 * cached * EACH_S / speeds[1]
    # What is computed anyway takes longer where the replica is slower.
    rest_s = (LONG.prompt_tokens - cached) * EACH_S * (1 / speeds[1] - 1 / speeds[0])
    most = round((copy_s + rest_s) / EACH_S)
    load = queue(replicas[0], most - 2)
    assert policy.choose(replicas, LONG) is replicas[0]
    other = queue(replicas[0], 4)
    assert policy.choose(replicas, LONG) is not replicas[0]
    assert policy.left_total == 1
    # The others wait too.
    waits = [queue(one, round(10 * speeds[1])) for one in replicas[1:]]
    assert policy.choose(replicas, LONG) is replicas[0]
    for replica in replicas:
        for one in (load, other, *waits):
            replica.end(one)
    assert all(one.queued_tokens == one.expected_tokens == 0 for one in replicas)


@pytest.mark.parametrize("is_warm", [True, False])
def test_of_equally_warm_replicas_a_slow_one_gets_few_requests(is_warm: bool) -> None:
    """Enough of them to find out that it is fast again."""
    policy, replicas = measured_policy(1.0, 1.0, 0.1), made_replicas(3)
    *others, slow = replicas
    for one in replicas if is_warm else ():
        policy.sent(one, LONG)
    num_choices = 4 * SLOW_EVERY

    def num_slow(key: RouteKey = LONG) -> int:
        return sum(policy.choose(replicas, key) is slow for _ in range(num_choices))

    loads = [open_load(one, 10) for one in others]  # the slow one has nothing to do
    assert num_slow() == 4
    one_token = RouteKey(blocks=(), tokens=11, prompt_tokens=1)
    assert num_slow(one_token) == num_choices, "it is not much longer"
    more = [open_load(one, DEFAULT_BACKLOG_TOKENS) for one in others]
    assert num_slow() == num_choices, "the others have much more output to give"
    for one, load in zip(others, more, strict=True):
        one.end(load)
    queues = [queue(one, 20 * LONG.prompt_tokens) for one in others]
    assert num_slow() == num_choices, "their queues are longer than it is slow"
    for one, load in zip(others, queues, strict=True):
        one.end(load)
    assert num_slow() == 4
    for at in range(8 * SLOW_EVERY):  # it is fast again, which only its own requests show
        if policy.choose(replicas, LONG) is slow:
            policy.note_first_token(slow, 100 * (at % 20 + 1), 0, EACH_S * 100 * (at % 20 + 1))
    assert num_slow() == num_choices
    for one, load in zip(others, loads, strict=True):
        one.end(load)


def cached(replica: Replica, answer: int) -> Load:
    """Open a request with a prompt that is believed to be cached."""
    load = open_load(replica, 0)
    replica.end(load)
    load.tokens, load.prompt_tokens = LONG.prompt_tokens + answer, LONG.prompt_tokens
    replica.begin(load)
    return load


def test_cached_prompts_are_no_queue_but_answers_are_bounded() -> None:
    policy, replicas = measured_policy(1.0, 1.0), made_replicas(2)
    policy.sent(replicas[0], LONG)
    for _ in range(40):
        cached(replicas[0], 200)
    assert replicas[0].expected_tokens == 8000
    assert policy.choose(replicas, LONG) is replicas[0]
    open_load(replicas[0], DEFAULT_BACKLOG_TOKENS - 8000 + 1)
    assert policy.choose(replicas, LONG) is replicas[1]


def test_prompts_that_are_only_believed_to_be_cached_are_bounded() -> None:
    """As of a false publisher, or of a replica that has evicted them."""
    policy, replicas = measured_policy(1.0, 1.0), made_replicas(2)
    policy.sent(replicas[0], LONG)
    most = MAX_OPEN_TOKENS // LONG.prompt_tokens
    for _ in range(most):
        cached(replicas[0], 0)
        assert policy.choose(replicas, LONG) is replicas[0]
    cached(replicas[0], 0)
    assert policy.choose(replicas, LONG) is replicas[1]
    longer = replace(LONG, prompt_tokens=4 * LONG.prompt_tokens)
    assert policy.choose(replicas, longer) is replicas[0], "so many prompts of this length"


def test_the_usual_backlog_holds_until_first_tokens_are_seen_and_after_the_replica_left() -> None:
    policy, replicas = make_routing_policy(RouterSettings()), made_replicas(2)
    policy.sent(replicas[0], LONG)
    load = queue(replicas[0], DEFAULT_BACKLOG_TOKENS)
    assert policy.choose(replicas, LONG) is replicas[0]
    for at in range(MIN_SAMPLES):
        policy.note_first_token(replicas[1], 100 + at, 0, EACH_S * (100 + at))
    assert policy.choose(replicas, LONG) is replicas[1], "by what was learned of another"
    assert {count.name: count.value for count in policy.counts()}[
        "new_token_seconds"
    ] == pytest.approx(EACH_S, rel=0.01)
    replicas[0].end(load)
    policy.forget(replicas[1])
    assert policy.choose(replicas, LONG) is replicas[0]


def test_a_number_of_the_operator_is_not_calibrated() -> None:
    policy, replicas = make_routing_policy(RouterSettings(backlog_tokens=50_000)), made_replicas(2)
    policy.sent(replicas[0], LONG)
    for at in range(3 * MIN_SAMPLES):
        policy.note_first_token(replicas[1], 100 + at, 0, 1e-6)
    queue(replicas[0], 50_000)
    assert policy.choose(replicas, LONG) is replicas[0]
    queue(replicas[0], 1)
    assert policy.choose(replicas, LONG) is replicas[1]


@pytest.mark.parametrize("given", [-1, "many", 1.5, None])
def test_a_backlog_is_a_number_or_auto(given: Any) -> None:
    with pytest.raises(SettingError, match="backlog_tokens"):
        RouterSettings(backlog_tokens=given)


def test_prefix_history_equals_a_plain_model_of_it() -> None:
    """Against sets of prefixes, for drawn prompts that share beginnings."""
    history, drawn = PrefixHistory(max_blocks=10**6), Random(5)
    known: dict[int, set[bytes]] = {at: set() for at in range(4)}
    texts = [bytes([65 + at]) * BLOCK_BYTES for at in range(3)]
    for _ in range(300):
        prompt = b"".join(drawn.choice(texts) for _ in range(drawn.randint(0, 6))) + b"tail"
        names = block_names("box", prompt)
        prefixes = [prompt[: BLOCK_BYTES * (at + 1)] for at in range(len(names))]
        found = history.matched_blocks(names, 0b1111)
        for number, have in known.items():
            count = next((at for at, one in enumerate(prefixes) if one not in have), len(prefixes))
            assert found[number] == count
        number = drawn.randrange(4)
        if drawn.random() < 0.05:
            history.forget(number)
            known[number].clear()
        else:
            history.note(names, number)
            known[number].update(prefixes)


def test_the_history_of_a_replica_is_bounded() -> None:
    history = PrefixHistory(max_blocks=8)
    for at in range(50):
        history.note(block_names("box", f"{at:04d}".encode() * BLOCK_BYTES), 0)
    assert len(history._masks) == 8
    history.forget(0)
    assert not history._masks


def test_scopes_share_no_prefixes() -> None:
    prompt = b"x" * BLOCK_BYTES * 3
    assert block_names("box", prompt) != block_names("box\0salt", prompt)


def test_each_name_has_a_policy_and_a_row_on_the_routers_page() -> None:
    assert tuple(MAKERS) == ROUTING_POLICIES
    page = (ROOT / "docs" / "router.md").read_text(encoding="utf-8")
    table = page.partition("\n| Policy | Choice |\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `([\w-]+)`", table, re.M)) == ROUTING_POLICIES


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_reports_of_replicas_are_taken_by_policies_that_read_them(name: str) -> None:
    settings, sets = RouterSettings(policy=name), BlockSets(1000)
    if make_routing_policy(settings).uses_events:
        policy = make_routing_policy(settings, sets)
        names = [count.name for count in policy.counts()]
        assert names[:3] == ["prompt_blocks", "warm_blocks", "left_warm"]
        return
    with pytest.raises(SettingError, match=f"warm-cache and the policy is {name}"):
        make_routing_policy(settings, sets)


def test_least_tokens_chooses_while_other_processes_change_the_loads() -> None:
    class Changing:
        def __init__(self, number: int) -> None:
            self.number, self.reads = number, count(10 * number)

        @property
        def backlog_tokens(self) -> int:
            return next(self.reads)

    replicas: list[Any] = [Changing(number) for number in range(3)]
    key = RouteKey(blocks=(), tokens=1, prompt_tokens=1)
    assert LeastTokens().choose(replicas, key) is replicas[0]
