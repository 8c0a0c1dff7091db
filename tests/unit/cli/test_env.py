"""`quire env`: a report for bug reports that identifies no machine and no person."""

from __future__ import annotations

import getpass
import platform
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from quire.base.version import installed_version
from quire.cli.env import scrubbed
from quire.hub.cache import repo_dir
from tests.unit.cli.command import quire_main

_SECRETS = ("sk-flag", "sk-variable", "hf_token", "sk-file", "proxy-password", "internal.example")


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the report of a server with secrets in flags, variables and a file."""
    home = tmp_path / "home" / "ada"
    home.mkdir(parents=True)
    file = home / "quire.toml"
    file.write_text('api-key-file = "~/keys-of-ada"\nmax-num-seqs = 8\nroot-path = "/sk-file"\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setenv("HTTPS_PROXY", "http://internal.example/?proxy-password")
    monkeypatch.setenv("QUIRE_ADMIN_KEY_FILE", "/sk-variable")
    flags = (
        *("--config", str(file), "--api-key", "sk-flag", "--host", "internal.example"),
        *("--quantization", "int8", "--kv-cache-memory", "2GiB", "--access-log", "json"),
        *("--cors-origin", "https://internal.example", "--kv-tier-path", str(home / "tier")),
    )
    done = quire_main("env", str(home / "secret-model"), *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(home) not in done.stdout
    return done.stdout


def test_the_report_names_no_key_path_host_or_user(report: str) -> None:
    leaked = [secret for secret in (*_SECRETS, "ada", "secret-model") if secret in report]
    assert leaked == []
    assert socket.gethostname() not in report or len(socket.gethostname()) < 3


def test_settings_are_shown_with_their_kind_of_source_and_without_places(report: str) -> None:
    lines = report.splitlines()
    for line in (
        "- max-num-seqs: 8 (file)",
        "- quantization: int8 (flag)",
        "- kv-cache-memory: 2GiB (flag)",
        "- access-log: json (flag)",
        "- model: a path that does not exist (flag)",
        *(f"- {key}: (set) (flag)" for key in ("api-key", "host", "cors-origin", "kv-tier-path")),
        *(f"- {key}: (set) (file)" for key in ("api-key-file", "root-path")),
        "- admin-key-file: (set) (environment)",
        "- HF_TOKEN: (set)",
        "- HTTPS_PROXY: (set)",
    ):
        assert line in lines


def test_the_report_has_versions_processor_recipe_and_packages(report: str) -> None:
    assert report.startswith("## Quire environment\n\n### Quire\n")
    assert f"- version: {installed_version()}\n" in report
    assert f"- Python: CPython {platform.python_version()}\n" in report
    for name in ("cpu", "instruction sets", "open files", "recipe on this machine", "numpy"):
        assert f"\n- {name}: " in report
    assert "\n- torch (extra gpu): " in report


def test_a_model_name_is_shown_if_it_is_in_the_cache_and_defaults_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = repo_dir("Qwen/Qwen3-0.6B")
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    assert "- model: a name or a path (flag)\n" in quire_main("env", "secret/project").stdout
    assert "- model: Qwen/Qwen3-0.6B (flag)\n" in quire_main("env", "Qwen/Qwen3-0.6B").stdout
    assert "- none: all are defaults\n" in quire_main("env", "--port", "8000").stdout


def test_names_in_the_texts_of_other_packages_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-17")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    assert scrubbed("/users/ada/x on gpu-17 by ada, canada") == "~/x on (host) by (user), canada"
