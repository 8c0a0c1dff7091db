"""A Ray cluster of several nodes on this machine; its processes end surely."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_OBJECT_STORE_BYTES = 80 << 20
_END_S = 20.0


class Nodes:
    """A head and more nodes, with equal numbers of CPUs."""

    def __init__(self, cpus: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": cpus,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
            },
        )
        self._further: list[Any] = []

    @property
    def environment(self) -> dict[str, str]:
        """Return what lets a process join."""
        return {"RAY_ADDRESS": self._cluster.address, "RAY_USAGE_STATS_ENABLED": "0"}

    @property
    def session(self) -> str:
        """A word in the command line of every process of the cluster."""
        return Path(self._cluster.head_node.get_session_dir_path()).name

    def add(self) -> None:
        """Start another node and wait until it is known."""
        self._further.append(
            self._cluster.add_node(num_cpus=self._cpus, object_store_memory=_OBJECT_STORE_BYTES)
        )
        self._cluster.wait_for_nodes()

    def kill_last(self) -> None:
        """End the raylet of the last node, and with it all that it runs."""
        self._cluster.remove_node(self._further.pop(), allow_graceful=False)

    def end(self) -> None:
        """End all processes, and wait until there are none."""
        session = self.session
        self._cluster.shutdown()
        deadline = time.monotonic() + _END_S
        while left := processes_of(session):
            for pid in left:
                if time.monotonic() > deadline - _END_S / 2:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"processes of Ray are left: {left}"
            time.sleep(0.1)


def processes_of(session: str) -> list[int]:
    """Return the processes with the name of a session in their command line, zombies excepted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if session.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@contextmanager
def nodes(number: int, cpus: int = 1) -> Iterator[Nodes]:
    """Run a cluster of so many nodes, with so many CPUs each."""
    made = Nodes(cpus)
    try:
        for _ in range(number - 1):
            made.add()
        yield made
    finally:
        made.end()
