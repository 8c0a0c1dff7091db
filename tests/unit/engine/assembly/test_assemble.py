"""The assembly: tokens per step if not configured, and what a start that fails leaves."""

from __future__ import annotations

import gc
import json
import os
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from quire.base.clock import Clock
from quire.base.errors import CapacityError
from quire.config.flags import engine_config
from quire.engine.assembly import assemble as assembling
from quire.engine.assembly.assemble import assemble

SMALL = {"threads": 1, "kv_cache_memory": "16MiB"}


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
    engine = assemble(engine_config({**SMALL, **settings}), clock=Clock(), report=_nothing)
    with closing(engine.core.runner):
        assert engine.step_tokens == tokens


@pytest.mark.parametrize("fails", ["warm_up", "model_card"])
@pytest.mark.parametrize(
    "parts", ["alone", "tier", "exchange", "store", "exchange and tier", "events"]
)
def test_a_start_that_fails_late_leaves_nothing(
    parts: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts engines itself may go on, with other settings."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("a key of 24 bytes, or so")
    settings: dict[str, Any] = {}
    if "tier" in parts:
        settings |= {"kv_tier_path": str(tmp_path / "tier"), "kv_tier_size": "4MiB"}
    if "exchange" in parts:
        settings |= {"kv_transfer_key_file": str(key), "kv_transfer_size": "4MiB"}
    if parts == "store":
        settings |= {"kv_store": str(tmp_path / "store"), "kv_store_buffer_size": "4MiB"}

    if parts == "events":  # a second publisher cannot have the same address
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events["endpoint"] = f"ipc://{tmp_path}/events"
        settings |= {"kv_events_config": json.dumps(events)}

    def fail(*_: Any, **__: Any) -> None:
        raise CapacityError("no memory for a first step")

    monkeypatch.setattr(assembling, fails, fail)
    held = []
    for _ in range(2):  # the first one may open what the process keeps
        with pytest.raises(CapacityError, match="first step"):
            assemble(engine_config(SMALL | settings), clock=Clock(), report=_nothing)
        held.append(_held())
    assert held[0] == held[1]
    assert not [name for name in held[1] if "quire-kv" in name or "quire-tier" in name]


def _held() -> list[str]:
    """Return the files that this process has open, and the names of its threads."""
    gc.collect()
    found = [thread.name for thread in threading.enumerate()]
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{number}").split(":[")[0])
    return sorted(found)


def _nothing(what: str, **fields: Any) -> None:
    raise AssertionError(f"{what}: {fields}")
