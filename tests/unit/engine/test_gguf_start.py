"""Startup from GGUF parses the file's metadata once; a tokenizer loads without its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.base import gguf_open
from quire.base.clock import Clock
from quire.base.errors import ConfigError, TokenizerError
from quire.base.gguf_file import GgufFile
from quire.base.gguf_open import gguf_read_once, open_gguf
from quire.config.flags import engine_config
from quire.engine.assembly.assemble import assemble
from quire.engine.client.tokenizer_side import load_tokenizer_side
from quire.engine.library.llm import LLM
from quire.models.model_folder import read_vocab_size
from quire.models.registry import open_model
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama

SMALL = {"threads": 1, "kv_cache_memory": "16MiB"}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the parsed files in order."""
    paths = []

    class Counted(GgufFile):
        def __init__(self, path: Path) -> None:
            paths.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf_open, "GgufFile", Counted)
    return paths


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf_of(write_tiny_llama(tmp_path / "ck"), tmp_path / "m.gguf")


def _engine(file: Path) -> None:
    config = engine_config({"model": str(file), **SMALL})
    assemble(config, clock=Clock(), report=lambda *_, **__: None).core.runner.close()


def _text_side(file: Path) -> None:
    load_tokenizer_side(engine_config({"model": str(file)}).model)


def _llm(file: Path) -> None:
    LLM(file, **SMALL).close()


@pytest.mark.parametrize("start", [_engine, _text_side, _llm])
def test_startup_parses_the_file_once(
    start: Callable[[Path], None], file: Path, parsed: list[Path]
) -> None:
    start(file)
    assert parsed == [file]
    start(file)
    assert parsed == [file, file]  # a later start may find another file there


def test_files_are_kept_until_the_last_context_ends(file: Path, parsed: list[Path]) -> None:
    assert open_gguf(file) is not open_gguf(file)
    with gguf_read_once():
        first = open_gguf(file)
        with gguf_read_once():
            assert open_gguf(file) is first
        assert open_gguf(file) is first
    assert open_gguf(file) is not first
    assert len(parsed) == 4


def test_the_vocabulary_has_the_size_of_the_specification(file: Path) -> None:
    for path in (file, file.parent / "ck"):
        assert read_vocab_size(path) == open_model(path).vocab_size > 0


def test_an_unsupported_model_is_reported_rather_than_its_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError):
        _text_side(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Unknown"]}))
    with pytest.raises(ConfigError, match="Unknown"):
        _text_side(folder)
