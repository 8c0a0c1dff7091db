"""Lines of a chart: equal ones are merged, all are labelled."""

from __future__ import annotations

import math

import pytest

from quire.obs.pictures import draw_lines, equal_series, pyplot, use_log_scale


def test_equal_series_are_grouped_in_order() -> None:
    nan = math.nan
    series = {"a": (1.0, nan), "b": (1.0, 2.0), "c": (1.0 + 1e-12, nan), "d": (1.0, 2.0)}
    assert equal_series(series) == [["a", "c"], ["b", "d"]]


def test_overlapping_lines_stay_visible() -> None:
    pytest.importorskip("matplotlib")
    figure, panel = pyplot().subplots()
    at = {name: [1.0, 2.0] for name in ("fcfs", "fair", "sjf")}
    draw_lines(panel, at, {"fcfs": [1.0, 5.0], "fair": [1.0, 5.0], "sjf": [1.0, 5.1]})
    use_log_scale(panel)
    assert [line.get_label() for line in panel.lines] == ["fcfs = fair", "sjf"]
    below, above = panel.lines
    assert below.get_linewidth() > above.get_linewidth()
    assert below.get_color() != above.get_color()
    assert below.get_marker() != above.get_marker()
    pyplot().close(figure)
