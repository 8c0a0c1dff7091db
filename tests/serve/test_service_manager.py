"""Datagrams to systemd: READY once requests are accepted, WATCHDOG in between, STOPPING."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from quire.api.service_manager import READY, notify
from tests.serve import preloaded
from tests.serve.running_server import NO_PREFAULT


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_server_reports_ready_watchdog_and_stopping(tmp_path: Path, processes: str) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(120)
        words = ["serve", "--port", "0", *NO_PREFAULT, "--api-processes", processes]
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
        with open(os.devnull, "w") as lost:
            server = preloaded.start(words, lost, lost, environment)
        try:
            seen = []
            while READY not in seen or seen[-1] != "WATCHDOG=1":
                seen.append(manager.recv(100).decode())
            server.send_signal(signal.SIGTERM)
            while seen[-1] != "STOPPING=1":
                seen.append(manager.recv(100).decode())
            assert server.wait(60) == 0
            assert seen.count(READY) == 1
        finally:
            server.kill()
            server.wait()


def test_an_absent_service_manager_fails_nothing(tmp_path: Path) -> None:
    notify(READY, {})
    notify(READY, {"NOTIFY_SOCKET": str(tmp_path / "absent")})
