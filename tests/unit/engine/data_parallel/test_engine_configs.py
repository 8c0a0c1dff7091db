"""The configurations of the engines of one server: threads and GPUs divided, also over ranks."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.engine.assembly import ranks
from quire.engine.data_parallel.engine_configs import engine_configs


def configs(**settings: Any) -> list[Any]:
    """Return the executor settings of two engines."""
    made = engine_configs(engine_config({"data_parallel_size": 2, **settings}))
    return [one.executor for one in made]


def test_threads_are_divided_over_engines_and_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = configs(num_threads=5, tensor_parallel_size=2)
    assert [one.num_threads for one in found] == [3, 2]
    monkeypatch.setattr(ranks, "num_usable_cores", lambda: 4)
    made = [ranks.ranked_class(one) for one in found]
    assert [one.num_ranks for one in made] == [2, 2]
    assert not any(one.binds for one in made), "they would share their cores"
    with pytest.raises(SettingError, match=r"3 compute threads .* engines and their ranks: lower"):
        configs(num_threads=3, pipeline_parallel_size=2)
    monkeypatch.setattr(ranks, "num_usable_cores", lambda: 3)
    with pytest.raises(SettingError, match=r"is 2, in each of 2 engines .* may use 3 CPU cores"):
        ranks.ranked_class(found[0])


def test_each_engine_has_a_gpu_for_each_rank() -> None:
    shared = {"executor": "torch", "device": "cuda"}
    assert [one.device for one in configs(**shared)] == ["cuda:0", "cuda:1"]
    divided = configs(**shared, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [one.device for one in divided] == ["cuda:0", "cuda:4"]
