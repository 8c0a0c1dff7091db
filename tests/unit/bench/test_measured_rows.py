"""Pages generated from results: swept settings, missed goals, planned memory."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench import footprint, readme_table
from bench.measured import rows
from bench.measured.fleet_rows import fleet_rows, ranks_rows
from bench.measured.peers import sweeps_text
from bench.measured.policy_table import policy_table
from bench.measured.rows import _belady_row, _footprint_rows
from bench.measured.service_rows import forecast_rows, policy_rows, soak_rows, structured_rows
from bench.readme_table import RESULTS
from quire.bench.machine import LOAD_MARK


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def test_only_swept_settings_are_called_so(tmp_path: Path) -> None:
    assert "none was swept" in sweeps_text(tmp_path)
    tried = [
        {"engine": "vllm", "workload": "w4", "rates": [1.0]},
        {"engine": "llama.cpp", "workload": "w1", "rates": []},
        {"engine": "quire", "workload": "w1", "rates": [2.0]},
    ]
    (tmp_path / "sweep-small-int8.json").write_text(json.dumps({"tried": tried}))
    text = sweeps_text(tmp_path)
    assert "vLLM in W4 (int8)" in text
    assert "llama" not in text
    assert "by hand, and were not swept" in text


def test_each_vocabulary_has_its_goals() -> None:
    rows = structured_rows(_result("structured"))
    assert sum(row.startswith("| token mask") for row in rows) == 3
    assert any("Qwen" in row and row.endswith("| 50 us, 1,000 us |") for row in rows)


def test_a_missed_goal_is_shown_like_any_other() -> None:
    result = _result("policies-accelerator")
    result["goals"] = [{"what": "w", "found": "9", "wanted": "at most 1", "kept": False}]
    [row] = policy_rows(result)
    assert row.endswith(": w | 9 | at most 1 |")


def test_predictions_are_shown_by_policy() -> None:
    result = _result("forecast-cpu")
    policies = {run["policy"] for run in result["runs"]}
    assert len(forecast_rows(result)) == len(policies)


def test_both_modes_of_ranks_are_shown_in_time_and_bytes() -> None:
    result = _result("parallel")
    result["modes"][0] |= {"rows": 4, "tokens": 1, "ratio": 1.25}
    result["modes"][0]["fast"]["received_bytes_per_token"] = 5200.0
    found = ranks_rows(result)
    assert len(found) == len(result["steps"]) + len(result["modes"])
    first = found[len(result["steps"])]
    assert "--tp-mode fast over exact, 4 x 1 tokens" in first
    assert "| 1.25x; 5 kB, 505 kB |" in first


def test_the_priority_of_a_gateway_is_shown_where_it_is_not_the_default() -> None:
    result = _result("fleet")
    run = result["runs"]["1000"]
    run["router"]["nice"] = run["beside"]["smg"]["nice"] = 0
    assert not any("at nice" in row for row in fleet_rows(result))
    run["router"]["nice"] = run["beside"]["smg"]["nice"] = -5
    shown = [row.partition(":")[0] for row in fleet_rows(result) if "at nice -5" in row]
    assert [row.partition(" at nice")[0].rpartition(" ")[2] for row in shown] == ["router", "smg"]


def test_resources_held_after_a_soak_are_counted() -> None:
    result = _result("soak")
    result["after_rounds"][-1]["blocks"] = 3
    result["wrong"] = ["one"]
    told, held = soak_rows(result)
    assert told.endswith("| 1 | 0 |")
    assert "3 more than before" in held


def test_a_line_of_policies_compares_means_without_rejections() -> None:
    result = _result("policies-cpu")
    title, table = policy_table(result).split("\n\n")
    rows = table.splitlines()
    assert result["scene"] in " ".join(title.split())
    speeds = {run["speed"] for run in result["runs"]}
    assert len(rows) == 2 + len(speeds)
    first = min(speeds)
    [mean] = (
        run["summary"]["latency_mean_s"]
        for run in result["open_ended"]["runs"]
        if (run["policy"], run["speed"]) == ("sjf", first)
    )
    assert rows[2].split(" | ")[5] == f"{mean:.1f} s"


def test_sizes_at_which_lru_is_better_are_named() -> None:
    sizes = [
        {"blocks": 10, "share_of_footprint": 0.1, "hits": hits, "of_belady": {"quire": 0.5}}
        for hits in ({"quire": 4, "lru": 5}, {"quire": 7, "lru": 7})
    ]
    row = _belady_row({"trace": "t", "sizes": sizes})
    assert "1 of 2 (4 of 5 at 10 blocks)" in row


def test_the_memory_plan_is_read_from_the_servers_output() -> None:
    log = io.BytesIO(
        b"2026 info engine: ready\nmodel    box\nmemory   weights       -6.6 MiB\n"
        b"memory   KV cache (1638 blocks of 16 tokens)     -64.0 MiB\nready in 1 s\n"
    )
    plan = footprint._plan(log)
    assert (plan["blocks"], plan["block_size"]) == (1638, 16)
    assert plan["text"][0] == "weights -6.6 MiB"
    row = {"shape": "s", "precision": "int8", "kv_tokens": 9, "planned_bytes": 2e6}
    [told] = _footprint_rows(
        {"footprints": [{**row, "ratio": 1.1, "server_ratio": 1.2, "goal": 1.15}]}
    )
    assert "over weights + KV (2 MB)" in told
    assert told.endswith("| 1.10x; with the API's 1.20x | 1.15x |")


def test_lines_measured_on_a_loaded_machine_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme_table, "RESULTS", tmp_path)
    for name in ("startup", "quality"):
        result = _result(name)
        result["machine"] |= {"cores": 2, "load_at_start": 9.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found = readme_table.topic_rows()
    assert all(line.split(" |")[0].endswith(LOAD_MARK) for line in found["Start and size"])
    assert not any(LOAD_MARK in line for line in found["Quality of quantized weights"])
    assert "upper bounds" in rows.start_text(json.loads((tmp_path / "startup.json").read_text()))[0]
    assert readme_table.FOOTNOTE.split()[0] in readme_table.page()
