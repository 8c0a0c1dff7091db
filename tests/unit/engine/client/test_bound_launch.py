"""An engine of several ranks starts on its share of the cores; its starter stays where it is."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.engine.client import bound_launch
from quire.engine.client.bound_launch import launch_bound
from quire.engine.data_parallel import engine_configs
from quire.engine.data_parallel.engine_configs import launch_engines


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return the processors that each engine would have inherited."""
    seen: list[set[int]] = []

    def launch(config: object, logging: object, *, is_spare: bool) -> Any:
        seen.append(os.sched_getaffinity(0))
        return SimpleNamespace(cpus=())

    monkeypatch.setattr(bound_launch, "EngineProcess", SimpleNamespace(launch=launch))
    return seen


def test_a_child_starts_bound_and_its_starter_is_not(seen: list[set[int]]) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    config = engine_config({})
    assert launch_bound(config, None, (one,)).cpus == (one,)
    assert launch_bound(config, None, ()).cpus == ()
    # Processors that there are not: binding is for speed only.
    assert launch_bound(config, None, (1 << 14,)).cpus == (1 << 14,)
    assert seen == [{one}, before, before]
    assert os.sched_getaffinity(0) == before


def test_only_engines_of_several_ranks_are_bound(
    seen: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_configs, "num_usable_cores", lambda: 4)
    first, *_ = shares = [(cpu,) for cpu in sorted(os.sched_getaffinity(0))] * 2
    monkeypatch.setattr(engine_configs, "cpus_of_ranks", lambda degree: shares[:degree])
    asked: dict[str, Any] = {"data_parallel_size": 2, "num_threads": 4}
    for more, bound in (({}, ()), ({"tensor_parallel_size": 2}, first)):
        engines = launch_engines(engine_config({**asked, **more}), None)
        assert engines[0][1].cpus == bound
    assert len(seen) == 4


def test_engines_end_where_another_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def launch(config: object, logging: object, cpus: object) -> Any:
        if num_launched := len(launched):
            raise SettingError(f"no engine after {num_launched}")
        launched.append(0)
        return SimpleNamespace(end=lambda timeout_s: ended.append(0))

    launched: list[int] = []
    monkeypatch.setattr(engine_configs, "launch_bound", launch)
    config = engine_config({"data_parallel_size": 2, "num_threads": 2})
    with pytest.raises(SettingError, match="no engine after 1"):
        launch_engines(config, None)
    assert ended == launched == [0]
