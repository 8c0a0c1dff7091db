"""The quire command: subcommands, exit codes, error messages, and imports at startup."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest

import quire
from quire.base.errors import OverloadedError, QuireError, StepRowError, TokenizerError, WorkerError
from quire.cli import main as main_module
from quire.cli.main import SUBCOMMANDS, command_parser, main
from quire.config.foreign_flags import FAMILIES, FOREIGN_SUBCOMMANDS, INSTEAD
from tests.unit.cli.command import environment, quire_command


def _imported(*words: str) -> set[str]:
    """Return the modules that are loaded after the command ran."""
    code = (
        "import sys\nfrom quire.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('\\nloaded', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, env=environment(), check=True
    )
    return set(done.stdout.decode().rpartition("loaded")[2].split())


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("chat", "--help"), ()])
def test_version_and_help_import_no_numpy(words: tuple[str, ...]) -> None:
    loaded = _imported(*words)
    assert "quire.cli.main" in loaded
    assert not loaded & {"numpy", "msgspec", "zmq", "jinja2", "tokenizers", "starlette", "rich"}


def test_the_version_imports_no_subcommand() -> None:
    assert not {f"quire.cli.{subcommand}" for subcommand in SUBCOMMANDS} & _imported("--version")


def test_the_version_is_printed() -> None:
    done = quire_command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("quire ")


def test_without_a_subcommand_the_subcommands_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(subcommand in shown for subcommand in SUBCOMMANDS)


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_every_subcommand_has_help(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([subcommand, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: quire {subcommand}" in shown
    assert SUBCOMMANDS[subcommand][1:] in " ".join(shown.split())


def test_help_of_many_flags_is_in_short_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: quire serve [FLAGS] [MODEL]\n\nStart an OpenAI-compatible")
    titles = re.findall(r"^([A-Z].*):$", shown, re.MULTILINE)
    assert titles[:2] == ["HTTP server", "Keys and access"]
    assert len(titles) == len(set(titles)) == 17
    for section in re.split(r"^[A-Z].*:$", shown, flags=re.MULTILINE)[1:]:
        assert 1 < len(re.findall(r"^  --", section, re.MULTILINE)) <= 16
    assert "--convert" in shown
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    assert capsys.readouterr().out.startswith("usage: quire replay [FLAGS] FILE [MODEL]\n")


@pytest.mark.parametrize(
    "words", [["sing"], ["chat", "--no-such-flag"], ["complete", "--seed", "x"]]
)
def test_unknown_words_are_rejected_with_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: quire" in capsys.readouterr().err


class _Failing:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def add_arguments(self, parser: object) -> None:
        """None."""

    def run(self, arguments: object) -> int:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TokenizerError("first\n  second"), 2),
        (OverloadedError("busy"), 2),
        (QuireError("plain"), 2),
        (WorkerError("gone"), 1),
        (StepRowError("row"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_messages_and_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(main_module, "subcommand", lambda name: _Failing(error))
    assert main(["chat"]) == code
    shown = capsys.readouterr().err
    if isinstance(error, QuireError):
        assert shown == f"quire chat: {error}\n"
    else:
        assert shown == ""


def test_ctrl_c_while_a_subcommand_is_imported_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "subcommand", interrupted)
    assert main(["chat"]) == 130
    assert capsys.readouterr().err == ""


def test_internal_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module, "subcommand", lambda name: _Failing(ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError):
        main(["chat"])


def test_only_the_used_subcommand_gets_its_arguments() -> None:
    parser = command_parser(["chat"])
    assert parser.parse_args(["chat", "--seed", "3"]).seed == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["complete", "--seed", "3"])


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "completion", "bash"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize("words", [("completion", "bash"), ("program",)])
def test_a_full_disk_is_reported_in_a_sentence(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quire", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
        )
    assert done.returncode == 1
    told = done.stderr.decode()
    assert told == (
        f"quire {words[0]}: cannot write: No space left on device; make room, or write elsewhere\n"
    )


def test_other_system_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module, "subcommand", lambda name: _Failing(PermissionError(13, "no")))
    with pytest.raises(PermissionError):
        main(["chat"])


def test_unknown_flags_are_reported_with_the_usage_of_their_subcommand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--zzz", "x", "y"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown == (
        "quire serve: unknown arguments: --zzz y; there is no such flag\n"
        "usage: quire serve --help lists its flags\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--threads", "0"), "--threads is 0; at least 1 is needed"),
        (("--request-timeout", "-1"), "--request-timeout is -1.0; at least 0.001 is needed"),
        (("--port", "99999"), "--port is 99999; 0 to 65535 is allowed"),
    ],
)
def test_a_wrong_value_is_reported_with_its_flag(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert capsys.readouterr().err == f"quire serve: {told}\n"


def test_flags_of_other_engines_are_rejected_with_the_alternative(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for flag in INSTEAD if not flag.startswith("-h") for word in (flag, "x")]
    with pytest.raises(SystemExit) as caught:
        main(["serve", *words])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert not [text for text in INSTEAD.values() if text not in shown]


def test_a_flag_of_one_dash_is_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "-t", "8"])
    assert f"unknown arguments: -t; {INSTEAD['-t']}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [flag for flag in INSTEAD if flag.startswith("-h")])
def test_a_foreign_flag_that_begins_like_help_is_rejected_as_others(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", flag, "ORG/NAME"])
    assert caught.value.code == 2
    assert f"unknown arguments: {flag}; {INSTEAD[flag]}" in capsys.readouterr().err


def test_alternatives_to_foreign_flags_exist() -> None:
    texts = (*INSTEAD.values(), *FAMILIES.values())
    flags = {flag for text in texts for flag in re.findall(r"--[a-z-]+", text)}
    known = set(_flags_of("serve"))
    assert flags
    assert flags <= known
    assert not set(INSTEAD) & known


def _flags_of(subcommand: str) -> list[str]:
    with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
        main([subcommand, "--help"])
    return re.findall(r"--[a-z-]+", shown.getvalue())


def test_every_error_on_a_foreign_flag_is_one_line() -> None:
    tables = (INSTEAD, FAMILIES, FOREIGN_SUBCOMMANDS)
    assert not [text for table in tables for text in table.values() if "\n" in text]


@pytest.mark.parametrize("name", FOREIGN_SUBCOMMANDS)
def test_subcommands_of_other_engines_name_the_replacement(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name not in SUBCOMMANDS
    with pytest.raises(SystemExit) as caught:
        main([name, "llama3"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert (
        f"there is no subcommand {name!r}; {FOREIGN_SUBCOMMANDS[name]}; there are: serve" in shown
    )


def test_replacements_of_subcommands_exist() -> None:
    named = {
        word
        for text in FOREIGN_SUBCOMMANDS.values()
        for word in re.findall(r"quire ([a-z]+)", text)
    }
    assert named
    assert named <= SUBCOMMANDS.keys()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serv"], "did you mean serve?"),
        (["frobnicate"], "there is no subcommand 'frobnicate'; there are: serve"),
        (["serve", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["serve", "--max-num-sqes=3"], "did you mean --max-num-seqs?"),
        (
            ["serve", "--ctx-size=3"],
            "; the maximum length of prompt and output together is --max-model-len",
        ),
        (["serve", "--speculative-config.method", "x"], ": method ngram is --speculate ngram"),
        (["chat", "--max-queued-tokens", "3"], "--max-queued-tokens is a flag of quire serve"),
    ],
)
def test_the_nearest_subcommand_or_flag_is_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["serve", "--max-model=9"], ["chat", "--temp=0"], ["bench", "latency", "--js"]]
)
def test_an_abbreviated_flag_is_unknown(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"unknown arguments: {words[-1]}; " in capsys.readouterr().err


def test_no_parser_takes_abbreviated_flags() -> None:
    root = Path(quire.__file__).parents[1]
    made = [
        (path.name, call)
        for folder in ("quire", "bench", "models", "scripts")
        for path in (root / folder).rglob("*.py")
        for call in re.findall(
            r"(?<=[= ])argparse\.ArgumentParser\(.{0,40}", path.read_text(), re.S
        )
    ]
    assert len(made) > 20
    assert [one for one in made if "allow_abbrev=False" not in one[1]] == []


def test_the_help_of_chat_lists_no_flag_of_the_server() -> None:
    flags = set(_flags_of("chat"))
    assert {"--system", "--url", "--seed", "--threads", "--kv-cache-memory"} <= flags
    assert not flags & {"--max-queued-requests", "--scheduling-policy", "--port", "--tenants"}


def test_remote_code_is_rejected_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--trust-remote-code"])
    assert "code that comes with a model is never run" in capsys.readouterr().err
