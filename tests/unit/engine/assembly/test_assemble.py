"""The assembly: tokens per step if not configured, and what a start that fails leaves."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.clock import Clock
from quire.base.errors import CapacityError
from quire.config.flags import engine_config
from quire.engine.assembly import assemble as assembling
from quire.engine.assembly import exchange, kv_store, tier
from quire.engine.assembly.assemble import assemble
from quire.engine.assembly.sized_model import sized_model
from quire.kv_store.directory import DirectoryStore
from quire.runner.model_runner import ModelRunner
from quire.transfer.disk import DiskStore
from quire.transfer.links import nixl
from quire.transfer.links.nixl import NixlAgent
from quire.weights.checkpoint import open_checkpoint
from tests.safetensors_writer import write_safetensors
from tests.tiny_models import write_tiny_llama
from tests.unit.transfer.links import fake_nixl

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


def test_weights_that_nothing_uses_are_named(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m")
    settings = {**SMALL, "model": str(model), "max_model_len": 64}
    assert not [line for line in sized_model(engine_config(settings)).notes if "ignored" in line]
    held = {name: open_checkpoint(model).read_f32(name) for name in open_checkpoint(model).names}
    held |= {f"mtp.{name}.weight": np.ones(4, np.float32) for name in ("fc", "norm")}
    write_safetensors(model / "model.safetensors", held)
    [line] = [one for one in sized_model(engine_config(settings)).notes if "ignored" in one]
    assert line.startswith("ignored: 2 weights of layers that predict further tokens (MTP), such")
    assert "mtp.fc.weight; no answer depends on them" in line


@pytest.mark.parametrize("fails", ["warm_up", "model_card"])
@pytest.mark.parametrize(
    "parts",
    ["alone", "tier", "exchange", "store", "exchange and tier", "store and tier", "events"],
)
def test_a_start_that_fails_late_leaves_nothing(
    parts: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts engines itself may go on, with other settings."""
    monkeypatch.setattr(assembling, fails, _fail)
    _fails_and_leaves_nothing(_settings(parts, tmp_path))


@pytest.mark.parametrize(
    ("parts", "module", "fails"),
    [
        ("tier", tier, "TierMover"),
        ("exchange", exchange, "TierMover"),
        ("exchange and tier", tier, "TierMover"),
        ("store", kv_store, "TierMover"),
        ("store and tier", kv_store, "DiskLevel"),
        ("store and tier", kv_store, "TierMover"),
        ("exchange and store", exchange, "TierMover"),
        ("exchange and store", exchange, "BlockClient"),
        ("exchange and store", kv_store, "StoreClient"),
    ],
)
def test_a_source_of_blocks_that_fails_to_open_leaves_nothing(
    parts: str, module: Any, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what is open in others, as the memory of Mooncake's client in its master."""
    monkeypatch.setattr(module, fails, _fail)
    opened: list[Any] = []
    closed: list[Any] = []
    for kind in (DiskStore, DirectoryStore):
        _note_calls(kind, "__init__", opened, monkeypatch)
        _note_calls(kind, "close", closed, monkeypatch)
    _fails_and_leaves_nothing(_settings(parts, tmp_path))
    assert len(opened) == 2 * (("tier" in parts) + ("store" in parts))
    assert sorted(map(id, closed)) == sorted(map(id, opened))


def test_memory_that_nixl_cannot_register_leaves_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (nixl, exchange):
        monkeypatch.setattr(module, "bindings", lambda: fake_nixl)
    monkeypatch.setattr(fake_nixl.nixlAgent, "getLocalMD", _fail)
    agents: list[Any] = []
    _note_calls(NixlAgent, "__init__", agents, monkeypatch)
    _fails_and_leaves_nothing(
        _settings("exchange", tmp_path) | {"kv_transfer_backend": "nixl"},
    )
    assert [agent._agent.registered for agent in agents] == [[], []]


def test_a_part_that_cannot_be_closed_does_not_hide_why_the_start_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, reported = ModelRunner.close, list[str]()

    def closed(runner: ModelRunner) -> None:
        close(runner)
        raise RuntimeError("a device that is lost")

    def report(what: str, **fields: Any) -> None:
        reported.append(fields["error"])

    monkeypatch.setattr(ModelRunner, "close", closed)
    monkeypatch.setattr(assembling, "warm_up", _fail)
    settings = SMALL | _settings("tier", tmp_path)
    for _ in range(2):  # the directory of the tier is unlocked by then
        with pytest.raises(CapacityError, match="first step"):
            assemble(engine_config(settings), clock=Clock(), report=report)
    assert reported == ["RuntimeError: a device that is lost"] * 2


def _settings(parts: str, folder: Path) -> dict[str, Any]:
    """Return the settings of an engine with these parts."""
    key = folder / "key"
    key.touch(0o600)
    key.write_text("a key of 24 bytes, or so")
    settings: dict[str, Any] = {}
    if "tier" in parts:
        settings |= {"kv_tier_path": str(folder / "tier"), "kv_tier_size": "4MiB"}
    if "exchange" in parts:
        settings |= {"kv_transfer_key_file": str(key), "kv_transfer_size": "4MiB"}
    if "store" in parts:
        settings |= {"kv_store": str(folder / "store"), "kv_store_buffer_size": "4MiB"}
    if parts == "events":  # a second publisher cannot have the same address
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events["endpoint"] = f"ipc://{folder}/events"
        settings |= {"kv_events_config": json.dumps(events)}
    return settings


def _fails_and_leaves_nothing(settings: dict[str, Any]) -> None:
    """Check that starts which call `_fail` leave no file, thread or memory."""
    before = Counter(_held())
    held = []
    for _ in range(2):  # the first one may open what the process keeps
        with pytest.raises(CapacityError, match="first step"):
            assemble(engine_config(SMALL | settings), clock=Clock(), report=_nothing)
        held.append(_held())
    assert held[0] == held[1]
    more = Counter(held[1]) - before
    assert not [name for name in more if "quire-kv" in name or "quire-tier" in name]


def _fail(*_: Any, **__: Any) -> None:
    raise CapacityError("no memory for a first step")


def _note_calls(
    kind: type, method: str, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note each object of which a method is called."""
    usual = getattr(kind, method)

    def noted(self: Any, *arguments: Any, **settings: Any) -> None:
        called.append(self)
        usual(self, *arguments, **settings)

    monkeypatch.setattr(kind, method, noted)


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
