"""The container's promises that need a server: its health check, and a read-only root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.repository.test_deploy import healthcheck
from tests.serve.running_server import GIVE_UP_S, ROOT, RunningServer
from tests.serve.scripted_server import ScriptedServer
from tests.serve.test_tls import made_in

# Makes everything read-only but a temporary directory, in mounts of its own, as `--read-only
# --tmpfs /tmp` does for a container. The checkout may lie below /tmp or on a mount of its own.
_READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 99
mount -t tmpfs tmpfs "$3" && mount -o remount,bind,ro / || exit 99
export HOME=/nonexistent TMPDIR="$3"
cd / && ! touch "$1/probe" && exec "$2" -m quire serve --port 0 --threads 1
"""


def _code_of_healthcheck(port: int, **variables: str) -> int:
    command = healthcheck()
    assert command[0] == "python"
    done = subprocess.run(
        [sys.executable, *command[1:]],
        env={**os.environ, "QUIRE_PORT": str(port), **variables},
        capture_output=True,
        timeout=GIVE_UP_S,
    )
    return done.returncode


def test_the_health_check_is_that_of_the_server(server: RunningServer) -> None:
    assert _code_of_healthcheck(server.port) == 0
    assert server.post("/admin/pause", {})[0] == 200
    try:
        assert _code_of_healthcheck(server.port) == 1
    finally:
        assert server.post("/admin/resume", {})[0] == 200
    assert _code_of_healthcheck(1) != 0


def test_the_health_check_speaks_tls_where_the_server_does(tmp_path: Path) -> None:
    cert, key = made_in(tmp_path)
    with ScriptedServer("{{ messages }}", [["a", "b"]], tls_cert=cert, tls_key=key) as server:
        port = urlsplit(server.url).port
        assert port is not None
        assert _code_of_healthcheck(port, QUIRE_TLS_CERT=cert) == 0
        assert _code_of_healthcheck(port) != 0


@pytest.fixture
def read_only_server() -> Iterator[subprocess.Popen[str]]:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    writable = tempfile.mkdtemp()  # pytest's paths are too long for sockets
    process = subprocess.Popen(
        [unshare, "--mount", "sh", "-c", _READ_ONLY, "sh", ROOT, sys.executable, writable],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()
    os.rmdir(writable)


def test_a_server_needs_only_a_temporary_directory(
    read_only_server: subprocess.Popen[str],
) -> None:
    assert read_only_server.stdout is not None
    assert read_only_server.stderr is not None
    address = ""
    for line in read_only_server.stdout:
        if found := re.search(r"address  http://127\.0\.0\.1:(\d+)", line):
            address = found[1]
        if line.startswith("ready in"):
            break
    if not address:
        said = read_only_server.stderr.read()
        if "Operation not permitted" in said or read_only_server.wait(GIVE_UP_S) == 99:
            pytest.skip("this user may not mount")
        raise AssertionError(said)
    assert not (Path(ROOT) / "probe").exists()
    assert _code_of_healthcheck(int(address)) == 0
    read_only_server.terminate()
    assert read_only_server.wait(GIVE_UP_S) == 0
