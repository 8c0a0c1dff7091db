"""`quire config`, and a configuration file and the environment for other subcommands."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.unit.cli.command import quire_main


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "quire.toml"
    path.write_text(
        'model = "m"\napi-key = "hidden"\nmax-num-seqs = 8\nthreads = 2\n[server]\nport = 8001\n'
    )
    path.chmod(0o600)
    return str(path)


def _shown(*words: str) -> dict[str, tuple[object, str]]:
    done = quire_main("config", "show", "--json", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return {
        key: (entry["value"], entry["place"] or entry["source"])
        for key, entry in json.loads(done.stdout).items()
    }


def test_each_value_is_shown_with_its_source(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_THREADS", "3")
    monkeypatch.setenv("QUIRE_PORT", "8002")
    shown = _shown("--config", file, "--port", "8003")
    assert shown["host"] == ("127.0.0.1", "default")
    assert shown["model"] == ("m", f"{file}:1")
    assert shown["api-key"] == ("(set)", f"{file}:2")
    assert shown["max-num-seqs"] == (8, f"{file}:3")
    assert shown["threads"] == (3, "QUIRE_THREADS")
    assert shown["port"] == (8003, "--port")
    assert _shown("other", "--config", file)["model"] == ("other", "MODEL")
    monkeypatch.setenv("QUIRE_CONFIG", file)
    assert _shown()["max-num-seqs"] == (8, f"{file}:3")
    table = quire_main("config", "show").stdout
    assert f"{file}:3" in table
    assert "hidden" not in table
    assert "QUIRE_MAX_NUM_SEQS" in quire_main("config", "show", "--env").stdout


def test_the_file_that_is_shown_gives_the_same_settings(file: str, tmp_path: Path) -> None:
    flags = ("--uds", "s", "--served-model-name", "a", "--served-model-name", "b#\n")
    text = quire_main("config", "show", "--toml", "--config", file, *flags).stdout
    assert "hidden" not in text
    copy = tmp_path / "copy.toml"
    copy.write_text(text)
    before, after = _shown("--config", file, *flags), _shown("--config", str(copy))
    assert before.pop("api-key")[0] == "(set)"
    assert after.pop("api-key")[0] == []
    assert {key: entry[0] for key, entry in before.items()} == {
        key: entry[0] for key, entry in after.items()
    }
    assert tomllib.loads(text)["server"]["uds"] == "s"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-num-seqs = 0", "--max-num-seqs ({file}:1) is 0; at least 1 is needed"),
        ("max-num-seq = 0", "{file}:1: max-num-seq is not a setting; did you mean max-num-seqs?"),
        ("max-num-seqs = 'a'", "{file}:1: max-num-seqs is 'a'; a whole number is expected"),
    ],
)
def test_an_invalid_file_is_rejected_by_every_subcommand(
    text: str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "quire.toml"
    path.write_text(text)
    for words in (
        ("config", "check", str(path)),
        ("config", "show", "--config", str(path)),
        ("serve", "--config", str(path)),
        ("complete", "--config", str(path), "--prompt", "a"),
    ):
        done = quire_main(*words)
        assert done.returncode == 2
        assert told.format(file=path) in done.stderr, words


def test_a_valid_file_is_counted(file: str) -> None:
    done = quire_main("config", "check", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{file} is valid; it gives 5 settings\n"


def test_an_unknown_variable_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQ", "3")
    done = quire_main("config", "show")
    assert done.returncode == 0
    assert "did you mean QUIRE_MAX_NUM_SEQS?" in done.stderr


def test_a_file_is_not_for_a_conversation_with_a_server(file: str) -> None:
    done = quire_main("chat", "--url", "http://127.0.0.1:9", "--config", file)
    assert done.returncode == 2
    assert "--config configures an engine in this process" in done.stderr
