"""A Ray cluster of two nodes on this machine, which leaves no process behind.

Ports and token are its own, so that other clusters of the machine are not touched. Ray reads
its variables when it is imported, so it is imported only once they are set.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.serve.running_server import GIVE_UP_S, ROOT, alive

MARK = "QUIRE_TEST_CLUSTER"
# Workers of Ray start slowly on a loaded machine.
LONG_S = 3 * GIVE_UP_S


def free_port() -> int:
    """Return a port that nothing uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a true value and return it; fails with `what` after a long time."""
    start_s = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - start_s < LONG_S, f"never happened: {what}"
        time.sleep(0.1)
    return found


class TwoNodes:
    """Each node has room for two engines. port: of Serve's ingress. left: the command lines of
    processes that were still there after the end."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self.port = free_port()
        self.left: list[bytes] = []
        os.environ.update(self._variables())
        try:
            self._start()
        except BaseException:
            self._end_processes()
            raise

    def _start(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        self._cluster = Cluster()
        shared = {"num_cpus": 8, "object_store_memory": 80 << 20, "resources": {"engine": 2.0}}
        self._cluster.add_node(**shared, gcs_server_port=free_port(), include_dashboard=False)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        self._second = self._cluster.add_node(**shared)
        self._cluster.wait_for_nodes()

    def _variables(self) -> dict[str, str]:
        return {
            MARK: self._mark,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Of this cluster alone.
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            # No load balancer has to take notice.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }

    def drain_second(self, seconds: int) -> None:
        """Announce the end of the second node, as a watcher of spot notices would."""
        command = [str(Path(sys.executable).with_name("ray")), "drain-node"]
        command += ["--address", self._cluster.address, "--node-id", self._second.node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        command += ["--deadline-remaining-seconds", str(seconds)]
        subprocess.run(command, check=True, capture_output=True, timeout=LONG_S)

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *_: object) -> None:
        from ray import serve

        try:
            serve.shutdown()
            self.ray.shutdown()
            self._cluster.shutdown()
            self.left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.processes()]
        finally:
            self._end_processes()

    def _end_processes(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def listener(self, port: int) -> int:
        """Return the process of this cluster that listens at a port."""
        inodes = {
            fields[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if (fields := line.split())[3] == "0A" and int(fields[1].split(":")[1], 16) == port
        }
        for pid in self.processes():
            for one in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(one).strip("socket:[]") in inodes:
                        return pid
        raise AssertionError(f"nothing listens at port {port}")

    def processes(self) -> list[int]:
        """Return the processes that were started for this cluster."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is not ours
                continue
        return [pid for pid in found if pid != os.getpid() and alive(pid)]
