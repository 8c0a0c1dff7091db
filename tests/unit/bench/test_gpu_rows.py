"""Table lines on a GPU: only of a real one, each beside its goal, with published results of
others.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench import readme_table
from bench.measured.gpu_rows import gpu_rows, published_table

DECODED = {
    "tokens_per_s": 251.4,
    "share_of_floor": 0.88,
    "seconds_with_host": 0.00398,
    "seconds_on_device": 0.0038,
}
RESULT: dict[str, Any] = {
    "what": "quire on a GPU",
    "machine": {"gpus": ["A card, 1.0"], "packages": {"torch": "2.11.0", "triton": "3.6.0"}},
    "sections": {
        "decode_one": {
            "status": "ok",
            "found": {"Llama-3.1-8B none fast": DECODED, "Llama-3.1-8B none exact": DECODED},
        },
        "attention_decode": {"status": "ok", "found": {"bf16 fast": {"share_of_copy": 0.91}}},
        "attention_prefill": {
            "status": "ok",
            "found": {"ours": {"share_of_peak": 0.6}, "pytorch flash": {"not_run": "no"}},
        },
        "prefill": {
            "status": "ok",
            "found": {"fast": {"tokens_per_s": 31_000.0, "share_of_peak": 0.7}},
        },
        "requests": {
            "status": "ok",
            "found": {
                "fast": {
                    "is_whole": True,
                    "seconds": 50.0,
                    "idle_between_steps_s": 0.5,
                    "answered_tokens_per_s": 10_486.0,
                    "share_of_floor": 0.8,
                },
                "exact": {"is_whole": False},
                "exact, 16 requests": {
                    "is_whole": True,
                    "seconds": 4.0,
                    "idle_between_steps_s": 0.4,
                    "answered_tokens_per_s": 2_048.0,
                    "share_of_floor": 0.7,
                },
            },
        },
        "peer": {
            "status": "ok",
            "found": {
                "transformers 5, its own attention, 128 requests": {
                    "answered_tokens_per_s": 2_000.0
                },
                "transformers 5, its own attention: 512 requests": "not asked for",
            },
        },
        "exact_price": {
            "status": "ok",
            "found": {"decode of 8": {"price": 0.05}, "prefill of 2048": {"price": 0.15}},
        },
        "ready": {"status": "failed: exit code 1", "found": {}},
    },
}


def test_each_goal_of_the_check_has_a_line() -> None:
    rows = gpu_rows(RESULT)
    assert "| one request, 8B bf16: decode | fast 251 tokens/s, 88 % of the floor" in rows[0]
    assert rows[0].endswith("| 85 % |")
    assert any("pytorch flash not run | 55 % |" in row for row in rows)
    assert any("| 10,486, 80 %, 99.0 % | 97 % busy |" in row for row in rows)
    assert any("fast, 512 requests, 256 at once: output" in row for row in rows)
    assert any("exact, 16 requests: output" in row and "| 2,048, 70 %" in row for row in rows)
    peers = [row for row in rows if "transformers 5" in row]
    assert [("128 requests" in row, "| 2,000 |" in row) for row in peers] == [(True, True)]
    prices = [row for row in rows if "price of exact mode" in row]
    assert [row[-7:] for row in prices] == [" 10 % |", " 20 % |"]
    assert not any("exact: output" in row or "local files" in row for row in rows)


def test_a_dry_run_is_no_measurement() -> None:
    assert gpu_rows({**RESULT, "what": "dry run: no measurement"}) == []


def test_without_a_gpu_result_the_page_says_so_and_shows_no_others() -> None:
    assert readme_table._gpu_parts(None) == ["## On a GPU", "Not yet measured."]
    dry = {**RESULT, "what": "dry run: no measurement"}
    assert readme_table._gpu_parts(dry) == ["## On a GPU", "Not yet measured."]


def test_a_result_is_shown_with_published_ones() -> None:
    result = copy.deepcopy(RESULT)
    _, card, table, _, others = readme_table._gpu_parts(result)
    assert "A card, 1.0" in card
    assert "8B bf16" in table
    assert "vLLM" in others
    assert "SGLang" in others


@pytest.mark.parametrize("line", published_table()[2:])
def test_a_published_figure_has_its_setting_and_address(line: str) -> None:
    fields = [field.strip() for field in line.strip("|").split("|")]
    assert len(fields) == 7
    assert all(fields)
    assert "](https://" in fields[0]
