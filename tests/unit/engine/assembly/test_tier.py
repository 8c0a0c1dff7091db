"""The engine with a disk tier: blocks found after a restart; unusable tiers rejected."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.base.engine_stats import EngineStats
from quire.base.errors import SettingError
from quire.bench.local import LocalEngine
from quire.bench.workloads import RequestSpec
from quire.config.flags import engine_config
from quire.config.groups import CacheConfig
from quire.config.machine import MachineMemory, num_usable_cores
from quire.engine.assembly.identity import engine_fingerprint
from quire.engine.assembly.tier import check_host_memory
from quire.scheduler.cost.transfer_cost import TransferCost
from quire.sim.machine import planned_program
from quire.transfer.folder import TierFolder
from quire.transfer.segment import Segment
from tests.tiny_models import write_tiny_llama

PROMPT = tuple(3 + (7 * at) % 200 for at in range(100))  # six whole blocks
ASK = RequestSpec(prompt_ids=PROMPT, output_tokens=6)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model so small that recomputing is always cheaper: here blocks are loaded all the same."""
    monkeypatch.setattr(TransferCost, "fetch_pays", lambda *_: True)
    monkeypatch.setattr(TransferCost, "return_ms", lambda *_: (1.0, True))
    return write_tiny_llama(tmp_path / "model", seed=5)


def answered(
    model: Path,
    folder: Path | None,
    done: Callable[[EngineStats], bool] = lambda stats: True,
    **more: Any,
) -> tuple[tuple[int, ...], EngineStats]:
    """Return the tokens of one engine from its start to its end, and its counters when `done`."""
    settings: dict[str, Any] = {"kv_cache_memory": "1MiB", "max_num_seqs": 2, **more}
    if folder is not None:
        settings |= {"kv_tier_path": str(folder), "kv_tier_size": "64MiB"}

    async def run() -> tuple[tuple[int, ...], EngineStats]:
        async with LocalEngine(str(model), settings) as engine:
            (answer,) = await engine.run([ASK])
            for _ in range(1000):
                if done(engine.stats):
                    break
                await asyncio.sleep(0.01)
            assert done(engine.stats), engine.stats
            return answer.token_ids, engine.stats

    return asyncio.run(run())


def is_saved(stats: EngineStats) -> bool:
    return stats.tier_saved_blocks_total >= 6


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_restarted_engine_loads_what_the_previous_one_computed(
    model: Path, tmp_path: Path, plans_in_flight: int
) -> None:
    folder, more = tmp_path / "tier", {"plans_in_flight": plans_in_flight}
    alone, _ = answered(model, None, **more)
    first, _ = answered(model, folder, is_saved, **more)
    again, stats = answered(model, folder, **more)
    assert first == again == alone
    assert stats.tier_fetched_blocks_total == 6
    assert stats.tier_bad_blocks_total == 0


@pytest.mark.skipif(num_usable_cores() < 2, reason="two ranks need two cores")
@pytest.mark.usefixtures("model")
def test_ranks_and_stages_load_what_engines_of_another_layout_computed(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = write_tiny_llama(tmp_path / "divided", seed=5, **heads)
    folder, more = tmp_path / "tier", {"num_threads": 2}
    alone, _ = answered(model, None, **more)
    first, _ = answered(model, folder, is_saved, tensor_parallel_size=2, **more)
    assert first == alone
    for layout in ({"pipeline_parallel_size": 2}, {}, {"tensor_parallel_size": 2}):
        again, stats = answered(model, folder, **more, **layout)
        assert again == alone
        assert stats.tier_fetched_blocks_total == 6
        assert stats.tier_bad_blocks_total == 0


def test_pieces_in_blocks_of_another_size_have_another_fingerprint() -> None:
    """By which the order of the bytes of a block differs, and nothing else."""
    executor: Any = SimpleNamespace(name="native", recipe="isa", weights_digest="w", block_bytes=64)
    found = set()
    for block_size in (16, 32):
        for divided in (1, 2):
            config = engine_config({"block_size": block_size, "context_parallel_size": divided})
            found.add(engine_fingerprint(config, planned_program(config), executor))
    assert len(found) == 4


def test_a_flipped_byte_costs_recomputation_and_is_counted(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    first, _ = answered(model, folder, is_saved)
    (segment,) = folder.glob("*.kv")
    content = bytearray(segment.read_bytes())
    at = next(at for at in range(len(content) - 1, 4096 * 8, -1) if content[at])
    content[at] ^= 1
    segment.write_bytes(bytes(content))
    again, stats = answered(model, folder)
    assert again == first
    assert stats.tier_bad_blocks_total == 1


def test_a_full_disk_disables_only_the_tier(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    alone, _ = answered(model, None)
    monkeypatch.setattr(Segment, "make", full)
    got, stats = answered(model, tmp_path / "tier", lambda stats: stats.tier_failures_total > 0)
    assert got == alone
    assert stats.tier_blocks_total == 0


def test_another_models_blocks_are_not_found(model: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=6)
    answered(model, tmp_path / "tier", is_saved)
    alone, _ = answered(other, None)
    got, stats = answered(other, tmp_path / "tier")
    assert got == alone
    assert stats.tier_fetched_blocks_total == 0


def test_blocks_are_found_if_only_tokenizer_or_sampling_settings_changed(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    first, _ = answered(model, folder, is_saved)
    (model / "chat_template.jinja").write_text("{{ messages }} anew")
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }} by another")
    for more in ({}, {"chat_template": str(template)}):
        again, stats = answered(model, folder, **more)
        assert again == first
        assert stats.tier_fetched_blocks_total == 6


@pytest.mark.parametrize(
    "more", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}]
)
def test_blocks_of_another_precision_or_size_are_not_found(
    model: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    answered(model, tmp_path / "tier", is_saved)
    alone, _ = answered(model, None, **more)
    got, stats = answered(model, tmp_path / "tier", **more)
    assert got == alone
    assert stats.tier_fetched_blocks_total == 0


def test_a_directory_in_use_is_rejected_before_anything_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    folder = TierFolder(tmp_path / "tier")
    with pytest.raises(SettingError, match="in use by another engine"):
        answered(model, tmp_path / "tier")
    folder.close()
    answered(model, tmp_path / "tier")


def test_impossible_tier_settings_are_rejected_with_a_reason() -> None:
    with pytest.raises(SettingError, match="kv_tier_path is empty"):
        CacheConfig(kv_tier_path="")
    with pytest.raises(SettingError, match="needs enable_prefix_caching"):
        CacheConfig(kv_tier_path="tier", enable_prefix_caching=False)
    with pytest.raises(SettingError, match="kv_tier_bytes is 0"):
        CacheConfig(kv_tier_bytes=0)
    with pytest.raises(SettingError, match="kv_tier_host_bytes is 0"):
        CacheConfig(kv_tier_host_bytes=0)
    with pytest.raises(SettingError, match="kv_tier_host_bytes needs enable_prefix_caching"):
        CacheConfig(kv_tier_host_bytes=1, enable_prefix_caching=False)
    with pytest.raises(SettingError, match="both given, but only one tier is supported"):
        CacheConfig(kv_tier_host_bytes=1, kv_tier_path="tier")


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_a_host_memory_tier_is_rejected_if_the_pool_is_there(model: Path, executor: str) -> None:
    with pytest.raises(SettingError, match="this engine computes on the CPU, where the KV cache"):
        answered(model, None, executor=executor, kv_tier_host_size="1MiB")


def test_more_host_memory_than_available_is_rejected() -> None:
    device = MachineMemory(available_bytes=1 << 40, limit="memory of a GPU", is_own=True)
    host = MachineMemory(available_bytes=8 << 30, limit="control group")
    check_host_memory({"kv_tier_host_bytes": 6 << 30}, device, host)
    with pytest.raises(SettingError, match=r"8192.0 MiB are left \(control group\).*6144MiB$"):
        check_host_memory({"kv_tier_host_bytes": (6 << 30) + 1}, device, host)
    wanted = {"kv_transfer_bytes": 4 << 30, "kv_store_buffer_bytes": 3 << 30}
    with pytest.raises(SettingError, match=r"kv_transfer_bytes is .* and kv_store.* together$"):
        check_host_memory(wanted, device, host)
    check_host_memory(wanted, host, host)  # on the CPU they are part of the memory table
