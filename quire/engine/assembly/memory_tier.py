"""MemoryTier: host memory for KV blocks from outside, opened, and the levels of a store below it.

A part of the wiring, like assemble.py: what exchange.py and kv_store.py fill and outside.py passes
on. Loads neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.assembly.tier import OpenTier
from quire.transfer.host import HostStore

if TYPE_CHECKING:
    from quire.engine.kv_store.disk_level import DiskLevel
    from quire.kv_store.level import SharedLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A shared store, and the disk tier that is asked before it. num_blocks: places in host memory
    for blocks on their way."""

    shared: SharedLevel
    disk: DiskLevel | None
    num_blocks: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier(OpenTier):
    """store: the memory. levels: None where there is no store below it."""

    store: HostStore
    levels: Levels | None
