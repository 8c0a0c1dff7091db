"""What an offload of weights leaves room for: everything that its engine takes beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.base.block_copies import Tier
from quire.base.errors import CapacityError, SettingError
from quire.config.flags import engine_config
from quire.config.machine import MachineMemory
from quire.config.memory import DraftNeeds, MemoryPlan
from quire.engine.assembly.executor_choice import choose_executor_class
from quire.engine.assembly.offload import draft_bytes, offload_size
from quire.engine.assembly.sized_model import sized_model
from quire.engine.assembly.sizing import buffer_bytes
from quire.execute import streamed_weights
from quire.execute.executor import ExecutorMemory, StepLimits
from quire.execute.gpu import offload_plan
from quire.execute.missing_memory import TABLE_ENTRY_BYTES
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import NativeSizing
from quire.execute.streamed_weights import StreamingExecutorClass
from quire.runner.tier_mover import num_buffers
from quire.sim.machine import planned_program

LIMITS = StepLimits(max_tokens=16, max_samples=16, max_sequences=2)
RESERVE_BYTES = 256 << 20
KV_BYTES, LACKING_BYTES = 1 << 20, 50_000
ON_DISK = {"disk_offload_gb": "auto", "pack_cache": "/packed", "kv_cache_memory_bytes": KV_BYTES}
TORCH = {"executor": "torch", "cpu_offload_gb": "auto"}


@pytest.mark.parametrize(
    ("settings", "beside_bytes"),
    [
        ({}, 0),
        ({"kv_store": "/s", "kv_store_buffer_bytes": 3 << 20}, 3 << 20),
        ({"kv_transfer_key_file": "key", "kv_transfer_bytes": 5 << 20}, 5 << 20),
        ({"kv_tier_path": "/t"}, None),
    ],
)
def test_auto_on_disk_leaves_room_for_blocks_on_their_way(
    settings: dict[str, Any], beside_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_weights, "WINDOW_BYTES", 0)  # the model is a small one
    config = engine_config(ON_DISK | settings)
    program = planned_program(config)
    whole = NativeExecutor.memory_for(program, LIMITS)
    made = choose_executor_class(config)
    assert isinstance(made, StreamingExecutorClass)
    assert made.size.buffers is not None
    beside = made.size.buffers(whole.token_bytes)
    assert beside == beside_bytes or (beside_bytes is None and beside > 0)
    tables = 2 * min(program.max_positions, KV_BYTES // whole.token_bytes) * 12
    fits = whole.weights_bytes + whole.step_bytes + RESERVE_BYTES + KV_BYTES + tables + beside

    def with_memory(num_bytes: int) -> ExecutorMemory:
        memory = MachineMemory(available_bytes=num_bytes, limit="a test")
        monkeypatch.setattr(NativeSizing, "available_memory", staticmethod(lambda: memory))
        return choose_executor_class(config).memory_for(program, LIMITS)

    assert with_memory(fits) == whole
    assert with_memory(fits - LACKING_BYTES).weights_bytes <= whole.weights_bytes - LACKING_BYTES


@pytest.mark.parametrize(
    "drafts",
    [
        {"speculate": "draft", "max_num_seqs": 4},
        {"speculate": "eagle", "max_num_seqs": 4},
        {"speculate": "ngram", "speculate_history_tokens": 100_000},
    ],
)
@pytest.mark.parametrize("kv", [{"kv_cache_memory_bytes": 4 << 20}, {}])
def test_auto_on_disk_leaves_room_for_what_drafts(
    drafts: dict[str, Any], kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_weights, "WINDOW_BYTES", 0)  # the model is a small one
    asked = {**drafts, **kv, "max_model_len": 256}

    def planned(num_bytes: int, **more: Any) -> MemoryPlan:
        memory = MachineMemory(available_bytes=num_bytes, limit="a test")
        monkeypatch.setattr(NativeSizing, "available_memory", staticmethod(lambda: memory))
        return sized_model(engine_config(asked | more)).memory

    needed = [-line.num_bytes for line in planned(1 << 30).lines if line.num_bytes < 0]
    kv_line = planned(1 << 30).kv_bytes if not kv else 0
    lacking_bytes = sum(needed) - kv_line - LACKING_BYTES
    with pytest.raises(CapacityError):
        planned(lacking_bytes)
    on_disk = {"disk_offload_gb": "auto", "pack_cache": "/packed"}
    assert planned(lacking_bytes, **on_disk).num_blocks > 0
    plenty = planned(1 << 30, **on_disk)
    assert plenty.lines == planned(1 << 30).lines, "nothing is on disk where all fits"


def test_a_short_proposer_takes_no_more_than_its_requests_use() -> None:
    draft = DraftNeeds(name="a draft", weights_bytes=1000, token_bytes=8, max_model_len=60)
    tables = 2 * 60 * TABLE_ENTRY_BYTES
    assert draft_bytes(draft, KV_BYTES, 64, 2, 16) == 1000 + 2 * 64 * 8 + tables
    few_tokens = 100  # fewer than both requests could use
    assert draft_bytes(draft, few_tokens * 64, 64, 2, 16) == 1000 + few_tokens * 8 + tables


def test_an_offload_to_the_host_counts_a_host_tier_other_engines_and_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = offload_plan.OffloadPlan(layers=(("w",),) * 4, copied_bytes=1000, slot_bytes=250)
    monkeypatch.setattr(offload_plan, "plan_offload", lambda *_, **__: plan)
    program = planned_program(engine_config({}))
    whole = ExecutorMemory(weights_bytes=1, step_bytes=1, token_bytes=1)

    def planned(
        host_bytes: int, *, num_ranks: int = 1, **settings: Any
    ) -> offload_plan.OffloadPlan:
        memory = MachineMemory(available_bytes=host_bytes, limit="a test")
        monkeypatch.setattr(offload_plan, "machine_memory", lambda: memory)
        size = offload_size(engine_config(TORCH | settings), is_gpu=True)
        size = replace(size, num_ranks=num_ranks)
        return size.plan(program, whole, lambda: memory, max_sequences=2, is_gpu=True)

    assert planned(1000) is plan
    assert planned(1500, kv_tier_host_bytes=500) is plan
    with pytest.raises(CapacityError, match="beside KV blocks"):
        planned(1499, kv_tier_host_bytes=500)
    transfer = {"kv_transfer_key_file": "key", "kv_transfer_bytes": 300}
    store = {"kv_store": "/s", "kv_store_buffer_bytes": 200}
    assert planned(1500, **transfer, **store) is plan
    with pytest.raises(CapacityError, match="beside KV blocks"):
        planned(1499, **transfer, **store)
    assert planned(3000, data_parallel_size=3) is plan
    with pytest.raises(CapacityError, match="for each of 3 engines"):
        planned(2999, data_parallel_size=3)
    assert planned(2500, num_ranks=2, kv_tier_host_bytes=500) is plan
    with pytest.raises(CapacityError, match="for each of 2 ranks, beside KV blocks"):
        planned(2499, num_ranks=2, kv_tier_host_bytes=500)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_tier_host_bytes": 1 << 30},
        {"kv_transfer_key_file": "key"},
        {"kv_store": "/s"},
        {"kv_store": "/s", "kv_transfer_key_file": "key", "kv_tier_path": "/t"},
    ],
)
def test_an_offload_from_a_gpu_leaves_it_room_for_staging_buffers(settings: dict[str, Any]) -> None:
    """Of a device's memory blocks on their way take staging rows, both ways, and nothing else."""
    config = engine_config(TORCH | settings)
    size = offload_size(config, is_gpu=True)
    assert size.buffers is not None
    rows = num_buffers(1024 * config.kv_block_tokens, Tier.HOST)
    wanted = 2 * rows * 1024 * config.kv_block_tokens
    assert size.buffers(1024) == buffer_bytes(config, 1024, device_is_own=True) == wanted


@pytest.mark.parametrize(
    ("settings", "in_host", "kind"),
    [
        ({"kv_transfer_key_file": "key", "kv_transfer_bytes": 5 << 20}, 5 << 20, Tier.HOST),
        ({"kv_store": "/s", "kv_store_buffer_bytes": 3 << 20}, 3 << 20, Tier.HOST),
        ({"kv_tier_path": "/t"}, 0, Tier.DISK),
    ],
)
def test_cpu_tensors_have_staging_rows_beside_the_host_memory_for_blocks(
    settings: dict[str, Any], in_host: int, kind: Tier
) -> None:
    torch = engine_config({"executor": "torch", "device": "cpu"} | settings)
    native = engine_config(settings)
    block_bytes = 1024 * native.kv_block_tokens
    on_native = buffer_bytes(native, 1024, device_is_own=False)
    on_torch = buffer_bytes(torch, 1024, device_is_own=False)
    assert on_torch - on_native == 2 * num_buffers(block_bytes, kind) * block_bytes
    ranks = replace(torch, executor=replace(torch.executor, tensor_parallel_size=2))
    assert buffer_bytes(ranks, 1024, device_is_own=False) == on_native
    if kind == Tier.HOST:
        assert on_native == in_host
    else:
        assert on_native > num_buffers(block_bytes, kind) * block_bytes  # blocks read and written


def test_without_a_gpu_nothing_can_be_saved() -> None:
    with pytest.raises(SettingError, match="no GPU here"):
        offload_size(engine_config(TORCH), is_gpu=False)
