"""Build a KV tier from settings and an executor: its fingerprint, store and mover.

A part of the wiring, like assemble.py. Always holds: blocks of another fingerprint than our own
(block_fingerprint in runner/fingerprint.py) are never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from quire.base.block_copies import Tier
from quire.base.clock import Clock
from quire.base.errors import CapacityError, SettingError
from quire.base.report import Report
from quire.cache.exchange_beside_tier import TierBesideExchange
from quire.cache.exchange_map import ExchangeMap
from quire.cache.tier_map import TierMap
from quire.config.groups import EngineConfig
from quire.config.machine import MachineMemory
from quire.config.memory import mib
from quire.execute.executor import AsyncExecutor, Executor
from quire.runner.tier_mover import BlockMover, TierMover, num_buffers
from quire.transfer.disk import DiskStore
from quire.transfer.folder import TierFolder
from quire.transfer.host import HostStore, piece_sizes
from quire.transfer.read_ahead import BUFFERS

# What a tier is thought to give back in a millisecond, until that is measured.
_BYTES_A_MS = {Tier.DISK: 500_000, Tier.HOST: 10_000_000}
# Host memory left free: memory pinned for a device is not available to other processes.
HOST_RESERVE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTier:
    """tier: the map of its places, filled with what lies there."""

    tier: TierMap
    mover: BlockMover
    hash_key: bytes
    note: str


def check_host_memory(
    wanted: Mapping[str, int], device: MachineMemory, host: MachineMemory
) -> None:
    """Before anything is loaded: raise SettingError where the host lacks the memory for KV blocks
    beside a device with memory of its own, or there is none.

    wanted: bytes by setting (EngineConfig.host_block_bytes). device: the memory of what computes.
    """
    if not device.is_own:
        if "kv_tier_host_bytes" not in wanted:
            return  # part of the one memory sum
        raise SettingError(
            f"kv_tier_host_bytes is {wanted['kv_tier_host_bytes']}; this engine computes on the "
            "CPU, where the KV cache itself lies in the host's memory and a tier there would be "
            "more of the same: leave it out and raise kv_cache_memory_bytes, give a folder "
            "(kv_tier_path), or take a GPU (--executor torch)"
        )
    most = max(host.available_bytes - HOST_RESERVE_BYTES, 0)
    if sum(wanted.values()) > most:
        given = " and ".join(f"{name} is {value} ({mib(value)})" for name, value in wanted.items())
        raise SettingError(
            f"{given}; of the host's memory {mib(host.available_bytes)} are left ({host.limit}), "
            f"and {mib(HOST_RESERVE_BYTES)} of them stay free: give at most {most >> 20}MiB"
            + (" together" if len(wanted) > 1 else "")
        )


def open_tier(
    folder: TierFolder | None,
    config: EngineConfig,
    executor: Executor,
    *,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
    exchange: ExchangeMap | None = None,
) -> OpenTier:
    """Open the tier in `folder`, or in host memory where `folder` is None.

    The executor's cache must be allocated. fingerprint: of its blocks. exchange: with other
    engines, which goes on in the tier's map. Raises SettingError and CapacityError.
    """
    cache, block_bytes = config.cache, executor.block_bytes
    store: DiskStore | HostStore
    if folder is None:
        assert cache.kv_tier_host_bytes is not None, "there is one or the other"
        store = _host_store(cache.kv_tier_host_bytes, executor)
        where, note = "memory of the host", "gone when the engine ends"
    else:
        store = DiskStore(
            folder,
            max_bytes=cache.kv_tier_bytes,
            block_bytes=block_bytes,
            fingerprint=fingerprint,
        )
        where, note = str(folder.path), folder.note
    block_ms = block_bytes / _BYTES_A_MS[store.tier]
    max_saving = num_buffers(block_bytes, store.tier)
    make: Callable[..., TierMap] = TierMap
    if exchange is not None:
        make = partial(TierBesideExchange, exchange=exchange)
    try:
        tier = make(store.num_blocks, store.tier, block_ms=block_ms, max_saving=max_saving)
        tier.load(store.held())
        mover = TierMover(executor, store, now_ms=clock.now_ms, report=report)
    except BaseException:
        store.close()
        raise
    return OpenTier(
        tier=tier,
        mover=mover,
        hash_key=os.urandom(16) if folder is None else folder.hash_key,
        note=(
            f"KV tier: {where}, {store.num_blocks} blocks "
            f"({store.num_blocks * config.kv_block_tokens} tokens)"
            + (f", {len(tier)} of them found there" if folder is not None else "")
            + (f"; {note}" if note else "")
        ),
    )


def disk_buffer_bytes(block_bytes: int) -> int:
    """Return the host memory in which blocks go to a disk tier and come back."""
    return (num_buffers(block_bytes, Tier.DISK) + 1 + BUFFERS + 1) * block_bytes


def staging_bytes(block_bytes: int, *, in_host: bool) -> int:
    """Return the memory of the torch executor's staging rows, both ways, where a CPU or a GPU
    computes. in_host: blocks move to and from host memory too, of which more are on their way."""
    return 2 * num_buffers(block_bytes, Tier.HOST if in_host else Tier.DISK) * block_bytes


def _host_store(wanted: int, executor: Executor) -> HostStore:
    assert isinstance(executor, AsyncExecutor), "a device beside the host was asked for before"
    block_bytes = executor.block_bytes
    sizes = piece_sizes(wanted, block_bytes)
    if not sizes:
        raise SettingError(
            f"kv_tier_host_bytes is {wanted}; a block takes {block_bytes} bytes: give the tier more"
        )
    try:
        pieces = [executor.host_memory(size) for size in sizes]
    except CapacityError as error:
        raise SettingError(
            f"kv_tier_host_bytes is {wanted} ({mib(wanted)}): {error}; lower it, or raise what "
            "the system lets a process keep in place (ulimit -l, a container's limits)"
        ) from error
    return HostStore(pieces, block_bytes)
