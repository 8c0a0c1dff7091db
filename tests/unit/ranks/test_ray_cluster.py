"""Without Ray, or with another version of it, the error says what to install; tests/ray has the
rest."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from quire.base.errors import SettingError
from quire.config.executor_config import ExecutorConfig
from quire.ranks.ray_cluster import ray_site

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
