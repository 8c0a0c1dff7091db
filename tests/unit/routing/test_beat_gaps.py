"""BeatGaps: for how long a process may send no beat."""

from __future__ import annotations

import pytest

from quire.routing.beat_gaps import MIN_SILENT_S, BeatGaps


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
    gaps.note(now_s := now_s + 5.0)
    assert gaps.limit_s(2.0) == 2.0
    for _ in range(350):
        now_s += 0.1
        gaps.note(now_s)
    assert gaps.limit_s(2.0) == MIN_SILENT_S, "that was long ago"
    gaps.clear()
    assert (gaps.last_s, gaps.limit_s(2.0)) == (0.0, 2.0)
