"""Prefill and decode in two engines of the torch executor, and engines that share a KV store.

The cases are those of tests/exact/test_disaggregation.py and test_kv_store.py: answers are compared
with those of one engine on CPU tensors, bit for bit. The second device does nothing until it is
waited for, and computes two plans at a time, as a GPU does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quire.base.clock import Clock  # noqa: E402
from quire.base.errors import CapacityError  # noqa: E402
from quire.base.records import Request  # noqa: E402
from quire.config.flags import engine_config  # noqa: E402
from quire.config.machine import MachineMemory  # noqa: E402
from quire.engine.assembly import assemble as assembling  # noqa: E402
from quire.execute.gpu import executor as torch_executor  # noqa: E402
from quire.execute.gpu.executor_class import TorchExecutorClass  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.exact import test_disaggregation, test_kv_store  # noqa: E402
from tests.exact.rig import Model  # noqa: E402
from tests.exact.test_disaggregation import (  # noqa: E402
    Settings,
    compare_pairs,
    drawn,
    nixl_is_installed,
)
from tests.exact.test_kv_store import compare_sharing  # noqa: E402
from tests.gpu.lazy_stream import LazyStream  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

NUM_CASES = int(os.environ.get("QUIRE_GPU_DISAGGREGATION_CASES", "4"))
FIRST_PAIR, FIRST_STORE = 700, 900
TRANSFER_BYTES = 4 << 20  # of each engine of compare_pairs
ON_CPU_TENSORS: Settings = {"executor": "torch", "device": "cpu"}
WITH_TIERS: dict[str, Settings] = {
    "alone": {},
    "beside a host tier": {"kv_tier_host_size": "1MiB", "kv_tier_fetch": "always"},
    "beside a disk tier": {"kv_tier_size": "4MiB", "kv_tier_fetch": "always"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    root = tmp_path_factory.mktemp("models")
    even = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 68}
    folder = write_tiny_llama(root / "even", seed=25, num_hidden_layers=2, dtype="bf16", **even)
    caches = ("auto", "int8", "fp8")
    return [Model(folder, DType.BF16, "none", cache) for cache in caches]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("a key that both sides have")
    path.chmod(0o600)
    return path


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LazyStream]:
    """Let engines compute on late devices with memory of their own; return these."""
    memory = MachineMemory(available_bytes=1 << 30, limit="memory of a test", is_own=True)
    devices: list[LazyStream] = []

    def made(_: Any) -> LazyStream:
        devices.append(LazyStream())
        return devices[-1]

    monkeypatch.setattr(TorchExecutorClass, "available_memory", lambda _: memory)
    monkeypatch.setattr(TorchExecutorClass, "plans_in_flight", lambda _: 2)
    monkeypatch.setattr(torch_executor, "stream_of", made)
    for module in (test_disaggregation, test_kv_store):
        monkeypatch.setattr(module, "drawn", without_listed)
    return devices


def without_listed(number: int, num_models: int) -> tuple[int, list[tuple[Request, ...]]]:
    """Draw a case without listed log-probabilities: logits on CPU tensors are arrays, of which rows
    are taken before a late device has computed them."""
    model, requests = drawn(number, num_models)
    return model, [
        tuple(replace(one, sampling=replace(one.sampling, logprob_token_ids=())) for one in streams)
        for streams in requests
    ]


def test_two_engines_give_the_answers_of_one(models: list[Model], key: Path) -> None:
    numbers = range(FIRST_PAIR, FIRST_PAIR + NUM_CASES)
    seen = compare_pairs(numbers, models, key, {}, {}, ON_CPU_TENSORS)
    if NUM_CASES >= 4:
        assert seen["fetched"] >= 20, seen
        assert seen["unreachable"] + seen["cut"], seen


@pytest.mark.parametrize("tier", WITH_TIERS)
def test_two_late_devices_give_the_answers_of_one(
    models: list[Model], key: Path, tmp_path: Path, late: list[LazyStream], tier: str
) -> None:
    """Blocks leave after the step that computed them, and arrive before the one that reads them."""

    def of(role: str) -> Settings:
        own = {"kv_tier_path": str(tmp_path / role)} if "disk" in tier else {}
        return {**WITH_TIERS[tier], **own}

    numbers = range(FIRST_PAIR + 20, FIRST_PAIR + 20 + NUM_CASES)
    found = compare_pairs(numbers, models[:1], key, of("prefill"), of("decode"), ON_CPU_TENSORS)
    if NUM_CASES >= 4:
        assert found["fetched"] >= 20, found
        assert found["saved"], found
    whole, *pair = late
    assert whole.pinned_bytes == []
    for one in pair:
        (num_bytes,) = one.pinned_bytes
        assert TRANSFER_BYTES - num_bytes < 16 * 1024  # whole blocks of the room for them
        assert one.num_unpinned == 1


@pytest.mark.skipif(not nixl_is_installed(), reason="NIXL is not installed")
@pytest.mark.parametrize("is_late", [False, True], ids=["CPU tensors", "late devices"])
def test_blocks_through_nixl_change_no_answer(
    models: list[Model], key: Path, request: pytest.FixtureRequest, is_late: bool
) -> None:
    """The other agent reads memory that is pinned for a device, and writes into such."""
    devices: list[LazyStream] = request.getfixturevalue("late") if is_late else []
    backend = {"kv_transfer_backend": "nixl"}
    first = FIRST_PAIR + 40 + 20 * is_late
    numbers = range(first, first + NUM_CASES)
    seen = compare_pairs(numbers, models[:2], key, backend, backend, ON_CPU_TENSORS)
    if NUM_CASES >= 4:
        assert seen["fetched"] >= 20, seen
        assert not seen["refused"], seen
    for device in devices:
        assert device.num_unpinned == len(device.pinned_bytes)
    assert len([one for one in devices if one.pinned_bytes]) >= 2 * is_late


@pytest.mark.parametrize("source", ["exchange", "store"])
def test_memory_is_unpinned_where_a_start_fails(
    models: list[Model],
    key: Path,
    tmp_path: Path,
    late: list[LazyStream],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CapacityError("no memory for a first step")

    monkeypatch.setattr(assembling, "warm_up", fail)
    settings: Settings = {
        "exchange": {"kv_transfer_key_file": str(key), "kv_transfer_size": "1MiB"},
        "store": {"kv_store": str(tmp_path / "store"), "kv_store_buffer_size": "1MiB"},
    }[source]
    config = engine_config(
        {"model": str(models[0].folder), "kv_cache_memory": "1MiB", **ON_CPU_TENSORS, **settings}
    )
    with pytest.raises(CapacityError, match="first step"):
        assembling.assemble(config, clock=Clock(), report=lambda what, **_: None)
    (device,) = late
    assert (len(device.pinned_bytes), device.num_unpinned) == (1, 1)


def test_engines_share_a_store(models: list[Model], tmp_path: Path) -> None:
    numbers = range(FIRST_STORE, FIRST_STORE + NUM_CASES)
    seen = compare_sharing(numbers, models, tmp_path, ON_CPU_TENSORS)
    if NUM_CASES >= 4:
        assert seen["fetched"] >= 20, seen


def test_late_devices_share_a_store(
    models: list[Model], tmp_path: Path, late: list[LazyStream]
) -> None:
    numbers = range(FIRST_STORE + 20, FIRST_STORE + 20 + NUM_CASES)
    seen = compare_sharing(numbers, models[1:2], tmp_path, ON_CPU_TENSORS)
    if NUM_CASES >= 4:
        assert seen["fetched"] >= 20, seen
