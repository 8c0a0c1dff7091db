"""A Mooncake master in a process of its own, and the reason where the library cannot be loaded.

Test modules that use it are skipped then (`make mooncake` installs it).
"""

from __future__ import annotations

import importlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.config.kv_store import StorePlace

MASTER = shutil.which("mooncake_master") or str(Path(sys.executable).parent / "mooncake_master")
START_S = 30.0


def skip_without_mooncake() -> None:
    """Skip the calling module where the library cannot be loaded."""
    try:
        importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        pytest.skip(f"Mooncake cannot be loaded: {error}", allow_module_level=True)


class Master:
    """A master at a free port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
            self.port, metrics = one.getsockname()[1], other.getsockname()[1]
        self._command = [MASTER, "--port", str(self.port), "--metrics_port", str(metrics)]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the master did not start")

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let it hang: connections are accepted, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a stop."""
        self._process.send_signal(signal.SIGCONT)

    @property
    def place(self) -> StorePlace:
        """Where it is."""
        return StorePlace(host="127.0.0.1", port=self.port)

    @property
    def url(self) -> str:
        """The value of --kv-store."""
        return f"mooncakestore://127.0.0.1:{self.port}"
