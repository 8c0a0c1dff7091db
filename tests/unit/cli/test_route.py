"""`quire route`: wrong arguments are errors that say what is allowed; nothing is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.cli import route
from quire.cli.main import command_parser
from quire.router.discovery import parsed, replica_url


def _run(*words: str) -> int:
    return route.run(command_parser(["route"]).parse_args(["route", *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the addresses"),
        (["http://a:1", "--replicas-file", "x"], "not both"),
        (["ftp://a:1"], "http://"),
        (["http://a:1", "--stall-seconds", "0.1"], "--stall-seconds"),
        (["http://a:1", "--max-open-requests", "0"], "max_open"),
        (["http://a:1", "--host", "0.0.0.0"], "--insecure"),
        (["http://a:1", "--port", "99999"], "0 to 65535"),
        (["http://a:1", "--host", "192.0.2.1", "--insecure"], "cannot listen"),
        (["--replicas-file", "/nowhere/replicas"], "No such file"),
        (["http://a:1", "--replica-key-file", "/nowhere/key"], "--replica-key-file"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(words: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        _run(*words)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://a:1/v1", "http://a:1"),
        ("http://a:1/v1/", "http://a:1"),
        ("http://a:1/", "http://a:1"),
        ("a:1", "http://a:1"),
        ("http://a:1/box/v1", "http://a:1/box"),
        ("http://a:1/boxv1", "http://a:1/boxv1"),
    ],
)
def test_the_path_of_clients_is_left_out_of_a_replica_s_address(text: str, kept: str) -> None:
    for url in (replica_url(text), *parsed([text, kept])):
        assert url.shown + url.path == kept


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("\n")
    with pytest.raises(SettingError, match="is empty"):
        _run("http://a:1", "--replica-key-file", str(path))


def test_the_router_imports_no_engine_and_no_numpy() -> None:
    code = (
        "import sys, quire.cli.route, quire.router.server; "
        "print([name for name in sys.modules if name.split('.')[0] in ('numpy', 'zmq')"
        " or name.startswith(('quire.engine', 'quire.execute', 'quire.models'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
