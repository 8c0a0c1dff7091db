"""A tiny model with tokenizer and chat template, and one without a template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny", seed=3)


@pytest.fixture(scope="session")
def model_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("engine") / "bare", seed=3)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    return folder
