"""`quire bench`: each subcommand measures the built-in model and prints one object, or refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import SettingError, WorkerError
from quire.bench import startup, throughput
from quire.bench.floor import decode_bytes, program_of
from quire.bench.latency import latency_text, measure_latency
from quire.bench.local import LocalEngine
from quire.bench.machine import machine_card
from quire.bench.startup import Start, check_same, measure_startup, startup_text
from quire.bench.throughput import measure_throughput, throughput_text
from quire.bench.workloads import RequestSpec, Workload, mixed_lengths
from quire.cli.main import main
from quire.obs.report import Progress, table
from quire.program.cost import StepShape
from tests.unit.cli.command import quire_main

SETTINGS = {"num_threads": 1, "kv_cache_memory_bytes": 16 << 20}
SMALL = Workload(
    name="small", text="", lengths=mixed_lengths(5, (4, 20), (2, 9), seed=1), max_running=2
)


def _ask(seed: int, prompt: int = 12, output: int = 6) -> RequestSpec:
    ids = np.random.default_rng(seed).integers(300, 2000, prompt)
    return RequestSpec(prompt_ids=tuple(ids.tolist()), output_tokens=output)


def test_a_server_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_END_S", 0.01)
    hangs = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", hangs], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        startup._stop(server)
        assert server.returncode == -signal.SIGKILL


def test_latency_reports_medians_and_the_share_of_the_floor() -> None:
    outcome: dict[str, Any] = measure_latency(
        "", SETTINGS, prompt_tokens=8, output_tokens=4, repeats=3
    )
    assert len(outcome["samples"]) == 3
    assert set(outcome["median"]) == {
        *("ttft_s", "prefill_tokens_per_s", "read_gb_per_s"),
        *("tpot_s", "decode_tokens_per_s", "floor_share"),
    }
    assert all(value > 0 for value in outcome["median"].values())
    assert outcome["engine"]["model"] == "box"
    assert "share of the floor" in latency_text(outcome)


def test_one_token_has_no_time_after_the_first() -> None:
    outcome: dict[str, Any] = measure_latency(
        "", SETTINGS, prompt_tokens=8, output_tokens=1, repeats=1
    )
    assert "tpot_s" not in outcome["median"]
    assert "share of the floor" not in latency_text(outcome)


def test_a_request_longer_than_the_model_allows_is_rejected_with_the_numbers() -> None:
    with pytest.raises(SettingError, match="600 tokens in and 9 out are 609"):
        measure_latency("", SETTINGS, prompt_tokens=600, output_tokens=9, repeats=1)


def test_the_floor_counts_each_step_of_the_program() -> None:
    program = program_of("")
    wanted = sum(program.step_cost(StepShape([1], [depth])).memory_bytes for depth in (8, 9, 10))
    assert decode_bytes(program, prompt_tokens=8, output_tokens=4) == wanted
    assert decode_bytes(program, prompt_tokens=8, output_tokens=1) == 0


def test_the_floor_is_that_of_the_precision_in_use() -> None:
    asked: list[dict[str, Any]] = [
        {"dtype": "f32"},
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "kv_cache_dtype": "int8"},
    ]
    read = []
    for settings in asked:
        outcome = measure_latency(
            "", SETTINGS | settings, prompt_tokens=8, output_tokens=4, repeats=1
        )
        program = program_of("", settings)
        assert outcome["floor_bytes"] == decode_bytes(program, prompt_tokens=8, output_tokens=4)
        read.append(outcome["floor_bytes"])
    assert read == sorted(read, reverse=True)
    assert read[0] > 1.9 * read[1] > 1.9 * 1.5 * read[2]
    head = program_of("", {"quantization": "int4", "head_precision": "none"})
    assert head.weight_bytes > program_of("", {"quantization": "int4"}).weight_bytes
    assert program_of("", {"max_model_len": 77}).max_positions == 77


def test_both_kinds_of_batching_answer_everything() -> None:
    outcome: dict[str, Any] = measure_throughput(
        "", SETTINGS, workload=SMALL, modes=throughput.MODES, repeats=2
    )
    assert {mode: len(found) for mode, found in outcome["samples"].items()} == {
        "continuous": 2,
        "static": 2,
    }
    assert outcome["settings"]["output_tokens"] == SMALL.output_tokens
    text = throughput_text(outcome)
    assert "continuous batching" in text
    assert "static batching" in text


def test_the_first_command_of_a_new_user_works(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "3", "--repeats", "1", "--kv-cache-memory", "16MiB"]
    assert main(["bench", "throughput", *words]) == 0
    assert "3 requests" in capsys.readouterr().out


def test_a_result_contains_no_paths(tmp_path: Path) -> None:
    async def run() -> dict[str, Any]:
        tier = {"kv_tier_path": str(tmp_path / "tier"), "kv_tier_size": "8MiB"}
        async with LocalEngine("", SETTINGS | tier) as engine:
            return engine.description

    told = str(asyncio.run(run()))
    assert "KV tier: tier, " in told
    assert str(tmp_path) not in told


def test_static_batches_give_each_request_its_own_tokens_only() -> None:
    specs = [_ask(1, output=2), _ask(2, output=7), _ask(3, output=4)]

    async def run() -> None:
        async with LocalEngine("", SETTINGS) as engine:
            together = await engine.run(specs)
            static = await engine.run(specs, static_batch=2)
        assert [len(one.token_ids) for one in static] == [2, 7, 4]
        assert [one.token_ids for one in static] == [one.token_ids for one in together]
        first, second, third = (one.times for one in static)
        assert first.last_s <= second.last_s <= third.first_s

    asyncio.run(run())


def test_different_answers_alone_and_together_are_rejected() -> None:
    async def run() -> None:
        async with LocalEngine("", SETTINGS) as engine:
            one, other = await engine.run([_ask(1), _ask(2)])
        with pytest.raises(WorkerError, match="differently"):
            throughput._check_same(one, other)

    asyncio.run(run())


def test_startup_counts_its_starts_and_stops_each_server() -> None:
    outcome: dict[str, Any] = measure_startup(["--kv-cache-memory", "16MiB"], starts=1)
    assert outcome["ready_s"]["least"] <= outcome["ready_s"]["most"]
    assert outcome["ready_s"]["median"] <= outcome["first_token_s"]["median"]
    assert "first token" in startup_text(outcome)


def test_starts_with_different_answers_are_not_reported() -> None:
    starts = [Start(ready_s=1, first_token_s=2, text=text) for text in ("a", "b")]
    with pytest.raises(WorkerError, match="differently"):
        check_same(starts)


def test_a_server_that_does_not_start_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"config\.json"):
        measure_startup([str(tmp_path)], starts=1)


def test_json_is_one_object_with_the_machine_card() -> None:
    words = ["--prompt-tokens", "6", "--output-tokens", "3", "--repeats", "1", "--threads", "1"]
    done = quire_main("bench", "latency", "--json", *words)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["machine"]["cpu"] == machine_card()["cpu"]
    assert outcome["bench"] == "latency"


@pytest.mark.parametrize("verb", ["latency", "throughput", "serve", "kernels", "startup"])
def test_every_measurement_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: quire bench {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["sing"],
        ["latency", "--repeats", "0"],
        ["throughput", "--prompts", "9-3"],
        ["throughput", "--prompts", "many"],
        ["serve", "--rates", "1,-2"],
        ["serve", "--rates", "fast"],
        ["kernels", "--rows", "1,none"],
    ],
)
def test_meaningless_arguments_are_rejected(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    assert caught.value.code == 2
    assert "usage: quire bench" in capsys.readouterr().err


def test_a_missing_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:9", "--rates", "1"]) == 1
    assert "check the address, as in" in capsys.readouterr().err


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().say("working")
    assert capsys.readouterr().err == ""


def test_tables_are_aligned() -> None:
    assert table(("", "a"), [("name", "10"), ("n", "5")]) == "       a\nname  10\nn      5"
