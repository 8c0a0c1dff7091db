"""From a folder and an executor to a tier: who may read its blocks, what it holds, who moves them.

A part of the wiring, like assemble.py. Always holds: blocks of another fingerprint than our own
(block_fingerprint in runner/fingerprint.py) are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.clock import Clock
from quire.base.report import Report
from quire.cache.tier_map import TierMap
from quire.config.groups import CacheConfig
from quire.execute.executor import Executor
from quire.runner.tier_mover import TierMover, num_buffers
from quire.transfer.disk import DiskStore
from quire.transfer.folder import TierFolder
from quire.transfer.read_ahead import BUFFERS

# What a disk is thought to read in a millisecond, until that is measured.
_BYTES_A_MS = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTier:
    """tier: its books, filled with what lies there. most_saving, block_ms: see make_scheduler."""

    tier: TierMap
    mover: TierMover
    hash_key: bytes
    most_saving: int
    block_ms: float
    note: str


def open_tier(
    folder: TierFolder,
    config: CacheConfig,
    executor: Executor,
    *,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
) -> OpenTier:
    """The tier in `folder`, for an executor whose cache is allocated. fingerprint: of its blocks.

    Raises SettingError.
    """
    block_bytes = executor.block_bytes
    store = DiskStore(
        folder,
        max_bytes=config.kv_tier_bytes,
        block_bytes=block_bytes,
        fingerprint=fingerprint,
    )
    tier = TierMap(store.num_blocks)
    tier.load(store.held())
    mover = TierMover(executor, store, now_ms=clock.now_ms, report=report)
    return OpenTier(
        tier=tier,
        mover=mover,
        hash_key=folder.hash_key,
        most_saving=num_buffers(block_bytes),
        block_ms=block_bytes / _BYTES_A_MS,
        note=(
            f"KV tier: {folder.path}, {store.num_blocks} blocks "
            f"({store.num_blocks * config.block_size} tokens), {len(tier)} of them found there"
            + (f"; {folder.note}" if folder.note else "")
        ),
    )


def buffer_bytes(block_bytes: int) -> int:
    """Memory a mover takes beside the pool."""
    return (num_buffers(block_bytes) + 1 + BUFFERS + 1) * block_bytes
