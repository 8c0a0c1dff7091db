"""The admission watermark follows preemptions, up and down."""

from __future__ import annotations

from quire.scheduler.admission.admitter import Watermark


def test_the_watermark_is_zero_when_nothing_runs() -> None:
    mark = Watermark(1000)
    mark.preempted(1)
    assert mark.blocks(0, 1) == 0


def test_it_begins_at_half_a_block_a_request_or_a_hundredth_of_the_pool() -> None:
    mark = Watermark(1000)
    assert mark.blocks(2, 0) == 10
    assert mark.blocks(64, 0) == 32


def test_preemptions_raise_it_and_steps_without_one_lower_it() -> None:
    mark = Watermark(10_000)
    before = mark.blocks(300, 0)
    marks = []
    for step in range(4):
        mark.preempted(step)
        marks.append(mark.blocks(300, step))
    assert before < marks[0] < marks[1] < marks[2] < marks[3]
    later = [mark.blocks(300, 3 + steps) for steps in (100, 1_000, 10_000)]
    assert marks[3] > later[0] > later[1] > later[2] == before


def test_beyond_growth_it_never_exceeds_a_quarter_of_the_pool() -> None:
    mark = Watermark(100)
    for step in range(50):
        mark.preempted(step)
    assert mark.blocks(10, 50) == 25
    assert mark.blocks(80, 50) == 40
