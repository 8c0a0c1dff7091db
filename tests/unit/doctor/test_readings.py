"""Prometheus' text, parsed strictly; histograms and windows as differences of two readings."""

from __future__ import annotations

import math

import pytest

from quire.base.errors import WorkerError
from quire.doctor.readings import Histogram, Window, read_metrics
from quire.obs.metrics import Metrics


def reading(text: str, at_s: float = 0.0):  # type: ignore[no-untyped-def]
    return read_metrics(text, at_s=at_s, where="http://h/metrics")


def test_samples_are_summed_over_labels_that_were_not_asked_for() -> None:
    found = reading(
        "# HELP quire_a text\n"
        'quire_a{route="/x",status="200"} 3\n'
        'quire_a{route="a \\"quoted\\" , one",status="200"} 4.5\n'
        'quire_a{route="/x",status="499"} 1 1700000000\n'
        "\n"
        "quire_b +Inf\n"
    )
    assert found.value("quire_a") == 8.5
    assert found.value("quire_a", status="200") == 7.5
    assert found.value("quire_a", status="200", route="/x") == 3
    assert found.value("quire_b") == math.inf
    assert found.value("quire_missing") == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>\n", "line 1 is not a metric: '<html>'"),
        ("quire_a 1\nquire_b one\n", "line 2 is not a metric: 'quire_b one'"),
        ("quire_a\n", "line 1 is not a metric"),
        ("vllm:a 1\n", "has no metrics of Quire"),
        ("", "has no metrics of Quire"),
    ],
)
def test_other_text_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(WorkerError, match="http://h/metrics") as raised:
        reading(text)
    assert said in str(raised.value)


def test_quantiles_are_linear_within_buckets_as_prometheus_computes_them() -> None:
    times = Histogram((0.1, 0.2, 1.0, math.inf), (10.0, 0.0, 10.0, 0.0), 7.0)
    assert (times.num, times.mean) == (20.0, 0.35)
    assert times.quantile(0.25) == pytest.approx(0.05)
    assert times.quantile(0.5) == pytest.approx(0.1)
    assert times.quantile(0.75) == pytest.approx(0.6)
    beyond = Histogram((0.1, math.inf), (1.0, 9.0), 50.0)
    assert beyond.quantile(0.99) == 0.1
    assert math.isnan(Histogram((0.1, math.inf), (0.0, 0.0), 0.0).quantile(0.5))


def test_a_window_has_differences_of_counters_and_buckets() -> None:
    first = reading(
        'quire_t_bucket{le="1.0"} 5\nquire_t_bucket{le="+Inf"} 9\nquire_t_sum 20\n'
        'quire_n_total{reason="a"} 4\nquire_n_total{reason="b"} 1\nquire_g 7\n',
        at_s=3.0,
    )
    last = reading(
        'quire_t_bucket{le="1.0"} 7\nquire_t_bucket{le="+Inf"} 14\nquire_t_sum 30\n'
        'quire_n_total{reason="a"} 4\nquire_n_total{reason="b"} 3\n'
        'quire_n_total{reason="new"} 1\nquire_g 2\n',
        at_s=13.0,
    )
    window = Window(first, last)
    assert window.seconds == 10.0
    assert window.histogram("quire_t") == Histogram((1.0, math.inf), (2.0, 3.0), 10.0)
    assert window.by_label("quire_n_total", "reason") == {"b": 2.0, "new": 1.0}
    assert (window.least("quire_g"), window.most("quire_g")) == (2.0, 7.0)


def test_a_restart_and_two_readings_of_one_moment_are_refused() -> None:
    first, last = reading("quire_steps_total 10\n", 1.0), reading("quire_steps_total 9\n", 2.0)
    with pytest.raises(WorkerError, match="restarted between"):
        Window(first, last)
    with pytest.raises(WorkerError, match="raise --seconds"):
        Window(first, first)


def test_the_text_of_the_servers_own_metrics_is_read_completely() -> None:
    text = Metrics(("plain",)).text().decode()
    samples = sum(map(len, reading(text).samples.values()))
    assert samples == sum(not line.startswith("#") for line in text.splitlines())
