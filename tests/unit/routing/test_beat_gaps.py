"""BeatGaps: for how long a process may send no beat."""

from __future__ import annotations

import pytest

from quire.routing.beat_gaps import MIN_SILENT_S, AwakeTime, BeatGaps


def test_what_is_usual_is_the_longest_gap_of_some_time() -> None:
    gaps = BeatGaps()
    assert gaps.limit_s(2.0) == 2.0, "nothing is known"
    now_s = 100.0
    for _ in range(50):
        now_s += 0.1
        gaps.note(now_s)
    assert gaps.limit_s(2.0) == MIN_SILENT_S
    gaps.note(now_s := now_s + 0.3)
    assert gaps.limit_s(2.0) == pytest.approx(0.9)
    assert gaps.limit_s(0.8) == 0.8, "no longer than without beats"
    gaps.note(now_s := now_s + 2.5)
    assert gaps.limit_s(2.0) == 2.0
    for _ in range(350):
        now_s += 0.1
        gaps.note(now_s)
    assert gaps.limit_s(2.0) == MIN_SILENT_S, "that was long ago"
    gaps.clear()
    assert (gaps.last_s, gaps.limit_s(2.0)) == (0.0, 2.0)


def test_a_stop_is_no_gap_of_a_process_that_works() -> None:
    gaps = BeatGaps()
    for now_s in (100.0, 100.1, 101.0, 101.2, 102.0, 110.0, 110.1):
        gaps.note(now_s)
    assert gaps.limit_s(20.0) == pytest.approx(3 * 0.9)


def test_a_stop_that_was_noticed_is_no_gap_however_short_and_two_seconds_are_enough() -> None:
    gaps = BeatGaps()
    for at in range(11):
        gaps.note(100.0 + at / 10)
    gaps.has_stopped()
    assert gaps.last_s == 0.0
    gaps.note(102.5)
    gaps.note(102.6)
    assert gaps.limit_s(2.0) == MIN_SILENT_S


def test_time_in_which_the_reader_was_busy_is_no_gap_and_no_silence() -> None:
    time, gaps, now_s = AwakeTime(), BeatGaps(), 100.0
    for number in range(50):
        planned_s = now_s = now_s + 0.1
        if number in (20, 40):
            now_s += 0.9  # its event loop was busy, and reads the beats of that time at once
        time.tick(planned_s, now_s)
        gaps.note(time.of(now_s))
    assert gaps.limit_s(2.0) == MIN_SILENT_S
    assert time.of(now_s + 0.5) - gaps.last_s == pytest.approx(0.5)


def test_a_beat_that_came_before_the_loop_was_late_is_as_old_as_the_loop_was_able_to_read() -> None:
    """It came in the same turn of the loop, and is read after the tick behind it."""
    time = AwakeTime()
    time.tick(99.0, 99.5)
    time.tick(100.0, 101.0)
    assert time.of(101.0) == time.of(100.4) == time.of(100.0) == 99.5
    assert time.of(99.9) == pytest.approx(99.4)
    assert time.of(101.2) - time.of(99.9) == pytest.approx(0.3)


def test_short_turns_of_the_reader_are_no_lost_time() -> None:
    """Each reads what has come: only a long one delays a beat by more than the limit allows for."""
    time, now_s = AwakeTime(), 100.0
    for _ in range(20):
        time.tick(now_s, now_s + 0.09)
        now_s += 0.14
    assert time.of(now_s) == now_s
    time.tick(now_s, now_s + 0.2)
    assert time.of(now_s + 0.2) == pytest.approx(now_s)


def test_while_little_is_known_the_limits_of_others_count_once_beats_are_regular() -> None:
    known, calm, new = BeatGaps(), BeatGaps(), BeatGaps()
    for number in range(30):
        known.note(100.0 + 0.3 * number)
        calm.note(100.0 + 0.1 * number)
    assert new.limit_s(2.0, [known]) == 2.0, "no beat has come"
    limits_s = []
    for number in range(4):
        new.note(110.0 + 0.1 * number)
        limits_s.append(new.limit_s(2.0, [known, calm, BeatGaps()]))
    assert limits_s == pytest.approx([2.0, 2.0, 2.0, 0.9])
    assert new.limit_s(2.0) == new.limit_s(2.0, [BeatGaps()]) == 2.0, "no other has a history"
    assert new.limit_s(0.7, [known]) == 0.7
    new.note(110.8)
    assert new.limit_s(2.0, [calm]) == pytest.approx(1.5), "its own gaps count as well"
    new.note(111.0)
    assert new.limit_s(2.0, [known]) == pytest.approx(1.5), "and alone, once they are enough"
    new.clear()
    assert new.limit_s(2.0, [known]) == 2.0
