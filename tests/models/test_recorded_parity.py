"""Logits against recorded results of transformers (record.py); needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.program.tensors import DType
from tests.cases import each_case
from tests.models.case import Case
from tests.models.cases import CASES
from tests.models.generate import EXECUTORS, logits_of, open_executor
from tests.models.record import RECORDED, bf16_error, same_tokens, weights_digest

F32_ERROR = 1e-4


@each_case("kind", EXECUTORS)
@each_case("case", CASES, ids=lambda case: case.name)
def test_logits_in_f32_match_transformers(case: Case, kind: str, tmp_path: Path) -> None:
    recorded = json.loads((RECORDED / f"{case.name}.json").read_text())
    folder = case.write(tmp_path)
    assert weights_digest(folder) == recorded["weights"], (
        "the checkpoint differs from the recorded one: run python -m tests.models.record"
    )
    logits = logits_of(
        open_executor(folder, kind=kind), case.token_ids, max_positions=case.max_positions
    )
    for row, values in recorded["logits"].items():
        right = np.array(values)
        error = np.abs(logits[int(row)] - right).max() / np.abs(right).max()
        assert error <= F32_ERROR, f"row {row}"
    sure = np.array(recorded["margins"]) > F32_ERROR
    assert (logits.argmax(1) == recorded["argmax"])[sure].all()
    assert sure.mean() > 0.95


@each_case("kind", EXECUTORS)
@each_case("case", [case for case in CASES if case.stored == "bf16"], ids=lambda case: case.name)
def test_logits_in_bf16_are_as_close_to_f32_as_in_transformers(
    case: Case, kind: str, tmp_path: Path
) -> None:
    recorded = json.loads((RECORDED / f"{case.name}.json").read_text())
    executor = open_executor(case.write(tmp_path), kind=kind, dtype=DType.BF16)
    logits = logits_of(executor, case.token_ids, max_positions=case.max_positions)
    rows = [int(row) for row in recorded["logits"]]
    right = np.array(list(recorded["logits"].values()), np.float32)
    assert bf16_error(case, logits[rows], right) <= recorded["bf16_error"]
    sure = np.array(recorded["margins"]) > recorded["bf16_error"]
    assert same_tokens(case, (logits.argmax(1) == recorded["argmax"])[sure])
    assert sure.mean() > 0.5


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("dtype", list(DType))
def test_chunks_of_any_size_give_the_same_logits(kind: str, dtype: DType, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "long")
    folder = case.write(tmp_path)
    # Longer than one piece of attention (256 positions) where pieces are computed.
    token_ids = case.token_ids[: 300 if kind == "native" else 90]
    whole, ones, odd = (
        logits_of(
            open_executor(folder, kind=kind, dtype=dtype, max_tokens=300),
            token_ids,
            max_positions=512,
            chunk=chunk,
        )
        for chunk in (300, 1, 41)
    )
    assert np.array_equal(whole, ones)
    assert np.array_equal(whole, odd)
