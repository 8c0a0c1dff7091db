"""What a request is told of its cached tokens: where they were found, and why no more were."""

from __future__ import annotations

from quire.base.cache_usage import CacheUsage, Miss, MissReason
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


def told(harness: Harness, name: str, prompt: list[int], **settings: object) -> CacheUsage | None:
    """Run a request to its end; what its last output says."""
    harness.add(make_request(name, prompt, max_tokens=2, explain_cache=True, **settings))  # type: ignore[arg-type]
    harness.drain()
    return harness.ends[name].cache_use


def test_a_request_is_told_what_was_found_and_where_the_difference_begins() -> None:
    harness = Harness(Setup())
    new = Miss(reason=MissReason.NOT_SEEN, token=0)
    assert told(harness, "a", list(range(12))) == CacheUsage(pool_tokens=0, miss=new)
    differs = Miss(reason=MissReason.FIRST_DIFFERENCE, token=9)
    found = told(harness, "b", [*range(9), 99, 98, 97])
    assert found == CacheUsage(pool_tokens=8, miss=differs)
    assert told(harness, "c", list(range(12))) == CacheUsage(pool_tokens=12)
    harness.check_end()


def test_who_does_not_ask_is_told_the_number_alone() -> None:
    harness = Harness(Setup())
    harness.add(make_request("a", range(12), max_tokens=2))
    harness.drain()
    assert harness.ends["a"].cache_use is None


def test_a_prompt_that_is_scored_is_told_that_this_is_why() -> None:
    harness = Harness(Setup())
    told(harness, "a", list(range(12)))
    scored = told(harness, "b", list(range(12)), prompt_logprobs=1)
    assert scored == CacheUsage(miss=Miss(reason=MissReason.SCORED, token=0))


def test_without_prefix_caching_the_reason_is_that() -> None:
    harness = Harness(Setup(prefix_caching=False))
    disabled = CacheUsage(miss=Miss(reason=MissReason.DISABLED, token=0))
    assert told(harness, "a", list(range(12)), prompt_logprobs=1) == disabled
    assert told(harness, "b", list(range(12))) == disabled


def test_forks_leave_the_telling_to_their_leader() -> None:
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


def test_a_preempted_request_is_told_what_its_first_admission_found() -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=4))
    told(harness, "first", list(range(8)))
    for name in ("a", "b", "c"):
        harness.add(make_request(name, [*range(8), ord(name)], max_tokens=14, explain_cache=True))
    harness.drain()
    assert sum(harness.ends[name].num_preemptions for name in "abc") > 0
    uses = [harness.ends[name].cache_use for name in "abc"]
    assert [use.pool_tokens for use in uses if use is not None] == [8, 8, 8]
    harness.check_end()
