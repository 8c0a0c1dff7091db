"""Without Ray, or with another version of it, the error says what to install; a start that fails
keeps nothing reserved. tests/ray has the rest."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.base.clock import Clock
from quire.base.errors import CapacityError, QuireError, SettingError
from quire.comm.rendezvous import Listener
from quire.config.executor_config import ExecutorConfig
from quire.config.flags import engine_config
from quire.engine.assembly import ranks
from quire.engine.assembly.assemble import assemble
from quire.ranks import ray_cluster
from quire.ranks.ray_cluster import ray_site
from tests.cases import each_case

TWO = ExecutorConfig(pipeline_parallel_size=2, distributed_executor_backend="ray")


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r'pip install "quire-llm\[ray\]"'):
        ray_site(TWO, ExitStack())


def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(SettingError, match=r"127\.0\.0\.1:1 cannot be joined: .*refused"):
        ray_site(TWO, ExitStack())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Version mismatch: The cluster was started with:\n    Python: 3.12.1"),
        ConnectionError("Could not find any running Ray instance."),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def init(**_: object) -> None:
        raise error

    fake = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SettingError, match=r"the cluster at auto cannot be joined: ") as found:
        ray_site(TWO, ExitStack())
    assert str(error).splitlines()[-1].strip() in str(found.value)
    assert "one version of Python and Ray everywhere" in str(found.value)


class Cluster:
    """What the start of an engine asks of Ray; the first node is this one.

    It has room for one placement group at a time. num_reserved: groups that were asked for.
    removed: the numbers of those that were removed. starts_actors: whether it starts actors, which
    end at once.
    """

    def __init__(self, cpus: dict[str, int], *, has_room: bool = True) -> None:
        self._cpus, self._has_room = cpus, has_room
        self.bundles: list[tuple[int, str]] = []
        self.num_reserved = 0
        self.removed: list[int] = []
        self.starts_actors = False
        placing = SimpleNamespace(
            get_current_placement_group=lambda: None,
            placement_group=self._reserve,
            remove_placement_group=lambda group: self.removed.append(group.number),
            placement_group_table=lambda group: self._table(),
            get_node_ip_address=lambda: "127.0.0.1",
        )
        vars(self)["util"] = placing  # Ray's name

    def is_initialized(self) -> bool:
        return True

    def remote(self, **_: Any) -> Any:
        if not self.starts_actors:
            raise RuntimeError("Ray starts no actor")
        run = SimpleNamespace(remote=lambda *_: "a result")
        options = SimpleNamespace(remote=lambda: SimpleNamespace(run=run))
        return lambda actor: SimpleNamespace(options=lambda **_: options)

    def wait(self, results: list[str], num_returns: int) -> tuple[list[str], list[str]]:
        return results, []

    def get(self, result: str) -> str:
        return "it has no model"

    def kill(self, actor: Any) -> None:
        pass

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: next(iter(self._cpus)))

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "Alive": True, "Resources": {"CPU": count}}
            for node, count in self._cpus.items()
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": sum(self._cpus.values())}

    def _reserve(
        self, bundles: list[dict[str, int]], strategy: str, bundle_label_selector: list[Any]
    ) -> Any:
        assert strategy == "PACK"
        nodes = [selector.get("ray.io/node-id", "") for selector in bundle_label_selector]
        cpus = [bundle["CPU"] for bundle in bundles]
        self.bundles = list(zip(cpus, nodes, strict=True))
        self.num_reserved += 1
        return SimpleNamespace(number=self.num_reserved, wait=lambda timeout_s: self._is_free())

    def _is_free(self) -> bool:
        return self._has_room and len(set(self.removed)) == self.num_reserved - 1

    def _table(self) -> dict[str, dict[int, str]]:
        here = next(iter(self._cpus))
        return {"bundles_to_node_id": dict.fromkeys(range(len(self.bundles)), here)}


@each_case(
    ("cpus", "settings", "bundles"),
    [
        # One engine: rank 0 is here, the others where there is room, here first.
        ({"a": 4, "b": 4}, {}, [(4, "a"), (4, "")]),
        ({"a": 4}, {}, [(2, "a"), (2, "")]),
        ({"a": 9, "b": 4}, {"num_threads": 3}, [(3, "a"), (3, "")]),
        # Two engines have half of this node each.
        ({"a": 2, "b": 2}, {"data_parallel_size": 2}, [(1, "a"), (1, "!a")]),
        ({"a": 4, "b": 4}, {"data_parallel_size": 2}, [(2, "a"), (2, "!a")]),
        ({"a": 4}, {"data_parallel_size": 2}, [(1, "a"), (1, "")]),
        ({"a": 8, "b": 2}, {"data_parallel_size": 2}, [(1, "a"), (1, "")]),
        ({"a": 2, "b": 8, "c": 8}, {"data_parallel_size": 2}, [(1, "a"), (1, "!a")]),
        (
            {"a": 8, "b": 8},
            {"data_parallel_size": 2, "num_threads": 2, "tensor_parallel_size": 2},
            [(2, "a"), (2, ""), (2, "!a"), (2, "!a")],
        ),
    ],
)
def test_engines_leave_each_other_room_on_the_node_of_their_ranks_0(
    cpus: dict[str, int], settings: dict[str, Any], bundles: list[tuple[int, str]]
) -> None:
    cluster = Cluster(cpus)
    ray_cluster._Placement.reserve(cluster, replace(TWO, **settings))
    assert cluster.bundles == bundles


def test_a_cluster_without_room_for_all_engines_is_refused() -> None:
    cluster = Cluster({"a": 2, "b": 2}, has_room=False)
    several = replace(TWO, data_parallel_size=3)
    with pytest.raises(CapacityError, match="on this node, beside those of 2 other engines"):
        ray_cluster._Placement.reserve(cluster, several)
    assert cluster.removed == [1]


@pytest.mark.parametrize("fails", ["_is_free", "_table"])
def test_a_reservation_that_fails_is_given_back(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster({"a": 4})

    def fail(*_: Any) -> Any:
        raise ConnectionError("the cluster does not answer")

    monkeypatch.setattr(cluster, fails, fail)
    with pytest.raises(ConnectionError, match="does not answer"):
        ray_cluster._Placement.reserve(cluster, TWO)
    assert cluster.removed == [1]


RAY = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, "threads": 2}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return a cluster that a start in this process joins; this process may use two cores."""
    cluster = Cluster({"a": 4})
    monkeypatch.setitem(sys.modules, "ray", cluster)  # type: ignore[arg-type]
    strategies: Any = SimpleNamespace(PlacementGroupSchedulingStrategy=_nothing)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setattr(ranks, "num_usable_cores", lambda: 2)
    return cluster


@pytest.mark.parametrize(
    ("settings", "starts_actors", "reason"),
    [
        ({"tensor_parallel_size": 4, "threads": 4}, False, "may use 2 CPU cores"),
        ({"kv_cache_memory": "1KiB"}, False, "less than one block"),
        ({}, False, "Ray starts no actor"),  # after all checks, with a listener for the ranks
        ({}, True, "rank 1, an actor of Ray, has ended: it has no model"),
    ],
)
def test_a_start_that_fails_leaves_room_for_the_next_one(
    settings: dict[str, Any],
    starts_actors: bool,
    reason: str,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while its error is handled, which refers to all that the start had made."""
    listeners: list[Listener] = []

    def listener(host: str, port: int) -> Listener:
        listeners.append(Listener(host, port))
        return listeners[-1]

    monkeypatch.setattr(ray_cluster, "Listener", listener)
    cluster.starts_actors = starts_actors
    config = engine_config(RAY | settings)
    errors = []
    for number in (1, 2):
        with pytest.raises((QuireError, RuntimeError), match=reason) as found:
            assemble(config, clock=Clock(), report=_nothing)
        errors.append(found.value)
        assert cluster.removed == list(range(1, number + 1)), "each group is removed once"
    assert [one._socket.fileno() for one in listeners] == [-1] * (0 if settings else 2)


def test_a_caller_that_starts_no_engine_keeps_nothing_reserved(cluster: Cluster) -> None:
    assert ranks.ranked_class(replace(TWO, num_threads=2)).site is not None
    assert (cluster.num_reserved, cluster.removed) == (1, [1])


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
