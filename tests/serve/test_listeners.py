"""Listeners besides a TCP port: a Unix socket, the admin port, a path prefix behind a proxy."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.serve.running_server import RunningServer
from tests.serve.serve_command import serve_in_process
from tests.serve.unix_connection import at_socket


def test_a_unix_socket_serves_streams_and_admin_routes_have_a_port(
    tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "quire.sock"
    flags = ("--admin-port", "0", "--root-path", "/llm", "--access-log", "json", "--threads", "1")
    with RunningServer(tiny, *flags, at=("--uds", str(path))) as server:
        assert f"address  unix:{path}" in server.stdout()
        found = re.search(r"admin    http://127\.0\.0\.1:(\d+)", server.stdout())
        assert found is not None
        asked = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "stream": True}
        status, body = at_socket(path, "POST", "/llm/v1/completions", asked)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        assert at_socket(path, "POST", "/admin/pause")[0] == 403
        server.port = int(found[1])  # requests below go to the admin port
        assert server.request("POST", "/admin/pause")[0] == 200
        assert json.loads(at_socket(path, "GET", "/health")[1])["state"] == "paused"
        assert server.request("POST", "/admin/resume")[0] == 200
        assert server.request("POST", "/v1/completions", {"prompt": "a"})[0] == 404
        server.until(lambda: '"output_tokens": 4,' in server.stderr(), "a line of JSON")
        lines = [json.loads(line) for line in server.stderr().splitlines()]
        assert {"loading", "request"} <= {line["event"] for line in lines}
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert not path.exists()


def refused(*flags: str) -> str:
    """Return the error of `quire serve` for flags that are rejected before anything is loaded."""
    ended = serve_in_process(*flags)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_second_server_at_a_socket_is_rejected_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(str(path))
        first.listen()
        assert f"--uds {path} is in use" in refused("--uds", str(path))
    assert path.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--uds", "/no/socket", "--port", "0"), "--uds and --port are both given"),
        (("--uds", "/no/socket", "--host", "::1"), "--uds and --host are both given"),
        (("--admin-key-file", "/no/file"), "the admin key file /no/file cannot be read"),
        (("--cors-origin", "app.example"), "--cors-origin is 'app.example'"),
        (("--root-path", "llm/"), "--root-path is 'llm/'"),
    ],
)
def test_an_unusable_listen_address_is_one_line(flags: tuple[str, ...], words: str) -> None:
    assert words in refused(*flags)


def reload(server: RunningServer, said: str) -> None:
    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: said in server.stderr(), "the reload is reported")
    assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def test_a_reload_without_files_ends_no_server(tiny: Path) -> None:
    with RunningServer(tiny, "--threads", "1") as server:
        reload(server, "nothing to reload")


def test_a_reload_reads_changed_files(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("one")
    with RunningServer(tiny, "--threads", "1", "--admin-key-file", str(file)) as server:
        file.write_text("two")
        reload(server, "admin key file was reloaded")
