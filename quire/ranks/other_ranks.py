"""OtherRanks: what rank 0 needs of the ranks above it, whatever has started their processes.

Knows no process and no connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.comm.shared_memory import SharedMemoryRank
from quire.ranks.start import RankReady, RankStart

# The exit code of a rank that ends because another one, or rank 0, is gone.
GROUP_LOST = 3


def names_reason(found: str) -> bool:
    """Return whether this says why a group is lost. What an exchange finds once another rank has
    ended the group does not (native/src/rank_group.cc)."""
    return not found.endswith("cannot go on")


class OtherRanks(Protocol):
    """The ranks above 0, from their start to their end."""

    def start(self, start: RankStart, segment: int) -> None:
        """Let a rank begin; does not wait for it. Raises SettingError, WorkerError."""

    def ready(self) -> list[tuple[int, RankReady]]:
        """Wait until all ranks have loaded their weights, and watch them from now on.

        Returns what each says of itself. Raises WorkerError where one has failed.
        """

    def notify(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` in a thread, once, when a rank is lost from now on."""

    def reason(self, found: str) -> str:
        """Return why the group is lost, where more is known than what was found."""

    @property
    def lost(self) -> str:
        """Why a rank is lost; empty while all run."""

    def end(self) -> None:
        """End all ranks; they have been sent Stop, or the group is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSite:
    """Where the ranks run, as rank 0 sees it.

    launch: starts or meets the other ranks. here: how many ranks share this machine, of which rank
    0 is number `local`. threads: of each rank; None: those of this machine, divided by `here`.
    """

    launch: Callable[[SharedMemoryRank], OtherRanks]
    here: int
    local: int = 0
    threads: int | None = None
