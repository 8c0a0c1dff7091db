"""The loopback restriction works, and importing a client attempts no connection."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from tests.clients.offline import VARIABLES, Wall, is_loopback
from tests.serve.running_server import ROOT

CLIENTS = ["openai", "langchain_openai", "instructor", "litellm", "lm_eval", "lm_eval.tasks"]


@pytest.mark.parametrize("name", CLIENTS)
def test_importing_a_client_attempts_no_connection(name: str) -> None:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed here; `make clients` has it")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.clients.offline", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **VARIABLES},
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_only_loopback_connections_are_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, Wall() as wall:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            socket.create_connection((host, port)).close()
        for host in ("192.0.2.1", "example.org", "2001:db8::1"):
            with pytest.raises(OSError, match="only loopback"):
                socket.create_connection((host, port))
        with socket.socket() as one, pytest.raises(OSError, match="only loopback"):
            one.connect_ex(("192.0.2.1", port))
    assert wall.refused == ["192.0.2.1", "example.org", "2001:db8::1", "192.0.2.1"]


def test_loopback_is_recognized_by_name_and_number() -> None:
    assert all(map(is_loopback, (None, "", "localhost", b"localhost", "127.3.2.1", "::1")))
    assert not any(map(is_loopback, ("example.org", "10.0.0.1", "0.0.0.0", "::", 3)))
