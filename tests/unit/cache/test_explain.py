"""Why a prefix was not found, and what the cache holds: reports from metadata, without content."""

from __future__ import annotations

import numpy as np

from quire.base.cache_usage import Miss, MissReason
from quire.cache.chain import Owners
from quire.cache.explain import miss_of, report_of
from quire.cache.manager import CacheManager


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Cache:
    """A manager of blocks of four tokens; a request runs alone and ends at once."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.cache = CacheManager(num_blocks, 4, prefix_caching=True)
        self.cache.lay_out(num_slots=1, max_tokens=num_blocks * 4)

    def run(self, token_ids: list[int], salt: str = "", tenant: str = "") -> Miss | None:
        """Compute a prompt; return why it was not found."""
        cache, tokens = self.cache, np.array(token_ids, np.int32)
        chain = cache.chain(tokens, salt, tenant)
        assert chain is not None
        match = cache.match(chain)
        miss = miss_of(cache, chain, match.num_blocks, tokens)
        cache.attach(0, match)
        cache.extend(0, len(tokens))
        cache.register(ints(0), ints(len(tokens)), tokens.reshape(1, -1))
        cache.free(ints(0), np.zeros(1, np.int64))
        assert cache.check_integrity() == []
        return miss


def test_an_unseen_prompt_is_new_from_its_first_token() -> None:
    assert Cache().run([1] * 9) == Miss(reason=MissReason.NOT_SEEN, token=0)


def test_a_prompt_found_to_its_last_whole_block_has_no_miss() -> None:
    cache = Cache()
    cache.run(list(range(11)))
    assert cache.run(list(range(8))) is None
    assert cache.run([*range(8), 77]) is None
    assert cache.run([1, 2, 3]) is None


def test_the_first_token_that_differs_from_the_nearest_prompt_is_reported() -> None:
    cache = Cache()
    cache.run([*range(8), 50, 51, 52, 53])
    cache.run([*range(8), 60, 61, 62, 63])
    asked = [*range(8), 60, 61, 99, 63]
    assert cache.run(asked) == Miss(reason=MissReason.FIRST_DIFFERENCE, token=10)
    assert cache.run([9, *range(1, 8)]) == Miss(reason=MissReason.FIRST_DIFFERENCE, token=0)


def test_a_prompt_beyond_the_end_of_known_ones_is_unseen_from_there() -> None:
    cache = Cache()
    cache.run(list(range(8)))
    assert cache.run(list(range(16))) == Miss(reason=MissReason.NOT_SEEN, token=8)


def test_eviction_is_reported_while_its_digest_is_remembered() -> None:
    cache = Cache(num_blocks=8)
    cache.run(list(range(12)))
    cache.run(list(range(100, 128)))
    assert cache.run(list(range(12))) == Miss(reason=MissReason.EVICTED, token=4)
    cache.cache.flush()
    assert cache.run(list(range(12))) == Miss(reason=MissReason.NOT_SEEN, token=0)


def test_another_salt_is_reported_only_to_the_tenant_that_used_both() -> None:
    cache = Cache()
    prompt = list(range(8))
    cache.run(prompt, salt="one", tenant="acme")
    other = Miss(reason=MissReason.OTHER_SALT, token=0)
    new = Miss(reason=MissReason.NOT_SEEN, token=0)
    assert cache.run(prompt, salt="two", tenant="acme") == other
    assert cache.run(prompt, salt="three", tenant="rival") == new
    assert cache.run(prompt, salt="four") == new
    assert cache.run(prompt, salt="five") == new


def test_a_miss_depends_only_on_prompts_of_the_same_salt() -> None:
    cache = Cache(num_blocks=8)
    cache.run([*range(4), 5, 6, 7, 8], salt="one")
    assert cache.run([*range(4), 5, 6, 9, 9], salt="two") == Miss(
        reason=MissReason.NOT_SEEN, token=0
    )
    cache.run(list(range(100, 128)), salt="one")
    assert cache.run([*range(4), 5, 6, 7, 8], salt="three") == Miss(
        reason=MissReason.NOT_SEEN, token=0
    )


def test_without_prefix_caching_that_is_the_reason() -> None:
    cache = CacheManager(4, 4, prefix_caching=False)
    chain = cache.chain(ints(1, 2, 3, 4), "")
    assert miss_of(cache, chain, 0, ints(1, 2, 3, 4)) == Miss(reason=MissReason.DISABLED, token=0)


def test_the_report_counts_blocks_by_state_and_owner() -> None:
    cache = Cache()
    cache.run(list(range(8)), tenant="acme")
    cache.run(list(range(8)), tenant="acme")
    cache.run(list(range(100, 114)), salt="secret")
    cache.run([1, 2, 3])
    report = report_of(cache.cache, queried_tokens_total=33, hit_tokens_total=8, num_prefixes=5)
    assert (report.blocks_total, report.blocks_used, report.blocks_plain) == (16, 0, 11)
    assert (report.blocks_once, report.blocks_again, report.blocks_findable) == (3, 2, 5)
    assert [(use.tenant, use.blocks) for use in report.owners] == [("", 3), ("acme", 2)]
    assert report.owners[0].salt not in ("", "secret")
    assert report.owners[1].salt == ""
    assert report.queried_tokens_total == 33


def test_the_most_useful_prefixes_are_listed_by_digest_with_their_lengths() -> None:
    cache = Cache()
    cache.run(list(range(12)))
    for last in (50, 60, 70):
        cache.run([*range(8), last, last, last, last])
    for _ in range(2):
        cache.run(list(range(12)))
    report = report_of(cache.cache, queried_tokens_total=0, hit_tokens_total=0, num_prefixes=5)
    listed = [(use.tokens, use.hits, use.protected) for use in report.prefixes]
    assert listed == [(8, 5, True), (12, 2, True)]
    chain = cache.cache.chain(np.arange(8, dtype=np.int32), "")
    assert chain is not None
    assert report.prefixes[0].digest == chain.keys[1].hex()
    assert (
        len(
            report_of(
                cache.cache, queried_tokens_total=0, hit_tokens_total=0, num_prefixes=1
            ).prefixes
        )
        == 1
    )


def test_owners_beyond_the_limit_are_counted_together_and_numbers_are_reused() -> None:
    owners = Owners(lambda salt: np.zeros(2, np.uint64), limit=2)
    one, two = (owners.add("", salt, lambda: ints()) for salt in ("a", "b"))
    assert (one.number, two.number) == (1, 2)
    assert owners.add("", "c", lambda: ints(1, 2)).number == 0
    assert owners.add("", "d", lambda: ints()).number == 0  # not queried again so soon
    third = owners.add("", "e", lambda: ints(2))
    assert third.number == 1
    assert owners.number_now(one) == 0
    assert owners.number_now(two) == 2
    assert owners.owner("", "a") is None


def test_a_thousand_changing_salts_cost_no_extra_work() -> None:
    """The numbers in use are queried once per as many new owners as there are numbers."""
    asked = 0

    def used() -> np.ndarray:
        nonlocal asked
        asked += 1
        return np.arange(1, 9, dtype=np.int32)

    owners = Owners(lambda salt: np.zeros(2, np.uint64), limit=8)
    for number in range(8 + 80):
        owners.add("", str(number), used)
    assert asked <= 11
