"""Greedy continuations, token for token: real trained weights, and tiny random ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases import each_case
from tests.data import outside
from tests.models.case import Case
from tests.models.cases import CASES
from tests.models.generate import EXECUTORS, greedy, open_executor
from tests.models.record import CONTINUED, RECORDED


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("model", ["stories260K", "llama2xs"])
def test_a_trained_model_continues_greedily_as_published(model: str, kind: str) -> None:
    folder: Path = outside(model)
    expected = json.loads((folder / "greedy_200.json").read_text())
    executor = open_executor(folder, kind=kind)
    ids = greedy(executor, expected["prompt_ids"], len(expected["ids"]), max_positions=256)
    assert ids == expected["ids"]


@each_case("kind", EXECUTORS)
@each_case("case", [case for case in CASES if case.name in CONTINUED], ids=lambda case: case.name)
def test_a_random_model_continues_greedily_as_in_transformers(
    case: Case, kind: str, tmp_path: Path
) -> None:
    expected = json.loads((RECORDED / f"{case.name}.json").read_text())["greedy"]
    executor = open_executor(case.write(tmp_path), kind=kind)
    found = greedy(executor, case.token_ids[:5], len(expected), max_positions=512)
    assert found == expected
    assert len(set(expected)) > 10
