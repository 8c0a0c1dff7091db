"""Lead: what rank 0 sends the ranks of its group, and how it ends a group that has lost a rank.

Knows commands and the group; no executor and no process. Always holds: a command is sent before
rank 0 does the same, with no other between them; after a loss nothing is sent any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from quire.base.errors import DeviceLost
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute.executor import Executor, StepMemoryError
from quire.ranks.commands import Command, Stop, command_wire
from quire.ranks.connected_pools import BlockEnd
from quire.ranks.draft_share import DraftShare
from quire.ranks.other_ranks import OtherRanks
from quire.ranks.shared_pools import PoolShare


class FirstLayers(Executor, Protocol):
    """An Executor of a model's first layers, with its weights and its cache."""

    def share_cache(self) -> None:
        """Take over the cache that the model has allocated."""


class LeadingExecutor(Executor, Protocol):
    """The Executor of rank 0: what it does, all ranks do. processes: of the other ranks."""

    processes: OtherRanks

    own_block_size: int  # of a block in the pool, where blocks of the engine are divided

    @property
    def lead(self) -> Lead:
        """What it sends commands by."""

    def draft_by(self, share: DraftShare) -> None:
        """Have the first layers too; they draft."""

    def first_layers(self, num: int, num_threads: int = 0) -> FirstLayers:
        """Return an executor of the first `num` layers, which the caller closes. num_threads: of
        its own; 0: the model's."""

    def share_blocks(
        self, shares: Sequence[PoolShare], *, pool_file: int, ends: Mapping[int, BlockEnd]
    ) -> None:
        """Have whole blocks here, before the cache is allocated: of the pools of all ranks in a
        file, or over links to them. shares: of each rank. ends: of the links, by rank."""


class Lead:
    """The commands of rank 0 to its group.

    reason: says why the group is lost, where a process is known to have ended. end: called once at
    the end. loss: what was found first where the group is lost, in whichever thread; empty while it
    is not. turn: held from sending a command until rank 0 has done the same: steps and drafts may
    be computed in two threads.
    """

    def __init__(self, group: SharedMemoryRank) -> None:
        self.group, self.wire = group, command_wire()
        self.reason: Callable[[str], str] = str
        self.end: Callable[[], None] = _nothing
        self.loss = ""
        self.turn = threading.RLock()

    def send(self, command: Command) -> None:
        """Send a command to the other ranks of the group. Raises DeviceLost."""
        if self.group.native.members == 1:
            return
        try:
            self.group.broadcast(self.wire.encode(command))
        except DeviceLost as error:
            raise self.lost(str(error)) from error

    def stop(self) -> None:
        """Let all other ranks end."""
        if not self.group.native.is_aborted:
            with suppress(DeviceLost):  # it is over in any case
                self.send(Stop())
        self.end()

    def lost(self, found: str) -> DeviceLost:
        """End the group; return the error that says why it is lost."""
        self.loss = self.loss or found
        self.group.abort()
        return DeviceLost(
            f"a rank of the model is lost: {self.reason(self.loss)}; the engine ends, since no "
            "rank can go on alone: start it again, after a look at the system's log for a "
            "process ended for its memory"
        )

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Turn what ends a run at one rank only into the loss of the group. A batch that all ranks
        reject (ValueError) leaves them in step."""
        try:
            yield
        except ValueError:
            raise
        except StepMemoryError as error:
            raise self.lost(
                "rank 0 had no memory for a step, and only one process repeats a step by halves: "
                f"{error}"
            ) from error
        except Exception as error:
            raise self.lost(str(error)) from error


def _nothing() -> None:
    """Do nothing."""
