"""A Ray cluster of two nodes on this machine, which leaves no process behind.

Ports, token and files are its own, so that other clusters of the machine are not touched. Ray reads
its variables when it is imported, so it is imported only once they are set.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.serve.running_server import GIVE_UP_S, ROOT

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
    """The second node has the resource `second`. port: of Serve's ingress."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._mark = secrets.token_hex(8)
        self.port = free_port()
        os.environ.update(self._variables(folder) | variables)
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=8, port=free_port(), object_store_memory=80 << 20)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        second = self._cluster.add_node(
            num_cpus=8, resources={"second": 8.0}, object_store_memory=80 << 20
        )
        self._cluster.wait_for_nodes()
        self.second_id = second.node_id

    def _variables(self, folder: Path) -> dict[str, str]:
        return {
            MARK: self._mark,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from ray import serve

        serve.shutdown()
        self.ray.shutdown()
        self._cluster.shutdown()

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
        return [pid for pid in found if pid != os.getpid()]
