"""`quire simulate`: a table, the same as JSON, a picture, and rejections."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.sim import compare
from tests.unit.cli.command import quire_main

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{number // 4:02d}.{25 * (number % 4):02d}00000,"
    f"{20 + 7 * number % 200},{5 + number % 30}\n"
    for number in range(80)
)
MACHINE = ("--gb-per-s", "0.5", "--gflop-per-s", "2", "--fixed-ms", "1")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Write a minute of synthetic requests."""
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    return str(file)


def test_policies_are_compared_at_each_speed(trace: str) -> None:
    words = ("--trace", trace, *MACHINE, "--policy", "fcfs,sjf", "--speed", "1,4")
    done = quire_main("simulate", *words, "--light", "8")
    assert (done.returncode, done.stderr) == (0, "")
    table = done.stdout
    assert "box: 80 requests of trace.csv, 0 left out; max_tokens 2048" in table
    assert [line.split()[:2] for line in table.splitlines()[3:7]] == [
        *(["fcfs", "1"], ["fcfs", "4"], ["sjf", "1"], ["sjf", "4"])
    ]
    assert "light tenant  flood speed" in table
    assert quire_main("simulate", *words, "--light", "8").stdout == table


def test_json_has_every_run_with_its_settings(trace: str) -> None:
    done = quire_main(
        "simulate", "--json", "--trace", trace, *MACHINE, "--max-requests", "40", "--send-goals"
    )
    printed = json.loads(done.stdout)
    assert printed["bench"] == "simulate"
    assert printed["settings"]["num_requests"] == 40
    assert printed["settings"]["goals_are_told"] is True
    assert printed["settings"]["machine_gb_per_s"] == 0.5
    [run] = printed["runs"]
    assert run["summary"]["num_requests"] == 40
    assert run["light"] is None


def test_a_picture_is_drawn(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "policies.png"
    done = quire_main("simulate", "--trace", trace, *MACHINE, "--light", "8", "--png", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_measured_machine_is_stored_and_reused(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    settings = ("--threads", "1", "--max-num-seqs", "4", "--kv-cache-memory", "8MiB")
    first = quire_main("simulate", "--trace", trace, *settings, "--save-profile", str(file))
    assert first.returncode == 0, first.stderr
    second = quire_main("simulate", "--trace", trace, *settings, "--profile", str(file))
    assert second.stdout == first.stdout
    profile = json.loads(file.read_text())
    for ranks, context, given in ((2, 1, "2"), (2, 2, "1")):
        file.write_text(json.dumps({**profile, "ranks": ranks, "context_ranks": context}))
        words = (*settings[2:], "--profile", str(file), "--context-parallel-size", given)
        refused = quire_main("simulate", "--trace", trace, *words)
        assert refused.returncode == 2
        assert f"give --context-parallel-size {context}" in refused.stderr


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("--policy", "best"), "allowed: "),
        (("--speed", "0"), "is not a list of speeds"),
        (("--light", "0"), "is not a whole number"),
        (("--light", "1"), "must leave some"),
        (("--ttft-goal", "0"), "both must be > 0"),
        (("--profile", "none.json"), "select the machine in different ways"),
        (("--max-tokens", "x"), "is not a whole number"),
        (("--kv-tier-path", "/tier"), "--kv-tier-path is a flag of quire serve"),
        (("--cpu-offload-gb", "1"), "--cpu-offload-gb is a flag of quire serve"),
        (("--distributed-executor-backend", "ray"), "is a flag of quire serve"),
        (("--kv-touch-ahead", "0"), "--kv-touch-ahead is a flag of quire serve"),
        (("--cache-pin-share", "0.5"), "--cache-pin-share is a flag of quire serve"),
        (("--message-us", "1"), "--gflop-per-s and --pipeline-parallel-size"),
        (("-pp", "2", "--engines", "2"), "--engines and --pipeline-parallel-size are given"),
        (("-pp", "99"), "each stage needs one"),
        (("--kv-store", "/store"), "--kv-store is a flag of quire serve"),
        (("--kv-transfer-key-file", "key"), "--kv-transfer-key-file is a flag of quire serve"),
    ],
)
def test_impossible_arguments_are_rejected(
    trace: str, words: tuple[str, ...], printed: str
) -> None:
    done = quire_main("simulate", "--trace", trace, *MACHINE, *words)
    assert done.returncode == 2
    assert printed in done.stderr
    assert done.stdout == ""


def test_an_incomplete_machine_and_a_missing_trace_are_rejected(trace: str, tmp_path: Path) -> None:
    half = quire_main("simulate", "--trace", trace, "--gb-per-s", "3")
    assert "must be given together" in half.stderr
    none = quire_main("simulate", "--trace", str(tmp_path / "none"), *MACHINE)
    assert "cannot be read" in none.stderr


def test_the_example_trace_is_the_default() -> None:
    done = quire_main("simulate", *MACHINE, "--max-requests", "30")
    assert done.returncode == 0, done.stderr
    assert "box: 30 requests of example_trace.jsonl, 0 left out" in done.stdout


def test_ctrl_c_prints_the_results_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, should_stop: Callable[[], bool], **more: object) -> Any:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        return real_compare(*arguments, should_stop=stop_later, **more)  # type: ignore[arg-type]

    steps = iter(range(2000))

    def stop_later() -> bool:
        return next(steps) >= 400

    real_compare = compare.compare
    monkeypatch.setattr(compare, "compare", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code = main(["simulate", *MACHINE, "--speed", "1,2", "--policy", "fcfs,sjf"])
    assert signal.getsignal(signal.SIGINT) is before
    assert code == 130
    table = capsys.readouterr().out
    assert "fcfs*" in table
    assert "stopped after 0 of 4 runs; * fcfs at speed 1 is partial: " in table
    assert "of 240 requests ended" in table


def test_stages_have_a_table_of_their_own(trace: str) -> None:
    words = ("--trace", trace, *MACHINE, "-pp", "2", "--message-gb-per-s", "1", "--message-us", "9")
    done = quire_main("simulate", *words)
    assert (done.returncode, done.stderr) == (0, "")
    heading, row = done.stdout.splitlines()[-2:]
    assert heading.split("  ")[-1].strip() == "bubble"
    assert heading.count("busy") == 2
    assert row.split()[0] == "fcfs"
    measured = quire_main("simulate", "--trace", trace, "-pp", "2")
    assert measured.returncode == 2
    assert "is computed for a described machine only: give --gb-per-s" in measured.stderr


def test_drafts_have_a_table_of_their_own(trace: str) -> None:
    words = ("--trace", trace, *MACHINE, "--max-draft-tokens", "3")
    done = quire_main("simulate", *words, "--draft-acceptance", "0.9,0.8", "--json")
    outcome = json.loads(done.stdout)
    assert outcome["settings"]["draft_acceptance"] == [0.9, 0.8]
    assert outcome["settings"]["max_draft_tokens"] == 3
    [run] = outcome["runs"]
    drafts = run["summary"]["drafts"]
    assert 0.6 < drafts["accepted"] / drafts["drafted"] < 0.9
    plain = json.loads(quire_main("simulate", *words, "--json").stdout)
    assert "draft_acceptance" not in plain["settings"]
    assert run["summary"]["steps"] < 0.92 * plain["runs"][0]["summary"]["steps"]
    for given, said in (("1.5", "from 0 to 1"), ("", "neither probabilities, as in 0.8,0.7")):
        refused = quire_main("simulate", *words, "--draft-acceptance", given)
        assert refused.returncode != 0
        assert said in refused.stderr


def test_roles_are_compared_with_as_many_engines_of_both(trace: str) -> None:
    words = ("--trace", trace, *MACHINE, "--prefill-engines", "1", "--decode-engines", "2")
    done = quire_main("simulate", *words, "--transfer-gb-per-s", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 of both roles" in done.stdout
    assert "1 prefill, 2 decode" in done.stdout


def test_roles_a_store_and_a_router_go_together(trace: str) -> None:
    words = ("--trace", trace, *MACHINE, "--prefill-engines", "1", "--decode-engines", "1")
    words += ("--movable-engines", "1", "--prefill-by", "router", "--min-prefill-tokens", "32")
    done = quire_main("simulate", *words, "--store-gb-per-s", "20", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    runs = json.loads(done.stdout)["runs"]
    assert [(run["roles"], run["store"]) for run in runs] == [
        (roles, store)
        for store in (False, True)
        for roles in ("3 of both roles", "1 prefill, 1 decode, 1 movable")
    ]
    assert all(run["transfer"]["handed_over"] for run in runs[1::2])
    assert all(run["shared_store"]["put_blocks"] for run in runs[2:])


def test_prefill_engines_have_a_profile_of_their_own(trace: str, tmp_path: Path) -> None:
    here, fast, other = (tmp_path / f"{name}.json" for name in ("here", "fast", "other"))
    settings = ("--threads", "1", "--max-num-seqs", "4", "--kv-cache-memory", "8MiB")
    words = ("simulate", "--json", "--trace", trace, *settings)
    first = quire_main(*words, "--max-requests", "1", "--save-profile", str(here))
    assert first.returncode == 0, first.stderr
    profile = json.loads(here.read_text())
    tenth = {
        name: [(at, ms / 10) for at, ms in profile[name]]
        for name in ("chunk_ms", "rows_ms", "read_ms")
    }
    tenth |= {"pair_ms": profile["pair_ms"] / 10, "loop_ms": profile["loop_ms"] / 10}
    linear = {name: ms / 10 for name, ms in profile["linear"].items()}
    fast.write_text(json.dumps({**profile, **tenth, "linear": linear, "name": "fast"}))
    words += ("--profile", str(here), *ROLES, "--prefill-by", "router")
    words += ("--min-prefill-tokens", "16", "--transfer-gb-per-s", "100")
    found = {}
    for name, more in (("alike", ()), ("fast", ("--prefill-profile", str(fast)))):
        done = quire_main(*words, *more)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)
    assert found["fast"]["settings"]["prefill_machine"] == "fast"
    assert found["fast"]["runs"][0]["roles"] == "2 of both roles, as decode"
    alike, unlike = (one["runs"][1] for one in found.values())
    assert alike["transfer"]["handed_over"] == unlike["transfer"]["handed_over"] > 0
    assert unlike["busy"]["prefill"] < alike["busy"]["prefill"]
    assert unlike["summary"]["ttft_mean_s"] < alike["summary"]["ttft_mean_s"]
    other.write_text(json.dumps({**profile, "token_bytes": profile["token_bytes"] * 2}))
    refused = quire_main(*words, "--prefill-profile", str(other))
    assert refused.returncode == 2
    assert "measure both profiles with one model" in refused.stderr


ROLES = ("--prefill-engines", "1", "--decode-engines", "1")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--prefill-engines", "1"), "needs both"),
        (("--prefill-profile", "fast.json"), "there is one engine"),
        (("--store-size", "1GiB"), "there is one engine"),
        (("--routing", "warm-cache"), "there is one engine"),
        (("--engines", "2", "--routing", "turn"), "round-robin, least-tokens, warm-cache"),
        (("--engines", "2", "--prefill-profile", "fast.json"), "both roles"),
        ((*ROLES, "--light", "4"), "--light"),
        (("--engines", "2", "--prefill-engines", "1", "--decode-engines", "1"), "both roles"),
        ((*ROLES, "--role-seconds", "3"), "--prefill-by router"),
        ((*ROLES, "--prefill-by", "client"), "decode-engine, router"),
        ((*ROLES, "--routing", "warm-cache,round-robin"), "name one"),
        ((*ROLES, "--store-gb-per-s", "0"), "above 0"),
    ],
)
def test_engines_are_compared_one_way_at_a_time(
    trace: str, more: tuple[str, ...], says: str
) -> None:
    done = quire_main("simulate", "--trace", trace, *MACHINE, *more)
    assert done.returncode == 2
    assert says in done.stderr
