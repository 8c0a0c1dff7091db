"""Health, traffic, errors, refusals and failed parts."""

from __future__ import annotations

import pytest

from quire.doctor.finding import Verdict
from quire.doctor.service_checks import (
    check_errors,
    check_health,
    check_parts,
    check_refusals,
    check_traffic,
)
from tests.unit.doctor.made import situation


@pytest.mark.parametrize(
    "check", [check_health, check_traffic, check_errors, check_refusals, check_parts]
)
def test_a_healthy_server_is_ok(check: object) -> None:
    assert check(situation()).verdict is Verdict.OK  # type: ignore[operator]


@pytest.mark.parametrize(
    ("state", "action"),
    [
        ("paused", "POST /admin/resume ends the pause"),
        ("draining", "POST /admin/resume takes requests again"),
        ("starting", "wait until the model is loaded"),
        ("dead", "restart the server; its log says why"),
        (None, "restart the server; its log says why"),
    ],
)
def test_a_server_that_is_not_ready(state: str | None, action: str) -> None:
    health = {} if state is None else {"ok": False, "state": state, "reason": "because"}
    finding = check_health(situation(health=health))
    assert (finding.verdict, finding.action) == (Verdict.PROBLEM, action)


def test_too_little_traffic_is_said() -> None:
    found = check_traffic(situation(choices=9, running=(0, 0))).found
    assert "too little to judge: 9 choices ended and 50 steps ran in 10 s (idle)" in found
    assert "2 requests were pending" in check_traffic(situation(choices=0, running=(2, 3))).found
    found = check_traffic(situation(choices=10, running=(1, 3))).found
    assert found == "1.2 requests/s of 50 + 21 tokens; 10 choices ended in 10 s"


def test_errors_count_from_one_in_a_hundred_and_those_of_the_server_at_once() -> None:
    assert check_errors(situation(errors=("TimedOut",))).verdict is Verdict.OK
    finding = check_errors(situation(errors=("TimedOut", "TimedOut")))
    assert finding.verdict is Verdict.WARNING
    assert finding.evidence == {"quire_errors_total TimedOut": "2"}
    finding = check_errors(situation(errors=("WorkerError",)))
    assert finding.verdict is Verdict.PROBLEM
    assert finding.found == "1 requests failed in the server"


def test_disconnects_count_above_a_tenth() -> None:
    assert check_errors(situation(disconnects=10)).verdict is Verdict.OK
    assert check_errors(situation(disconnects=11)).verdict is Verdict.WARNING


def test_refusals_name_the_flag_of_the_most_frequent_reason() -> None:
    finding = check_refusals(situation(refusals=("overloaded", "overloaded", "tenant_limit")))
    assert finding.verdict is Verdict.WARNING
    assert finding.found == "refused: 2 overloaded, 1 tenant_limit"
    assert "--max-queued-requests" in finding.action


def test_failed_parts() -> None:
    assert check_parts(situation(tier_failures=1)).verdict is Verdict.PROBLEM
    finding = check_parts(situation(restarts=2))
    assert (finding.verdict, finding.found) == (
        Verdict.WARNING,
        "2 API processes ended and were replaced",
    )
