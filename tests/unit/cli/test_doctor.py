"""`quire doctor` without a server: text at 80 columns, JSON, exit codes, and wrong arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.doctor import machine_exam
from quire.doctor.finding import Effect, Finding, Lever, Verdict, ok, problem, warning, worst
from quire.doctor.report import report_text
from tests.cases import each_case
from tests.unit.cli.command import LIMIT_S, environment, quire_main


def test_this_machine_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_KV_TIER_PATH", str(tmp_path / "tier"))
    monkeypatch.setenv("COLUMNS", "80")
    done = quire_main("doctor", "--quick")
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("This machine: ")
    assert max(map(len, lines)) <= 80
    assert any("KV tier" in line for line in lines)
    assert "self-test" not in done.stdout
    outcome = json.loads(quire_main("doctor", "--quick", "--json").stdout)
    assert outcome["verdict"] in ("ok", "warning", "problem")
    assert {"kernels", "KV tier", "open files"} <= {one["check"] for one in outcome["findings"]}
    assert done.returncode == (1 if outcome["verdict"] == "problem" else 0)


def test_a_broken_native_module_is_a_problem_and_no_traceback() -> None:
    code = (
        "import sys; sys.modules['quire._native'] = None; from quire.cli.main import main; "
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "native module" in done.stdout
    assert "cannot be loaded" in done.stdout
    assert "self-test" not in done.stdout


@pytest.mark.parametrize(
    ("finding", "code"),
    [
        (ok("a", "fine"), 0),
        (warning("a", "slow", "do this"), 0),
        (problem("a", "bad", "do that"), 1),
    ],
)
def test_only_a_problem_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, finding: Finding, code: int
) -> None:
    monkeypatch.setattr(machine_exam, "machine_findings", lambda facts: [finding])
    done = quire_main("doctor", "--quick")
    assert done.returncode == code
    assert finding.found in done.stdout
    assert finding.action in done.stdout


@each_case(
    ("words", "code", "said"),
    [
        (("--seconds", "5"), 2, "--seconds is for a server; give its URL"),
        (("--api-key", "k"), 2, "--api-key is for a server"),
        (("--goal-ttft-ms", "5"), 2, "--goal-ttft-ms is for a server"),
        (("http://h", "--quick"), 2, "--quick is for this machine"),
        (("http://h", "--seconds", "0"), 2, "'0' is not a number of seconds above 0"),
        (("http://h", "--seconds", "inf"), 2, "at most 3600"),
        (("http://h", "--goal-tpot-ms", "fast"), 2, "'fast' is not a number of milliseconds"),
        (("ftp://h",), 2, "is not an http:// or https:// address"),
        (("http://127.0.0.1:9",), 1, "no server listens at http://127.0.0.1:9"),
    ],
)
def test_wrong_arguments_and_no_server(words: tuple[str, ...], code: int, said: str) -> None:
    done = quire_main("doctor", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


def test_a_report_shows_evidence_levers_and_effects_of_what_is_not_ok() -> None:
    metrics = {"ttft_p95_ms": 4000.0, "tpot_p95_ms": 12.0}
    effect = Effect(
        lever=Lever(text="--max-num-seqs 16"),
        before=metrics,
        after={"ttft_p95_ms": 180.0, "tpot_p95_ms": 18.0},
    )
    slow = Finding(
        check="TTFT",
        verdict=Verdict.PROBLEM,
        found="p95 4 s " + "and a long explanation of it " * 4,
        action="do something",
        evidence={"quire_queue_seconds": "mean 3 s"},
        levers=(effect.lever,),
        metric="ttft_p95_ms",
        effects=(effect,),
        note="a note " * 20,
    )
    findings = [ok("health", "ready", hidden="evidence"), slow]
    text = report_text("A server", findings, width=80, color=False)
    assert max(map(len, text.splitlines())) <= 80
    for said in (
        "| quire_queue_seconds: mean 3 s",
        "-> do something",
        "try --max-num-seqs 16",
        "TTFT p95 4 s -> 180 ms, TPOT p95 12 ms -> 18 ms",
        "(a note",
        "1 problem, 0 warnings, 1 ok",
    ):
        assert said in text
    assert "hidden" not in text
    assert "\033[" not in text
    assert "\033[1;31mPROBLEM" in report_text("A server", findings, width=80, color=True)
    assert worst(findings) is Verdict.PROBLEM
    assert worst([]) is Verdict.OK
