"""Ranks as actors of a Ray cluster, in a placement group with a bundle for each rank.

Ray places, starts and watches processes; nothing else goes through it. The start, commands and rows
go through the connections of the ranks (connected.py), with a key that rank 0 makes for each start.
Rank 0 is the engine's own process; its bundle is on its node, so that Ray counts its processors.
Each engine of a server has a group of its own, and of its node an equal part.
The only file of the package that imports Ray, and only with --distributed-executor-backend ray.
Always holds: actors and placement group end with the engine, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.base import log as log_module
from quire.base.errors import CapacityError, QuireError, SettingError
from quire.base.log import Log
from quire.base.log_process import LogSettings, start_logging
from quire.base.version import installed_version
from quire.comm.rendezvous import Listener, MeetingPoint, meet_as_rank_zero
from quire.comm.shared_memory import SharedMemoryRank
from quire.config.executor_config import ExecutorConfig
from quire.ranks.connected import ConnectedRanks, OwnMachine, run_connected
from quire.ranks.other_ranks import RankSite

# The end of an actor is known a little later than that of its connection.
_EXPLAIN_S = 0.5
# Free processors are waited for so long; a cluster that lacks them says so soon.
_MAX_RESERVE_S = 30.0
_REACH_S = 5.0
_NODE = "ray.io/node-id"  # a label that Ray gives each node
_MAX_REASON = 600  # characters of what Ray says


def ray_site(settings: ExecutorConfig, undo: contextlib.ExitStack) -> RankSite:
    """Join the cluster, reserve the ranks' processors and return where the ranks run.

    undo: gives the processors back where a later part of the start fails: before `launch` there are
    no ranks that do. Raises SettingError where Ray lacks or differs, CapacityError where the
    cluster is too small.
    """
    ray = _joined()
    place = _Placement.reserve(ray, settings)
    undo.callback(place.release, ray)

    def launch(group: SharedMemoryRank) -> ConnectedRanks:
        return _start(ray, place, group, settings)

    return RankSite(launch=launch, here=place.ranks_here, threads=place.cpus)


def _joined() -> Any:
    """Import Ray, join its cluster and return the module."""
    try:
        import ray
    except ImportError as error:
        raise SettingError(
            f"distributed_executor_backend is ray, and Ray cannot be imported ({error}): install "
            'it on all nodes, pip install "quire-llm[ray]", or take mp or external_launcher'
        ) from error
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        _check_reachable(address)
        ray.init(address=address, configure_logging=False, namespace="quire")
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingError(
            f"distributed_executor_backend is ray, and the cluster at {address} cannot be joined: "
            f"{_first_lines(error)}; start one (ray start --head), set RAY_ADDRESS, and use one "
            "version of Python and Ray everywhere"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT, which Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


@dataclass(slots=True, kw_only=True)
class _Placement:
    """A placement group: bundle r is for rank r; each has `cpus` processors.

    ranks_here: how many of them are on this node. is_own: whether it is still reserved, and ends
    with the engine.
    """

    group: Any
    cpus: int
    ranks_here: int
    is_own: bool

    @classmethod
    def reserve(cls, ray: Any, settings: ExecutorConfig) -> _Placement:
        """Reserve processors for all ranks, or take the group this process runs in. Raises
        CapacityError, and keeps nothing reserved where it raises."""
        num_ranks, here = settings.num_ranks, ray.get_runtime_context().get_node_id()
        num_engines = settings.data_parallel_size
        current = ray.util.get_current_placement_group()
        if current is not None and current.bundle_count >= num_ranks:
            cpus = max(int(current.bundle_specs[-1].get("CPU", 1)), 1)
            nodes = _nodes_of(ray, current)[:num_ranks]
            return cls(group=current, cpus=cpus, ranks_here=nodes.count(here), is_own=False)
        cpus = settings.num_threads or _cpus_of_a_rank(ray, num_ranks, num_engines, here)
        # Engines of one server reserve at the same time, and each has a rank here.
        room = num_ranks
        if num_engines > 1:
            room = min(max(_cpus_by_node(ray).get(here, 0) // (num_engines * cpus), 1), num_ranks)
        group = ray.util.placement_group(
            [{"CPU": cpus}] * num_ranks,
            strategy="PACK",
            bundle_label_selector=[
                {_NODE: here},
                *[{}] * (room - 1),
                *[{_NODE: f"!{here}"}] * (num_ranks - room),
            ],
        )
        place = cls(group=group, cpus=cpus, ranks_here=0, is_own=True)
        try:
            if not group.wait(min(settings.distributed_timeout_s, _MAX_RESERVE_S)):
                raise _no_room(ray, settings, cpus)
            place.ranks_here = _nodes_of(ray, group).count(here)
        except BaseException:
            place.release(ray)
            raise
        return place

    def release(self, ray: Any) -> None:
        """Give the processors back, once: a start that fails after `launch` does it twice."""
        if self.is_own:
            self.is_own = False
            with _ray_may_be_gone():
                ray.util.remove_placement_group(self.group)


def _no_room(ray: Any, settings: ExecutorConfig, cpus: int) -> CapacityError:
    """Return the error of a cluster without `cpus` free processors for each rank."""
    free = ray.available_resources().get("CPU", 0)
    num_others = settings.data_parallel_size - 1
    beside = f", beside those of {num_others} other engines" * (num_others > 0)
    return CapacityError(
        f"{settings.ranks_text}: the Ray cluster has no {cpus} free CPUs for each of "
        f"{settings.num_ranks} ranks, of which rank 0 is on this node{beside}; {free:g} are free "
        "in all: add nodes, lower num_threads (of each rank), or end what uses them"
    )


def _cpus_of_a_rank(ray: Any, num_ranks: int, num_engines: int, here: str) -> int:
    """Return the processors of a rank where nodes have equal numbers of ranks, of all engines, and
    this node at least rank 0 of each."""
    cpus = _cpus_by_node(ray)
    if not cpus:
        raise CapacityError("the Ray cluster has no CPUs: start its nodes with --num-cpus")
    of_node = -(-num_ranks * num_engines // len(cpus))
    return max(min(min(cpus.values()) // of_node, cpus.get(here, 0) // num_engines), 1)


def _cpus_by_node(ray: Any) -> dict[str, int]:
    """Return the processors of each node that has some."""
    cpus = {
        node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]
    }
    return {node: int(count) for node, count in cpus.items() if count >= 1}


def _nodes_of(ray: Any, group: Any) -> list[str]:
    """Return the node of each bundle."""
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in sorted(nodes)]


class RankActor:
    """What Ray makes in a process of its own: one rank above 0."""

    def run(self, point: MeetingPoint, rank: int, log_level: str, log_form: str) -> str:
        """Be the rank to its end; return why it ended."""
        start_logging(
            f"rank {rank}",
            LogSettings(level=log_level, form="json" if log_form == "json" else "text"),
        )
        try:
            run_connected(point, rank, OwnMachine())
        except QuireError as error:
            return str(error)
        return "rank 0 has ended it"


@dataclass(slots=True)
class _Actors:
    """The actors of ranks 1 and up, and why the first of them has ended."""

    ray: Any
    place: _Placement
    ended: str = ""
    _actors: list[Any] = field(default_factory=list)
    _ranks: dict[Any, int] = field(default_factory=dict)
    _has_ended: threading.Event = field(default_factory=threading.Event)
    _is_ending: bool = False

    def start(self, point: MeetingPoint) -> None:
        """Start an actor for each rank, and watch them."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = self.ray.remote(num_cpus=self.place.cpus, max_restarts=0)(RankActor)
        for rank in range(1, point.world_size):
            strategy = PlacementGroupSchedulingStrategy(
                self.place.group, placement_group_bundle_index=rank
            )
            actor = actor_class.options(scheduling_strategy=strategy).remote()
            self._actors.append(actor)
            level, form = log_module.process_level, log_module.process_form
            self._ranks[actor.run.remote(point, rank, level, form)] = rank
        threading.Thread(target=self._wait, name="quire-ray-watch", daemon=True).start()

    def explain(self) -> str:
        """Return why a rank has ended, where Ray knows it soon."""
        self._has_ended.wait(_EXPLAIN_S)
        return self.ended

    def end(self) -> None:
        """End all actors and give their processors back."""
        self._is_ending = True
        for actor in self._actors:
            with _ray_may_be_gone():
                self.ray.kill(actor)
        self.place.release(self.ray)
        self._ranks.clear()

    def _wait(self) -> None:
        with _ray_may_be_gone():
            done, _ = self.ray.wait(list(self._ranks), num_returns=1)
            if not self._is_ending:
                self.ended = self._reason(done[0])
        self._has_ended.set()

    def _reason(self, result: Any) -> str:
        rank = self._ranks[result]
        try:
            ended = self.ray.get(result)
        except Exception as error:  # noqa: BLE001  every way in which Ray loses an actor
            return f"rank {rank}, an actor of Ray, is lost: {_first_lines(error)}"
        return f"rank {rank}, an actor of Ray, has ended: {ended}"


def _start(
    ray: Any, place: _Placement, group: SharedMemoryRank, settings: ExecutorConfig
) -> ConnectedRanks:
    """Start the actors and return the connections to them. Raises SettingError, WorkerError."""
    host = ray.util.get_node_ip_address()
    listener = Listener(host, 0)
    point = MeetingPoint(
        host=host,
        port=listener.port,
        world_size=settings.num_ranks,
        key=secrets.token_bytes(32),
        version=installed_version(),
        timeout_s=settings.distributed_timeout_s,
    )
    actors = _Actors(ray, place)
    try:
        actors.start(point)
        Log("engine").event("waiting for ranks", nodes=len(set(_nodes_of(ray, place.group))))
        connections = meet_as_rank_zero(point, listener, lost=lambda: actors.ended)
    except BaseException:
        listener.close()  # also where the wait for ranks, which closes it, has not begun
        actors.end()
        raise
    return ConnectedRanks(group, connections, explain=actors.explain, at_end=actors.end)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:_MAX_REASON]


@contextlib.contextmanager
def _ray_may_be_gone() -> Iterator[None]:
    """Ignore errors of a cluster that is gone; so are its actors."""
    with contextlib.suppress(Exception):
        yield
