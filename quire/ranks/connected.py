"""Ranks that are connected by sockets, on one machine or on several: ConnectedRanks at rank 0, and
run_connected, what a rank above 0 does.

Each rank has a segment of its own, and what it publishes is written to those of the others
(native/src/rank_sockets.cc). The start goes through the same connections: rank 0 sends each rank
what it computes, and each answers once its weights are loaded. Knows no launcher. Always holds: a
rank ends within seconds of rank 0, whatever it computes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quire.base.errors import DeviceLost, SettingError, WorkerError
from quire.base.log import Log
from quire.comm.rendezvous import MeetingPoint, RankConnections, meet_rank_zero
from quire.comm.shared_memory import SharedMemoryRank, create_segment
from quire.ranks.other_ranks import GROUP_LOST, names_reason
from quire.ranks.placement import run_on
from quire.ranks.rank_loop import do_commands, group_of, load, load_server, own_finding, pool_server
from quire.ranks.start import (
    RankReady,
    RankStart,
    failure_text,
    link_bytes_of,
    read_start,
    ready_of,
    sizes_of,
    start_line,
)

# How long a rank that has lost the group may take to end by itself.
_END_S = 1.5
# How long the reason of a loss that an exchange has found is waited for.
_REASON_S = 0.3


@dataclass(slots=True)
class ConnectedRanks:
    """OtherRanks over connections that are open (see other_ranks.py).

    explain: what the launcher knows of a lost rank, or an empty text. at_end: called once.
    """

    group: SharedMemoryRank
    connections: RankConnections
    explain: Callable[[], str] = str
    at_end: Callable[[], None] = lambda: None
    on_lost: Callable[[], None] = lambda: None
    _hosts: dict[int, str] = field(default_factory=dict)
    _watcher: threading.Thread | None = None
    _lost: str = ""
    _has_ended: bool = False

    def start(self, start: RankStart, segment: int) -> None:
        """See OtherRanks; a rank has its own segment."""
        connection = self.connections.sockets[start.rank]
        self._hosts[start.rank] = connection.host
        try:
            connection.send(start_line(start))
        except OSError as error:
            raise WorkerError(self._gone(start.rank, error)) from error

    def ready(self) -> list[tuple[int, RankReady]]:
        """See OtherRanks."""
        found = []
        for rank, connection in sorted(self.connections.sockets.items()):
            try:
                answer = connection.receive_fields()
            except OSError as error:
                raise WorkerError(self._gone(rank, error)) from error
            if "ready" not in answer:
                raise WorkerError(
                    f"rank {rank} ({connection.host}) cannot start: {answer.get('failure', '')}"
                )
            found.append((rank, RankReady(**answer["ready"])))
        self.group.native.connect(self.connections.descriptors())
        self._watcher = threading.Thread(target=self._watch, name="quire-rank-watch", daemon=True)
        self._watcher.start()
        return found

    def notify(self, on_lost: Callable[[], None]) -> None:
        """See OtherRanks."""
        self.on_lost = on_lost

    def reason(self, found: str) -> str:
        """See OtherRanks."""
        if self._watcher is not None:
            self._watcher.join(_REASON_S)
        reasons = [one for one in (self.explain(), self._lost, found) if one]
        clear = next(filter(names_reason, reasons), None)
        return clear or f"{reasons[0]}: its own log has the reason"

    @property
    def lost(self) -> str:
        """See OtherRanks."""
        return self._lost

    def end(self) -> None:
        """See OtherRanks."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._watcher is not None:
            self.group.native.leave()
            self._watcher.join()
        self.connections.close()
        self.at_end()

    def _watch(self) -> None:
        if why := self.group.native.wait_until_over():
            self._lost = why
            self.on_lost()

    def _gone(self, rank: int, error: OSError) -> str:
        known = self.explain()
        return known or (
            f"rank {rank} ({self._hosts[rank]}) ended while it loaded ({error}); look at its log, "
            "and at that of its system for a process ended for its memory"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMachine:
    """What a rank above 0 has of its own machine instead of what rank 0 says; None: as rank 0.

    cpus: the processors it may run on; empty: any. local_rank: its number among the ranks of its
    machine, by which it has one of its GPUs. local_ranks: how many there are.
    """

    checkpoint: str | None = None
    num_threads: int | None = None
    pack_cache: str | None = None
    cpus: tuple[int, ...] = ()
    local_rank: int | None = None
    local_ranks: int = 1

    def start_of(self, start: RankStart) -> RankStart:
        """Return the rank's start on this machine. Raises SettingError for GPUs that exchange by
        NCCL with those of another."""
        torch = start.torch
        if self.local_rank is not None and torch is not None:
            if torch["transport"] == "nccl":
                self._check_group(start, self.local_rank)
            torch = with_local_device(torch, self.local_rank - start.rank)
        return replace(
            start,
            checkpoint=start.checkpoint if self.checkpoint is None else self.checkpoint,
            num_threads=start.num_threads if self.num_threads is None else self.num_threads,
            pack_cache=start.pack_cache if self.checkpoint is None else self.pack_cache,
            cpus=self.cpus,
            torch=torch,
        )

    def _check_group(self, start: RankStart, local_rank: int) -> None:
        """Raise SettingError where ranks that gather together are not all on this machine."""
        size = start.degree // start.stages
        first = local_rank - start.rank % size
        if first < 0 or first + size > self.local_ranks:
            raise SettingError(
                f"rank {start.rank} is number {local_rank} of {self.local_ranks} ranks of its "
                f"machine, so that the {size} ranks which gather with it are on several, unlike "
                "those of rank 0: start as many ranks on each machine and number them machine by "
                "machine (srun --ntasks-per-node N --distribution block, mpirun --map-by slot)"
            )


def with_local_device(torch: Mapping[str, Any], shift: int) -> dict[str, Any]:
    """Return how a rank's executor is made, with the GPU that is `shift` places after that of a
    machine which has all ranks."""
    kind, _, number = torch["device"].partition(":")
    device = f"{kind}:{int(number) + shift}" if number else kind
    return {**torch, "device": device}


def run_connected(
    point: MeetingPoint, rank: int, own: OwnMachine, *, on_loaded: Callable[[], None] = lambda: None
) -> None:
    """Be rank `rank`, above 0, until rank 0 ends it.

    on_loaded: called once the rank is ready. Raises WorkerError where it cannot start, DeviceLost
    where the group is lost.
    """
    log = Log(f"rank {rank}")
    connections = meet_rank_zero(point, rank)
    log.event("connected with all ranks", ranks=point.world_size)
    zero = connections.sockets[0]
    try:
        with _rank_zero():
            line = zero.receive()
        start = own.start_of(read_start(line))
        run_on(start.cpus)
        group = _own_group(start)
        executor, next_command = load(start, group)
        asked = pool_server(start, group, executor), load_server(executor)
        servers = [one for one in asked if one is not None]
        ready = ready_of(executor.recipe, executor.weights_digest)
        with _rank_zero():
            zero.send_fields({"ready": asdict(ready)})
        group.native.connect(connections.descriptors())
    except Exception as error:
        with contextlib.suppress(OSError):
            zero.send_fields({"failure": failure_text(error)})
        raise
    finally:
        connections.close()  # of what is not handed over
    done = threading.Event()
    watcher = threading.Thread(
        target=_leave_with_the_group, args=(group, done), name="quire-rank-watch", daemon=True
    )
    watcher.start()
    for server in servers:
        server.start()
    on_loaded()
    log.event("ready")
    try:
        do_commands(executor, next_command)
    except BaseException as error:
        # The others must not take this end for one by agreement.
        group.abort(own_finding(error, group))
        raise
    finally:
        done.set()
        group.native.leave()
        # A thread in the compiled module must not meet the interpreter's end.
        watcher.join()
        for server in servers:
            server.join()


def _own_group(start: RankStart) -> SharedMemoryRank:
    segment = create_segment(start.degree, sizes_of(start), link_bytes=link_bytes_of(start))
    try:
        return group_of(start, segment)
    finally:
        os.close(segment)


def _leave_with_the_group(group: SharedMemoryRank, done: threading.Event) -> None:
    """End the process where it does not end by itself: it may compute for long, or be stuck."""
    if group.native.wait_until_over() and not done.wait(_END_S):
        os._exit(GROUP_LOST)


@contextlib.contextmanager
def _rank_zero() -> Iterator[None]:
    """Turn the end of the connection into DeviceLost."""
    try:
        yield
    except OSError as error:
        raise DeviceLost(
            f"rank 0 ended while this rank started ({error}); its log says why"
        ) from error
