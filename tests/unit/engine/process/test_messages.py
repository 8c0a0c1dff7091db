"""Messages: errors keep their class and text across processes; configs round-trip."""

from __future__ import annotations

import json

import pytest

from quire.base import errors
from quire.base.errors import (
    ContextTooLong,
    InvalidParameter,
    OverloadedError,
    QuireError,
    SettingError,
    WeightsError,
    WorkerError,
)
from quire.config.groups import CacheConfig, EngineConfig, ModelConfig
from quire.engine.client.launch import config_from_json, config_to_json
from quire.engine.process.messages import Fault, error_of, fault_of


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameter("top_k is x", param="top_k"),
        ContextTooLong("too long"),
        WeightsError("short file"),
        OverloadedError("busy", retry_after_s=2.0),
        WorkerError("gone"),
    ],
)
def test_an_error_arrives_with_its_class(error: QuireError) -> None:
    back = error_of(fault_of(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__dict__ == error.__dict__


def test_every_class_of_the_tree_is_serializable() -> None:
    tree = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, QuireError)
    ]
    assert len(tree) > 10
    for kind in tree:
        assert type(error_of(fault_of(kind("words")))) is kind


def test_an_error_outside_the_tree_becomes_a_worker_error() -> None:
    back = error_of(fault_of(KeyError("x")))
    assert type(back) is WorkerError
    assert str(back) == "KeyError: 'x'"
    assert type(error_of(Fault(kind="SystemExit", message="no"))) is WorkerError
    assert type(error_of(Fault(kind="annotations", message="no"))) is WorkerError


def test_a_config_round_trips_and_is_checked_again() -> None:
    config = EngineConfig(
        model=ModelConfig(model="a b/ü", max_model_len=64), cache=CacheConfig(block_size=32)
    )
    line = config_to_json(config)
    assert "\n" not in line
    assert config_from_json(line) == config
    broken = json.loads(line)
    broken["cache"]["block_size"] = 3
    with pytest.raises(SettingError):
        config_from_json(json.dumps(broken))
