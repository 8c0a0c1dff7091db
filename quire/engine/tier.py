"""From a folder and an executor to a tier: who may read its blocks, what it holds, who moves them.

A part of the wiring, like assemble.py. The fingerprint is of all that the bytes of a block depend
on: weights, program, instruction set, layout, block size; blocks of any other are never read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quire.base.clock import Clock
from quire.base.report import Report
from quire.cache.tier_map import TierMap
from quire.config.groups import CacheConfig
from quire.execute.executor import Executor
from quire.program.program import Program
from quire.program.serialize import digest as program_digest
from quire.runner.tier_mover import TierMover, num_buffers
from quire.transfer.disk import DiskStore
from quire.transfer.folder import TierFolder
from quire.transfer.read_ahead import BUFFERS

# Changes with what lies in a block's bytes where the program does not tell.
LAYOUT_VERSION = 1
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
    program: Program,
    *,
    clock: Clock,
    report: Report,
) -> OpenTier:
    """The tier in `folder`, for an executor whose cache is allocated. Raises SettingError."""
    block_bytes = executor.block_bytes
    store = DiskStore(
        folder,
        max_bytes=config.kv_tier_bytes,
        block_bytes=block_bytes,
        fingerprint=block_fingerprint(executor, program, config.block_size),
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


def block_fingerprint(executor: Executor, program: Program, block_size: int) -> bytes:
    """32 bytes over all that a block's bytes depend on beside its tokens."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (
        str(LAYOUT_VERSION),
        executor.name,
        executor.recipe,
        executor.weights_digest,
        program_digest(program),
        str(block_size),
        str(executor.block_bytes),
    ):
        digest.update(part.encode() + b"\0")
    return digest.digest()


def buffer_bytes(block_bytes: int) -> int:
    """Memory a mover takes beside the pool."""
    return (num_buffers(block_bytes) + 1 + BUFFERS + 1) * block_bytes
