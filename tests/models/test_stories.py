"""Real trained weights: the published greedy text of stories260K, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data import outside
from tests.models.generate import EXECUTORS, greedy, open_executor


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("model", ["stories260K", "llama2xs"])
def test_a_trained_model_continues_greedily_as_published(model: str, kind: str) -> None:
    folder: Path = outside(model)
    expected = json.loads((folder / "greedy_200.json").read_text())
    executor = open_executor(folder, kind=kind)
    ids = greedy(executor, expected["prompt_ids"], len(expected["ids"]), max_positions=256)
    assert ids == expected["ids"]
