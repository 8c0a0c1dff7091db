"""`quire route`: wrong arguments are errors that say what is allowed; nothing is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.cli import lease, route
from quire.cli.main import command_parser
from quire.router.discovery import parsed, replica_url
from quire.router.route_file import RouteFile, parse_route_file, read_route_file
from quire.router.settings import RouterSettings
from tests.cases import each_case


def _run(*words: str) -> int:
    return route.run(command_parser(["route"]).parse_args(["route", *words]))


@each_case(
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
        (["http://a:1", "--movable", "http://a:1"], "give it once"),
        (["http://a:1", "--prefill", "http://b:1", "--movable", "b:1"], "give it once"),
        (["http://a:1", "--movable", "ftp://b:1"], "http://"),
        (["http://a:1", "--movable", "b:1", "--role-seconds", "0"], "role_hold_s"),
        (["http://a:1", "--min-prefill-tokens", "9"], r"is 9 .*add --prefill URL.*leave it out"),
        (["http://a:1", "--role-seconds", "9"], "is 9 .*add --movable URL, or leave it out"),
        (
            ["http://a:1", "--prefill", "http://b:1", "--role-seconds", "9"],
            "add --movable URL, or leave it out",
        ),
        (
            ["http://a:1", "--policy", "round-robin", "--backlog-tokens", "9"],
            "--backlog-tokens is 9 and --policy is 'round-robin'.*choose warm-cache",
        ),
        (["http://a:1", "--cors-origin", "app.example"], "cors_origin is 'app.example'"),
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
        assert url.full == kept


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("\n")
    with pytest.raises(SettingError, match="is empty"):
        _run("http://a:1", "--replica-key-file", str(path))


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", [], "give the addresses"),
        ("polcy = 'x'", ["http://a:1"], "did you mean policy"),
        ("policy = 'best'", ["http://a:1"], "--policy"),
        ("replicas = ['ftp://a']", [], "http://"),
        ("replicas = ['http://a:1']\nreplicas-file = 'x'", [], "not both"),
        ("replicas = ['http://a:1']\n[kubernetes]\nservice = 'q'", [], "in several ways"),
        ("[kubernetes]\nservice = 'q'", [], "run the router in the cluster"),
        ("replicas = ['http://a:1']\nhost = '0.0.0.0'", [], "--insecure"),
        ("[redis]\nurl = 'http://a'\nleases = true", [], "redis"),
        ("replica-key-file = '/nowhere/key'", ["http://a:1"], "replica-key-file"),
        ("policy = 'least-tokens'\nbacklog-tokens = 9", ["http://a:1"], "choose warm-cache"),
        ("backlog-tokens = 9", ["http://a:1", "--policy", "round-robin"], "choose warm-cache"),
        ("cors-origin = ['https://a', 'x']", ["http://a:1"], "cors_origin is 'x'"),
    ],
)
def test_wrong_files_say_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], message: str
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    path = tmp_path / "route.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=message):
        _run("--config", str(path), *words)


def test_flags_count_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text("policy = 'round-robin'\nprobe-seconds = 2\nmax-open-requests = 7\n")
    words = ["route", "--config", str(path), "--policy", "least-tokens"]
    arguments = command_parser(["route"]).parse_args(words)
    settings = route._settings(arguments, read_route_file(str(path)))
    assert settings.policy == "least-tokens"
    assert (settings.probe_s, settings.max_open) == (2.0, 7)
    assert settings.stall_s == RouterSettings().stall_s


def test_settings_that_need_others_are_taken_with_them() -> None:
    words = ["route", "http://a:1", "--prefill", "b:1", "--min-prefill-tokens", "0"]
    words += ["--movable", "c:1", "--role-seconds", "7"]
    words += ["--backlog-tokens", "9", "--cors-origin", "https://a", "--cors-origin", "*"]
    arguments = command_parser(["route"]).parse_args(words)
    route._check_prefill(arguments)
    settings = route._settings(arguments, RouteFile())
    assert (settings.min_prefill_tokens, settings.role_hold_s) == (0, 7.0)
    assert (settings.backlog_tokens, settings.cors_origin) == (9, ("https://a", "*"))
    settings = route._settings(command_parser(["route"]).parse_args(words[:2]), RouteFile())
    assert settings == RouterSettings()
    file = parse_route_file("cors-origin = ['https://b']")
    assert route._settings(command_parser(["route"]).parse_args(words[:2]), file).cors_origin == (
        "https://b",
    )


def test_several_routers_may_share_a_port() -> None:
    first = route._listen("127.0.0.1", 0, reuses_port=True)
    port = first.getsockname()[1]
    with pytest.raises(SettingError, match="cannot listen"):
        route._listen("127.0.0.1", port, reuses_port=False)
    second = route._listen("127.0.0.1", port, reuses_port=True)
    assert second.getsockname() == first.getsockname()
    first.close()
    second.close()


def test_a_lease_needs_an_address_and_a_redis() -> None:
    for words, message in (
        (["ftp://a", "--redis", "redis://a"], "http://"),
        (["http://a:1", "--redis", "a"], r"\[redis\] url"),
    ):
        with pytest.raises(SettingError, match=message):
            lease.run(command_parser(["lease"]).parse_args(["lease", *words]))


def test_the_router_imports_no_engine_and_no_numpy() -> None:
    code = (
        "import sys, quire.cli.route, quire.router.server; "
        "print([name for name in sys.modules if name.split('.')[0] in ('numpy', 'zmq')"
        " or name.startswith(('redis', 'quire.router.redis', 'quire.router.kubernetes',"
        " 'quire.engine', 'quire.execute', 'quire.models'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
