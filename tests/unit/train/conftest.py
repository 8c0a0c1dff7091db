"""The model and the prompts of short trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="package")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("train"), seed=3, num_hidden_layers=3)


@pytest.fixture(scope="package")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"the {word} and\n\n" for word in ("cat", "dog", "sea")))
    return path
