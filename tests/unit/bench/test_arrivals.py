"""Arrivals: Poisson, and traces in two public formats, synthetic and published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.bench.arrivals import poisson, replay
from quire.bench.workloads import Lengths
from quire.obs.trace import read_trace
from tests.data import outside

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,396,109
2023-11-16 18:15:46.9305900,879,55
"""


def _rng() -> np.random.Generator:
    return np.random.default_rng(4)


def _mooncake(folder: Path) -> Path:
    file = folder / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 4000, "input_length": 1300, "output_length": 6, "hash_ids": [7, 8, 10]},
        {"timestamp": 4500, "input_length": 9000, "output_length": 6, "hash_ids": [7]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_poisson_arrivals_increase_within_the_time_at_the_rate() -> None:
    lengths = (Lengths(prompt=3, output=1), Lengths(prompt=5, output=2))
    asks = poisson(lengths, per_s=50, seconds=20, vocab_size=1000, rng=_rng())
    arrivals = [ask.arrival_s for ask in asks]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    assert arrivals[-1] < 20
    assert len(asks) == 1000
    in_the_first_half = sum(one < 10 for one in arrivals)
    assert 420 < in_the_first_half < 580  # five standard deviations
    assert len(poisson(lengths, per_s=0.1, seconds=1, vocab_size=1000, rng=_rng())) == 1
    assert [len(ask.prompt_ids) for ask in asks[:4]] == [3, 5, 3, 5]


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1)])
def test_a_rate_of_zero_is_rejected(rate: float, seconds: float) -> None:
    with pytest.raises(SettingError, match="above 0"):
        poisson(
            (Lengths(prompt=1, output=1),), per_s=rate, seconds=seconds, vocab_size=9, rng=_rng()
        )


def test_azures_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    trace = read_trace(file)
    assert [(one.prompt_tokens, one.output_tokens) for one in trace] == [
        (374, 44),
        (879, 55),
        (396, 109),
    ]
    assert [one.arrival_s for one in trace] == pytest.approx([0, 0.25, 0.5])
    assert len(read_trace(file, max_requests=2)) == 2


def test_mooncakes_trace_shares_blocks_when_replayed(tmp_path: Path) -> None:
    trace = read_trace(_mooncake(tmp_path))
    asks, left_out = replay(trace, speed=2, max_tokens=4096, vocab_size=1000, rng=_rng())
    assert left_out == 1  # 9,006 tokens
    assert [ask.arrival_s for ask in asks] == [0, 1.5]
    first, second = (ask.prompt_ids for ask in asks)
    assert (len(first), len(second)) == (1100, 1300)
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]


def test_a_prompt_longer_than_its_blocks_is_padded(tmp_path: Path) -> None:
    trace = read_trace(_mooncake(tmp_path))[2:]
    asks, _ = replay(trace, speed=1, max_tokens=10_000, vocab_size=1000, rng=_rng())
    assert len(asks[0].prompt_ids) == 9000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("a,b\n1,2\n", "line 1 is no header"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"timestamp": 0}\n', "line 2"),
        ('{"timestamp": 0, "input_length": 5,\n', "line 1"),
        ('{"timestamp": [], "input_length": 5, "output_length": 2}\n', "line 1"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 2}\n', "line 1"),
    ],
)
def test_an_invalid_trace_is_rejected_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(SettingError, match=told):
        read_trace(file)


def test_a_missing_file_and_invalid_text_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SettingError, match="cannot be read"):
        read_trace(tmp_path / "bytes")


def test_a_trace_without_fitting_requests_is_rejected(tmp_path: Path) -> None:
    trace = read_trace(_mooncake(tmp_path))
    with pytest.raises(SettingError, match="none of the 3 requests"):
        replay(trace, speed=1, max_tokens=100, vocab_size=1000, rng=_rng())
    with pytest.raises(SettingError, match="speed is 0"):
        replay(trace, speed=0, max_tokens=10_000, vocab_size=1000, rng=_rng())


def test_the_published_azure_trace_is_read() -> None:
    trace = read_trace(outside("traces/azure2023-conversation.csv"))
    assert len(trace) == 19_366
    assert 3500 < trace[-1].arrival_s < 3700  # an hour
    assert all(one.prompt_tokens >= 1 and one.output_tokens >= 1 for one in trace)


def test_the_published_mooncake_trace_is_read() -> None:
    trace = read_trace(outside("traces/mooncake-synthetic.jsonl"))
    assert len(trace) == 3_993
    assert all(one.block_ids for one in trace)
    asks, left_out = replay(trace, speed=1, max_tokens=4096, vocab_size=30_000, rng=_rng())
    assert len(asks) + left_out == 3_993
