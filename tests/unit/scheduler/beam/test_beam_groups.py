"""Beams on their slots: sharing, waiting, preemption, aborts, and the outputs of streams."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.records import FinishReason, Request
from tests.unit.scheduler.fake_worker import VOCAB, make_request
from tests.unit.scheduler.harness import Harness, Setup


def searches(
    name: str = "s", *, n: int = 4, prompt: int = 9, output: int = 12, **sampling: Any
) -> list[Request]:
    """Return the streams of one beam search."""
    return [
        make_request(
            f"{name}.{stream}",
            [(3 * at + at // 4) % VOCAB for at in range(prompt)],
            max_tokens=output,
            group=name,
            stream=stream,
            n=n,
            use_beam_search=True,
            temperature=0.0,
            **sampling,
        )
        for stream in range(n)
    ]


def draws(n: int, *, prompt: int, output: int) -> list[Request]:
    """Return the streams of one request with n answers."""
    ids = [at % VOCAB for at in range(prompt)]
    return [
        make_request(f"d.{i}", ids, max_tokens=output, group="d", stream=i, n=n) for i in range(n)
    ]


def peaks(harness: Harness) -> tuple[int, int]:
    """Run to the end; return the peak of used blocks, and of blocks named by sequences."""
    used = named = 0
    while harness.scheduler.has_work:
        assert harness.step()
        used = max(used, harness.cache.num_blocks - harness.cache.num_free)
        named = max(named, int(harness.cache.tables.counts.sum()))
    return used, named


@pytest.mark.parametrize("block_size", [1, 4])
def test_four_beams_of_100_and_50_tokens_take_300_tokens_of_memory_not_600(
    block_size: int,
) -> None:
    setup = Setup(
        num_blocks=1024, block_size=block_size, max_model_len=160, max_num_batched_tokens=64
    )
    harness = Harness(setup)
    for request in searches(prompt=100, output=50):
        harness.add(request)
    used, named = peaks(harness)
    harness.check_end()
    # Additionally a partial block each, and copy sources while a step runs.
    assert used * block_size <= 100 + 4 * 50 + 2 * 4 * (block_size - 1)
    assert named * block_size >= 590  # the last step is not observed
    assert sum(len(plan.copy_from) for plan in harness.plans) <= 3 * 50
    assert all(not len(plan.copy_from) for plan in harness.plans) == (block_size == 1)


def test_128_answers_share_their_prompt() -> None:
    setup = Setup(
        num_blocks=600, block_size=4, max_num_seqs=128, max_num_batched_tokens=256, max_model_len=80
    )
    harness = Harness(setup)
    for request in draws(128, prompt=66, output=6):
        harness.add(request)
    used, named = peaks(harness)
    harness.check_end()
    assert used <= 16 + 2 * 128 + 1  # the prompt, each sequence, and the block that forks copy
    assert named == 18 * 128


@pytest.mark.parametrize("plans_in_flight", [1, 2, 3])
def test_a_beams_row_is_planned_only_after_the_last_step_was_decided(
    plans_in_flight: int,
) -> None:
    harness = Harness(Setup(plans_in_flight=plans_in_flight, max_num_batched_tokens=3))
    for request in searches():
        harness.add(request)
    while harness.scheduler.has_work:
        harness.step()
        sampled = [slot for plan, _, _ in harness.out for slot in plan.slots[plan.samples].tolist()]
        assert len(sampled) == len(set(sampled))
    harness.check_end()


def test_a_group_is_preempted_as_a_whole_and_resumes_with_the_common_prefix() -> None:
    setup = Setup(num_blocks=24, block_size=2, max_num_seqs=5, max_num_batched_tokens=64)
    harness = Harness(setup)
    harness.add(make_request("old", [at % VOCAB for at in range(20)], max_tokens=28))
    for request in searches(n=3, output=9):
        harness.add(request)
    while harness.scheduler.has_work:
        harness.step()
        running = {one for one in harness.scheduler._batch.sequences if one is not None}
        beams = [one for one in running if one.group is not None]
        assert len(beams) in (0, 3)
    harness.check_end()
    assert harness.ends["s.0"].num_preemptions > 0
    assert harness.ends["old"].num_preemptions == 0


def test_aborting_a_stream_does_not_change_the_others() -> None:
    harness = Harness(Setup())
    for request in searches():
        harness.add(request)
    harness.step()
    harness.abort("s.0")
    harness.abort("s.2")
    harness.drain()
    harness.check_end()
    assert harness.ends["s.1"].finish_reason is FinishReason.LENGTH
    assert harness.tokens["s.1"] != harness.tokens["s.3"]


@pytest.mark.parametrize("steps", [0, 3])
def test_aborting_the_last_stream_ends_the_search(steps: int) -> None:
    harness = Harness(Setup())
    for request in searches(n=2):
        harness.add(request)
    for _ in range(steps):
        harness.step()
    harness.abort("s.0")
    assert harness.scheduler.has_work
    harness.abort("s.1")
    harness.drain()
    assert harness.cache.num_free == harness.cache.num_blocks
    assert harness.scheduler.stats().running == harness.scheduler.stats().waiting == 0


def test_a_failed_row_ends_only_the_streams_of_its_search() -> None:
    harness = Harness(Setup(max_num_seqs=6))
    harness.add(make_request("other", [1, 2, 3], max_tokens=9))
    for request in searches():
        harness.add(request)
    for _ in range(3):
        harness.step()
    harness.schedule(fail_rows=[2])
    harness.drain()
    harness.check_end()
    assert {harness.ends[f"s.{i}"].finish_reason for i in range(4)} == {FinishReason.ERROR}
    assert harness.ends["other"].finish_reason is FinishReason.LENGTH


def test_sequences_are_returned_best_first_with_their_scores() -> None:
    harness = Harness(Setup())
    for request in searches(best_of=4, n=3, logprobs=1):
        harness.add(request)
    harness.drain()
    scores = [harness.ends[f"s.{i}"].score for i in range(3)]
    assert scores == sorted(scores, reverse=True)
    for i in range(3):
        logprobs = harness.ends[f"s.{i}"].logprobs
        assert sum(one.logprob for one in logprobs) / len(logprobs) == pytest.approx(scores[i])


def test_missing_sequences_are_errors_of_their_streams() -> None:
    harness = Harness(Setup(max_num_seqs=16))
    for request in searches(n=16, output=1):  # one token, of which there are eleven
        harness.add(request)
    harness.drain()
    assert harness.ends["s.10"].finish_reason is FinishReason.LENGTH
    assert harness.ends["s.11"].finish_reason is FinishReason.ERROR
    assert "11 sequences for 16 streams" in str(harness.ends["s.11"].error)


def test_more_beams_than_slots_are_rejected_with_both_numbers() -> None:
    harness = Harness(Setup(max_num_seqs=3))
    with pytest.raises(InvalidParameter, match=r"n is 4 beams.*3 requests may run") as error:
        harness.scheduler.add(searches()[0])
    assert error.value.param == "n"


def test_beams_that_never_fit_together_are_rejected() -> None:
    harness = Harness(Setup(num_blocks=8, block_size=4))
    with pytest.raises(ContextTooLong, match=r"4 beams need one more each.*32 tokens"):
        harness.scheduler.add(searches(prompt=20)[0])
    harness.add(searches(n=2, prompt=12, output=8)[0])
    harness.drain()


def test_a_search_longer_than_the_cache_allows_is_rejected() -> None:
    harness = Harness(Setup(num_blocks=13, block_size=2, max_num_seqs=4))
    expected = r"2 beams of up to 12 new tokens need 16 KV blocks.*13 are available.*at most 9,"
    with pytest.raises(InvalidParameter, match=expected) as error:
        harness.scheduler.add(searches(n=2, prompt=3, output=12)[0])
    assert error.value.param == "max_tokens"
    for stream in searches(n=2, prompt=3, output=9):
        harness.add(stream)
    harness.drain()
    assert [len(harness.tokens[f"s.{i}"]) for i in range(2)] == [9, 9]


@pytest.mark.parametrize(("width", "output"), [(2, 9), (3, 5), (4, 3)])
def test_beams_as_long_as_the_cache_allows_finish_alone(width: int, output: int) -> None:
    harness = Harness(Setup(num_blocks=13, block_size=2, max_num_seqs=4))
    with pytest.raises(InvalidParameter, match="max_tokens"):
        harness.scheduler.add(searches(n=width, prompt=3, output=output + 1)[0])
    for request in searches(n=width, prompt=3, output=output):
        harness.add(request)
    harness.drain()
    harness.check_end()
    assert harness.scheduler.stats().preemptions_total == 0
