"""Errors that users provoked: each names what was found, what is allowed and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.api.generation.field_forms import one_or_listed
from quire.api.http.request_io import parse
from quire.base.errors import QuireError
from quire.base.grammar import Grammar, GrammarKind
from quire.structured.rejection import rejection
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.command import quire_main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with one defect each, and files that are something else."""
    root = tmp_path_factory.mktemp("errors")
    good = write_tiny_llama(root / "good", seed=1)
    for name, content in (("cut-config", b"{"), ("list-config", b"[]")):
        shutil.copytree(good, root / name)
        (root / name / "config.json").write_bytes(content)
    shutil.copytree(good, root / "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(good, root / "no-config", ignore=shutil.ignore_patterns("config.json"))
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    return root


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("complete cut-config -p x", "the file is damaged: copy or download it again"),
        ("complete list-config -p x", "the file is damaged: copy or download it again"),
        ("complete no-weights -p x", "tokenizer_config.json. Copy the model's weights there"),
        ("complete no-config -p x", "no config.json; there are generation_config.json, "),
        ("complete empty -p x", "no config.json; it is empty; give the directory of a model"),
        ("complete https://huggingface.co/a/b?x=1 -p x", "an address; give the model's name: a/b"),
        ("complete ~nobody-of-this-name/x -p x", "~nobody-of-this-name/x: no such folder"),
        ("complete good -p x --temperature hot", "--temperature: 'hot' is not a number"),
        ("complete good -p x --seed 1e9", "--seed: '1e9' is not a whole number"),
        ("serve good --pack-cache file --port 0", "name a directory that you may write to"),
        ("serve good --api-key-file none", "none cannot be read (No such file or directory); give"),
        ("serve good --tenants none", "give a TOML file with a table [tenants.NAME]"),
        ("serve good --tls-cert none", "cannot be used (No such file or directory); give PEM"),
        ("pull good", "is a path on this machine, so there is nothing to download"),
        ("models --pack-cache none", "--pack-cache none does not exist; give the directory"),
        ("models --kv-tier-path file", "--kv-tier-path file is not a directory; give"),
        ("simulate --trace none", "cannot be read: No such file or directory; a CSV with"),
        ("chat --url nowhere.invalid", "or check the address, as in http://127.0.0.1:8000"),
    ],
)
def test_a_command_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    done = quire_main(*words.split())
    assert done.returncode in (1, 2)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: LLM(5), "model is 5; a string is expected"),  # type: ignore[arg-type]
        (lambda: LLM("", max_num_seqs="x"), "max_num_seqs is 'x'; a whole number is expected"),
        (lambda: SamplingParams(stop=5), "stop is 5; a string or a list is allowed"),  # type: ignore[arg-type]
        (lambda: one_or_listed("stop", 5), "stop is 5; a string or a list of strings is allowed"),
        (lambda: parse(b"{", limit_bytes=99), "send one JSON object in UTF-8"),
        (lambda: parse(b"a=b", limit_bytes=99), "send one JSON object in UTF-8"),
    ],
)
def test_a_call_says_what_is_allowed(call: Callable[[], object], said: str) -> None:
    with pytest.raises(QuireError) as caught:
        call()
    assert said in str(caught.value)


def test_a_schema_of_an_unknown_type_names_the_types() -> None:
    text = json.dumps({"properties": {"a": {"type": "blob"}}})
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
    said = str(rejection(grammar, "Invalid type: blob"))
    assert 'the schema has the type "blob" (at #/properties/a/type); array, boolean,' in said
