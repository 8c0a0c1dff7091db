"""Ranks that torchrun, Slurm or a script has started, each with the command line of rank 0: how
rank 0 meets them, and what a rank above 0 does.

Knows the environment they share (quire/config/launch_environment.py). Always holds: without a key
ranks meet on one machine only.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.version import installed_version
from quire.comm.rendezvous import Listener, MeetingPoint, meet_as_rank_zero
from quire.comm.shared_memory import SharedMemoryRank
from quire.config.executor_config import ExecutorConfig
from quire.config.key_file import how_to_make_key, read_shared_key
from quire.config.launch_environment import LaunchEnvironment, read_launch_environment
from quire.config.machine import num_compute_threads
from quire.ranks.connected import ConnectedRanks, OwnMachine, run_connected
from quire.ranks.other_ranks import RankSite
from quire.ranks.placement import cpus_of_ranks

# The key of ranks that meet at a loopback address without one.
_NO_KEY = b"ranks of one machine"


def launched_site(settings: ExecutorConfig, environment: Mapping[str, str]) -> RankSite:
    """Return where the ranks run, at rank 0. Raises SettingError at another rank."""
    own, point = _meeting(settings, environment)
    if own.rank != 0:
        raise SettingError(
            f"distributed_executor_backend is external_launcher and RANK is {own.rank}: ranks "
            "above 0 are run by quire serve only; rank 0 may be any command"
        )

    def launch(group: SharedMemoryRank) -> ConnectedRanks:
        listener = Listener(point.host, point.port)
        Log("engine").event(
            "waiting for ranks", address=f"{point.host}:{point.port}", ranks=point.world_size - 1
        )
        return ConnectedRanks(group, meet_as_rank_zero(point, listener))

    return RankSite(launch=launch, here=own.local_world_size, local=own.local_rank)


def run_launched(
    settings: ExecutorConfig, environment: Mapping[str, str], *, checkpoint: str
) -> None:
    """Be a rank above 0 until rank 0 ends it. checkpoint: the model's files on this machine.

    Signals for a clean end are ignored once the rank is ready: a launcher sends them to all ranks,
    and rank 0 ends the others when it has drained. Raises WorkerError, DeviceLost.
    """
    own, point = _meeting(settings, environment)
    threads = num_compute_threads(settings.num_threads)
    machine = OwnMachine(
        checkpoint=checkpoint,
        num_threads=max(threads // own.local_world_size, 1),
        pack_cache=settings.pack_cache,
        cpus=cpus_of_ranks(own.local_world_size)[own.local_rank],
        local_rank=own.local_rank,
        local_ranks=own.local_world_size,
    )
    run_connected(point, own.rank, machine, on_loaded=_ignore_signals)


def _meeting(
    settings: ExecutorConfig, environment: Mapping[str, str]
) -> tuple[LaunchEnvironment, MeetingPoint]:
    own = read_launch_environment(environment)
    if own.world_size != settings.num_ranks:
        raise SettingError(
            f"the environment variable WORLD_SIZE is {own.world_size} and {settings.ranks_text}, "
            f"which are {settings.num_ranks} ranks: start that many, or change the degrees"
        )
    if settings.distributed_key_file is not None:
        key = read_shared_key(settings.distributed_key_file, "distributed_key_file")
    elif own.is_loopback:
        key = _NO_KEY
    else:
        raise SettingError(
            f"MASTER_ADDR is {own.host}, which other machines reach, and distributed_key_file is "
            "not given: give all ranks a file with the same key, so that no other process can "
            f"take a rank's place; {how_to_make_key('ranks.key')}"
        )
    point = MeetingPoint(
        host=own.host,
        port=own.port,
        world_size=own.world_size,
        key=key,
        version=installed_version(),
        timeout_s=settings.distributed_timeout_s,
    )
    return own, point


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
