"""A fake hub that huggingface_hub uses in this process, with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.fake_hub import FakeHub
from tests.tiny_models import write_tiny_llama


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub; the cache is `hub` in a home directory under `tmp_path`."""
    with FakeHub() as server:
        home = tmp_path / "home"
        for name, value in server.environment(home).items():
            monkeypatch.setenv(name, value)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in one file."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=3)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in three shards with an index."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "sharded", seed=3, shards=3)
