"""Ranks in processes of their own that are connected by sockets over the loopback address, as they
would be on several machines: `connected_site` for an executor class, `main` for a rank's process.

Always holds: the processes end with the executor.
"""

from __future__ import annotations

import subprocess
import sys

from quire.base.child_process import command_of
from quire.base.errors import WorkerError
from quire.base.version import installed_version
from quire.comm.rendezvous import Listener, MeetingPoint, meet_as_rank_zero
from quire.comm.shared_memory import SharedMemoryRank
from quire.ranks.connected import ConnectedRanks, OwnMachine, run_connected
from quire.ranks.other_ranks import RankSite

_KEY = b"key of the tests"
_START_S, _END_S = 120.0, 10.0


def connected_site(num_ranks: int, *, checkpoint: str = "") -> RankSite:
    """Return a site that starts ranks 1 and up. checkpoint: that of their machines, if not ours."""
    return RankSite(
        launch=lambda group: LoopbackRanks.launch(group, num_ranks, checkpoint), here=num_ranks
    )


class LoopbackRanks(ConnectedRanks):
    """ConnectedRanks with their processes."""

    processes: list[subprocess.Popen[bytes]]

    @classmethod
    def launch(cls, group: SharedMemoryRank, num_ranks: int, checkpoint: str) -> LoopbackRanks:
        """Start the processes and wait for their connections."""
        listener = Listener("127.0.0.1", 0)
        point = _point(listener.port, num_ranks)
        processes = [
            subprocess.Popen(
                [*command_of(__name__), str(point.port), str(rank), str(num_ranks), checkpoint]
            )
            for rank in range(1, num_ranks)
        ]
        try:
            ranks = cls(group, meet_as_rank_zero(point, listener, lost=lambda: _ended(processes)))
        except WorkerError:
            for process in processes:
                process.kill()
                process.wait()
            raise
        ranks.processes = processes
        ranks.at_end = ranks.reap
        return ranks

    def reap(self) -> None:
        """Wait for the end of all processes, which needs no help."""
        for process in self.processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ended(processes: list[subprocess.Popen[bytes]]) -> str:
    codes = [process.poll() for process in processes]
    return f"processes of ranks have ended: {codes}" if any(codes) else ""


def _point(port: int, num_ranks: int) -> MeetingPoint:
    return MeetingPoint(
        host="127.0.0.1",
        port=port,
        world_size=num_ranks,
        key=_KEY,
        version=installed_version(),
        timeout_s=_START_S,
    )


def main() -> int:
    """Be a rank: PORT RANK RANKS CHECKPOINT."""
    port, rank, num_ranks, checkpoint = sys.argv[1:]
    try:
        run_connected(
            _point(int(port), int(num_ranks)), int(rank), OwnMachine(checkpoint=checkpoint or None)
        )
    except WorkerError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return 1
    return 0
