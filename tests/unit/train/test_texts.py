"""Texts of a training: what a file of them is refused for, and what leaves none."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import QuireError, SettingError
from quire.train.precision import identity
from quire.train.progress import Progress
from quire.train.texts import Text, TextSettings, generated_texts

VOCAB = 307
SETTINGS = TextSettings(
    num_tokens=40,
    answer_tokens=10,
    temperatures=(1.0, 0.0),
    form="text",
    seed=1,
    max_num_seqs=8,
    threads=1,
    precision={},
    vocab_size=VOCAB,
)
Generate = Callable[..., list[Text]]


@pytest.fixture
def generate(deep_model: Path) -> Generate:
    name = identity(deep_model, {})

    def made(path: Path, prompts: list[str] | None = None, **changes: Any) -> list[Text]:
        given = prompts or ["the cat and", "the dog and"]
        settings = replace(SETTINGS, **changes)
        quiet = Progress(io.StringIO())
        return generated_texts(str(deep_model), name, given, settings, path, quiet)

    return made


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperatures": (1.0, -1.0)}, "temperature"),
        ({"temperatures": (float("nan"),)}, "temperature"),
        ({"prompts": ["the cat and " * 400]}, "tokens"),
    ],
)
def test_settings_that_no_text_has_leave_no_file(
    generate: Generate, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    path = tmp_path / "texts.jsonl"
    with pytest.raises(QuireError, match=message):
        generate(path, **wrong)
    assert not path.exists()
    assert generate(path)


def test_temperatures_are_checked_before_the_model_is_loaded(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.train.texts.LLM", None)
    with pytest.raises(QuireError, match="temperature"):
        generate(tmp_path / "texts.jsonl", temperatures=(1.0, 1.0, -1.0))


@pytest.mark.parametrize("num_bytes", [0, 1, 20])
def test_a_first_line_that_a_kill_cut_short_begins_anew(
    generate: Generate, tmp_path: Path, num_bytes: int
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    texts = generate(whole)
    cut.write_bytes(whole.read_bytes()[:num_bytes])
    assert generate(cut) == texts
    assert cut.read_bytes() == whole.read_bytes()
    cut.write_text("another file")
    with pytest.raises(SettingError, match="has texts that were made otherwise"):
        generate(cut)
    assert cut.read_text() == "another file"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"ids": [1, 2, 3], "num_prompt_tokens": -3}', "num_prompt_tokens is -3; .* from 1 to 3"),
        ('{"ids": [1, 2, 3], "num_prompt_tokens": 0}', "num_prompt_tokens is 0"),
        ('{"ids": [1, 2, 3], "num_prompt_tokens": 4}', "num_prompt_tokens is 4"),
        ('{"ids": [1, 2, 3], "num_prompt_tokens": true}', "num_prompt_tokens is true"),
        ('{"ids": [1, 2, 3]}', "num_prompt_tokens is null"),
        ('{"ids": [1, 307, 3], "num_prompt_tokens": 1}', "ids has 307; .* from 0 to 306"),
        ('{"ids": [1, -1, 3], "num_prompt_tokens": 1}', "ids has -1"),
        ('{"ids": [1, 2.0, 3], "num_prompt_tokens": 1}', "ids has 2.0"),
        ('{"ids": [1, true, 3], "num_prompt_tokens": 1}', "ids has true"),
        ('{"ids": "123", "num_prompt_tokens": 1}', 'ids is "123"; a list of token ids'),
        ('{"ids": [], "num_prompt_tokens": 0}', r"ids is \[\]; a list of token ids"),
        ("[1, 2]", r"it is \[1, 2\]; an object"),
        ("{", "it is not JSON"),
        ("", "it is not JSON"),
    ],
)
def test_a_line_that_is_no_text_is_refused_with_its_number(
    generate: Generate, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "texts.jsonl"
    texts = generate(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], line, *lines[4:]]) + "\n")
    with pytest.raises(SettingError, match=rf"jsonl: line 4 is no text: .*{message}.*delete that"):
        generate(path)
    path.write_text("\n".join(lines[:3]) + "\n")
    num_tokens = sum(len(text.ids) - text.num_prompt_tokens for text in texts)
    assert generate(path, num_tokens=num_tokens)[: len(texts)] == texts


def test_a_file_that_cannot_be_read_or_written_is_named(generate: Generate, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.mkdir()
    with pytest.raises(SettingError, match=r"texts.jsonl: cannot be read: Is a directory"):
        generate(path)
    with pytest.raises(SettingError, match=r"texts.jsonl: cannot be written: No such file"):
        generate(tmp_path / "none" / "texts.jsonl")
