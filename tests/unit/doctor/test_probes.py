"""The self-test: its committed tokens are those of the NumPy twins, and it notices others."""

from __future__ import annotations

import pytest

from quire.base.errors import CapacityError
from quire.doctor import probes
from quire.doctor.finding import Verdict


def test_the_expected_tokens_are_those_of_the_reference() -> None:
    alone, together = probes.answers(1, executor="reference")
    assert alone == together == probes.EXPECTED


def test_the_self_test_passes_here() -> None:
    finding = probes.self_test(2)
    assert finding.verdict is Verdict.OK
    assert finding.found.startswith("32 tokens of the built-in model as expected")


def test_wrong_tokens_and_a_batch_that_changes_them_are_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = ((1, 2), (3, 4))
    monkeypatch.setattr(probes, "answers", lambda *_, **__: (wrong, wrong))
    finding = probes.self_test(2)
    assert (finding.verdict, "other tokens" in finding.found) == (Verdict.PROBLEM, True)
    monkeypatch.setattr(probes, "answers", lambda *_, **__: (probes.EXPECTED, wrong))
    assert "in a batch differ" in probes.self_test(2).found

    def refused(*_: object, **__: object) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(probes, "answers", refused)
    finding = probes.self_test(2)
    assert (finding.verdict, "no room" in finding.found) == (Verdict.PROBLEM, True)


def test_slow_memory_is_a_warning() -> None:
    assert probes.judged_bandwidth(5.0, 2).verdict is Verdict.OK
    assert probes.judged_bandwidth(4.9, 2).verdict is Verdict.WARNING


def test_the_bandwidth_is_measured_with_little_memory() -> None:
    assert "GB/s with 1 threads" in probes.bandwidth(1, 0).found
