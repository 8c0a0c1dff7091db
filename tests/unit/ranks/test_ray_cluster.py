"""Without Ray, or with another version of it, the error says what to install; tests/ray has the
rest."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.base.errors import CapacityError, SettingError
from quire.config.executor_config import ExecutorConfig
from quire.ranks import ray_cluster
from quire.ranks.ray_cluster import ray_site
from tests.cases import each_case

TWO = ExecutorConfig(pipeline_parallel_size=2, distributed_executor_backend="ray")


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r'pip install "quire-llm\[ray\]"'):
        ray_site(TWO)


def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(SettingError, match=r"127\.0\.0\.1:1 cannot be joined: .*refused"):
        ray_site(TWO)


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
        ray_site(TWO)
    assert str(error).splitlines()[-1].strip() in str(found.value)
    assert "one version of Python and Ray everywhere" in str(found.value)


class Cluster:
    """What a reservation asks of Ray; the first node is this one."""

    def __init__(self, cpus: dict[str, int], *, has_room: bool = True) -> None:
        self._cpus, self._has_room = cpus, has_room
        self.bundles: list[tuple[int, str]] = []
        placing = SimpleNamespace(
            get_current_placement_group=lambda: None,
            placement_group=self._reserve,
            remove_placement_group=lambda group: None,
            placement_group_table=lambda group: {"bundles_to_node_id": {}},
        )
        vars(self)["util"] = placing  # Ray's name

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
        return SimpleNamespace(wait=lambda timeout_s: self._has_room)


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
