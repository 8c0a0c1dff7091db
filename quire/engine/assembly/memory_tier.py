"""MemoryTier: host memory for KV blocks from outside, opened, and the levels of a store below it.

A part of the wiring, like assemble.py: what exchange.py and kv_store.py fill and outside.py passes
on. Loads neither.
Always holds: memory in which no block fits, or which there is not, is refused by the settings that
give its size; what a device copies to and from is pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CapacityError, SettingError
from quire.engine.assembly.tier import OpenTier
from quire.execute.executor import AsyncExecutor, Executor
from quire.transfer.host import HostStore

if TYPE_CHECKING:
    from quire.engine.kv_store.disk_level import DiskLevel
    from quire.kv_store.level import SharedLevel


@dataclass(frozen=True, slots=True)
class RoomSetting:
    """A setting that says how much host memory there is for blocks on their way."""

    name: str
    flag: str
    num_bytes: int

    def num_blocks(self, block_bytes: int) -> int:
        """Return how many blocks fit. Raises SettingError where none does."""
        if self.num_bytes < block_bytes:
            raise SettingError(
                f"{self.name} is {self.num_bytes}, and a block takes {block_bytes}: raise "
                f"{self.flag} to some blocks for each prompt at least"
            )
        return self.num_bytes // block_bytes


def host_memory(
    num_bytes: int, settings: Sequence[RoomSetting], executor: Executor
) -> NDArray[np.uint8]:
    """Return memory of the size that `settings` give, as the executor moves blocks to and from.
    Raises CapacityError."""
    try:
        memory = np.empty(num_bytes, np.uint8)
    except MemoryError as error:
        given, flags = _named(settings)
        raise CapacityError(f"{given}, and there is no memory for it; lower {flags}") from error
    pin(memory, settings, executor)
    return memory


def pin(memory: NDArray[np.uint8], settings: Sequence[RoomSetting], executor: Executor) -> None:
    """Pin memory of the size that `settings` give, if a device reads and writes it by itself.
    Raises CapacityError."""
    if not isinstance(executor, AsyncExecutor):
        return
    try:
        executor.pin(memory)
    except CapacityError as error:
        given, flags = _named(settings)
        raise CapacityError(
            f"{given}: {error}; lower {flags}, or raise what the system lets a process keep in "
            "place (ulimit -l, a container's limits)"
        ) from error


def _named(settings: Sequence[RoomSetting]) -> tuple[str, str]:
    given = " and ".join(f"{one.name} is {one.num_bytes}" for one in settings)
    return given, " or ".join(one.flag for one in settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A shared store, and the disk tier that is asked before it. num_blocks: places in host memory
    for blocks on their way, which `room` gives."""

    shared: SharedLevel
    disk: DiskLevel | None
    room: RoomSetting
    num_blocks: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier(OpenTier):
    """store: the memory. levels: None where there is no store below it."""

    store: HostStore
    levels: Levels | None
