"""Defaults of the assembly: tokens per step if not configured."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from quire.base.clock import Clock
from quire.config.flags import engine_config
from quire.engine.assembly.assemble import assemble


@pytest.mark.parametrize(
    ("isa", "settings", "tokens"),
    [
        ("portable", {}, 128),
        ("portable", {"max_num_seqs": 100}, 200),
        ("portable", {"max_num_batched_tokens": 70}, 70),
    ],
)
def test_the_default_step_size_is_the_efficient_one(
    isa: str, settings: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ISA", isa)
    small = {"threads": 1, "kv_cache_memory": "16MiB"}
    engine = assemble(engine_config({**small, **settings}), clock=Clock(), report=_nothing)
    with closing(engine.core.runner):
        assert engine.step_tokens == tokens


def _nothing(what: str, **fields: Any) -> None:
    raise AssertionError(f"{what}: {fields}")
