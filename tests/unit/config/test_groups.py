"""Checks of single settings: values just outside the limits are rejected with the name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from quire.config.server_config import ServerConfig
from tests.cases import each_case


@each_case(
    ("group", "name", "allowed", "refused"),
    [
        (ModelConfig, "max_model_len", (2, None), (1, 0, -1)),
        (ModelConfig, "dtype", ("auto", "f32", "bf16"), ("f16", "", None)),
        (ModelConfig, "served_model_name", (("a", "b"), ()), ("", ("a", ""), ("a", "a"))),
        (CacheConfig, "block_size", (4, 8, 16, 128), (0, 2, 12, 17, 144)),
        (CacheConfig, "kv_cache_memory_bytes", (1, None), (0, -5)),
        (SchedulerConfig, "max_num_seqs", (1, 512), (0, -1)),
        (SchedulerConfig, "max_num_batched_tokens", (64, None), (0, 63)),
        (SchedulerConfig, "plans_in_flight", (1, 2, None), (0, 3)),
        (SchedulerConfig, "max_queued_requests", (1,), (0,)),
        (SchedulerConfig, "queue_timeout_s", (0.001, None), (0, -1, float("nan"))),
        (SchedulerConfig, "tenants", ("t.toml", None), ("",)),
        (SchedulerConfig, "step_budget_ms", (0, 0.5), (-0.1, float("nan"))),
        (ExecutorConfig, "executor", ("native", "reference", "torch"), ("gpu", "")),
        (ExecutorConfig, "num_threads", (1, 1024, None), (0, 1025)),
        (ServerConfig, "port", (0, 65535), (-1, 65536)),
        (ServerConfig, "api_key", ((), ("k",)), (("",), ("k", "  "))),
        (ServerConfig, "max_output_tokens", (1, None), (0,)),
        (ServerConfig, "unknown_fields", ("refuse", "warn"), ("ignore",)),
        (ServerConfig, "grace_s", (0, 1.5), (-1, float("nan"))),
        (ServerConfig, "request_timeout_s", (0.001, None), (0,)),
        (ServerConfig, "max_body_bytes", (1024,), (1023,)),
        (ServerConfig, "watchdog_s", (0.001,), (0,)),
    ],
)
def test_each_setting_has_its_limits(
    group: type[Any], name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in allowed:
        assert getattr(group(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(SettingError, match=name if name != "api_key" else "API key"):
            group(**{name: value})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "cuda"}, "executor is native: only the torch executor supports it"),
        ({"numerics": "fast", "executor": "reference"}, "only the torch executor"),
        ({"enforce_eager": True}, "only the torch executor"),
        ({"executor": "torch", "device": "gpu"}, "auto, cpu, cuda and cuda:N"),
        ({"executor": "torch", "numerics": "quick"}, "exact, fast"),
    ],
)
def test_device_and_numerics_require_torch(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        ExecutorConfig(**settings)
    assert ExecutorConfig(executor="torch", device="cuda:3", numerics="fast").device == "cuda:3"


@pytest.mark.parametrize(("name", "kept"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_a_dtype_accepts_the_names_of_checkpoints(name: str, kept: str) -> None:
    assert ModelConfig(dtype=name).dtype == kept  # type: ignore[arg-type]
