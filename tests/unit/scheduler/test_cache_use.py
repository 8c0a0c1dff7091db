"""The reported cached tokens of a request: where they were found, and why there were no more."""

from __future__ import annotations

from quire.base.cache_usage import CacheUsage, Miss, MissReason
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


def cache_usage(
    harness: Harness, name: str, prompt: list[int], **settings: object
) -> CacheUsage | None:
    """Run a request to its end; return the cache usage of its last output."""
    harness.add(make_request(name, prompt, max_tokens=2, explain_cache=True, **settings))  # type: ignore[arg-type]
    harness.drain()
    return harness.ends[name].cache_use


def test_a_request_reports_hits_and_where_the_difference_begins() -> None:
    harness = Harness(Setup())
    new = Miss(reason=MissReason.NOT_SEEN, token=0)
    assert cache_usage(harness, "a", list(range(12))) == CacheUsage(pool_tokens=0, miss=new)
    differs = Miss(reason=MissReason.FIRST_DIFFERENCE, token=9)
    found = cache_usage(harness, "b", [*range(9), 99, 98, 97])
    assert found == CacheUsage(pool_tokens=8, miss=differs)
    assert cache_usage(harness, "c", list(range(12))) == CacheUsage(pool_tokens=12)
    harness.check_end()


def test_without_asking_only_the_number_is_reported() -> None:
    harness = Harness(Setup())
    harness.add(make_request("a", range(12), max_tokens=2))
    harness.drain()
    assert harness.ends["a"].cache_use is None


def test_a_scored_prompt_reports_scoring_as_the_reason() -> None:
    harness = Harness(Setup())
    cache_usage(harness, "a", list(range(12)))
    scored = cache_usage(harness, "b", list(range(12)), prompt_logprobs=1)
    assert scored == CacheUsage(miss=Miss(reason=MissReason.SCORED, token=0))


def test_without_prefix_caching_that_is_the_reason() -> None:
    harness = Harness(Setup(prefix_caching=False))
    disabled = CacheUsage(miss=Miss(reason=MissReason.DISABLED, token=0))
    assert cache_usage(harness, "a", list(range(12)), prompt_logprobs=1) == disabled
    assert cache_usage(harness, "b", list(range(12))) == disabled


def test_only_the_leader_of_a_group_reports() -> None:
    harness = Harness(Setup())
    for stream in range(2):
        harness.add(
            make_request(
                f"g{stream}",
                range(12),
                max_tokens=2,
                group="g",
                stream=stream,
                explain_cache=True,
            )
        )
    harness.drain()
    assert harness.ends["g0"].cache_use is not None
    assert harness.ends["g1"].cache_use is None


def test_a_preempted_request_reports_its_first_admission() -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=4))
    cache_usage(harness, "first", list(range(8)))
    for name in ("a", "b", "c"):
        harness.add(make_request(name, [*range(8), ord(name)], max_tokens=14, explain_cache=True))
    harness.drain()
    assert sum(harness.ends[name].num_preemptions for name in "abc") > 0
    uses = [harness.ends[name].cache_use for name in "abc"]
    assert [use.pool_tokens for use in uses if use is not None] == [8, 8, 8]
    harness.check_end()
