"""Shell completion: generated from the parsers, and checked with bash."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from quire.cli.completion import script, subcommand_words
from quire.cli.main import SUBCOMMANDS
from tests.unit.cli.command import quire_main


def _bash_completes(*words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"{script('bash')}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n_quire\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture(autouse=True)
def _bash() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")


def test_bash_completes_subcommands() -> None:
    assert _bash_completes("quire", "") == [*SUBCOMMANDS, "--help", "--version"]
    assert _bash_completes("quire", "comp") == ["complete", "completion"]


def test_bash_completes_flags_of_the_subcommand() -> None:
    assert _bash_completes("quire", "serve", "--max-num") == [
        "--max-num-seqs",
        "--max-num-batched-tokens",
    ]
    assert _bash_completes("quire", "completion", "--max") == []


def test_bash_completes_values_directories_and_files() -> None:
    known = ["native", "reference", "torch"]
    assert _bash_completes("quire", "chat", "--executor", "") == known
    assert _bash_completes("quire", "completion", "") == ["bash", "fish", "zsh"]
    assert "tmp" in _bash_completes("quire", "chat", "tm")
    assert "etc/passwd" in _bash_completes("quire", "chat", "etc/passw")  # a model may be a file
    assert "--dtype" not in _bash_completes("quire", "chat", "--seed", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_of_every_subcommand_is_in_every_script(shell: str) -> None:
    written = script(shell)
    for subcommand in subcommand_words():
        assert subcommand.name in written
        for flag in subcommand.flags:
            for name in flag.names:
                bare = name.lstrip("-")
                assert (f"-l {bare}" in written or f"-s {bare}" in written) or name in written


def test_fish_and_zsh_scripts_balance_their_quotes() -> None:
    for line in script("fish").splitlines():
        plain = line.replace("\\\\", "").replace("\\'", "")
        assert plain.count("'") % 2 == 0, line
    assert script("zsh").count("{") == script("zsh").count("}")


def test_the_script_is_printed() -> None:
    done = quire_main("completion", "fish")
    assert done.stdout == script("fish") + "\n"
    assert done.returncode == 0
