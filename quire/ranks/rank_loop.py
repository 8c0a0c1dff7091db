"""What a rank above 0 does from its start to its end, however its process was made: load its share
of the weights, then do what rank 0 does, until Stop.

Knows no process and no connection. Always holds: a batch that rank 0 rejects is rejected here too
and ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from quire import _native
from quire.base.errors import DeviceLost, SettingError
from quire.base.log import Log
from quire.base.user_path import user_path
from quire.comm.shared_memory import SharedMemoryRank
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.packing import LoadWeights
from quire.execute.packing import load as load_into_memory
from quire.execute.streamed_weights import StreamPlan, load_streamed
from quire.ranks.commands import Command, Stop, command_wire
from quire.ranks.connected_pools import PoolServer
from quire.ranks.rank_executor import RankExecutor
from quire.ranks.stage_executor import StageExecutor
from quire.ranks.stage_loads import LoadServer
from quire.ranks.stages import StageLinks
from quire.ranks.start import (
    RankStart,
    check_sample,
    drafts_of,
    failure_text,
    links_of,
    pool_server_of,
    program_of,
    sizes_of,
)
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import PackCache

NextCommand = Callable[[], bytes]


def group_of(start: RankStart, segment: int) -> SharedMemoryRank:
    """Return the rank's end of a segment."""
    return SharedMemoryRank(
        segment,
        rank=start.rank,
        degree=start.degree,
        sizes=sizes_of(start),
        timeout_s=start.timeout_s,
        members=start.degree // start.stages,
    )


class Rank(Protocol):
    """The executor of a rank above 0."""

    recipe: str
    weights_digest: str
    group: SharedMemoryRank
    server: PoolServer | None

    @property
    def links(self) -> StageLinks | None:
        """What its rows go through in a pipeline."""

    @property
    def expert_loads(self) -> list[list[int]]:
        """How often rows have chosen each expert of its own mixtures. Any thread may read it."""

    def do(self, command: Command) -> None:
        """Do what rank 0 does."""

    def close(self) -> None:
        """Free threads and memory."""


def load(start: RankStart, group: SharedMemoryRank) -> tuple[Rank, NextCommand]:
    """Load the weights; return the executor, and what waits for its next command."""
    cache = None
    if start.pack_cache is not None:
        cache = PackCache(user_path(start.pack_cache), Log(f"rank {start.rank}"))
    options = ExecutorOptions(
        limits=StepLimits(**start.limits), num_threads=start.num_threads, pack_cache=cache
    )
    program, checkpoint = program_of(start), open_checkpoint(Path(start.checkpoint))
    check_sample(start, checkpoint)
    links = None if start.stages == 1 else links_of(start, group)
    own = None if links is None else links.commands  # None in the last stage
    next_command = (lambda: group.broadcast(None)) if own is None else own.receive
    if start.torch is not None:
        from quire.ranks.torch_kind import load_torch_rank  # one executor is loaded

        torch_rank = load_torch_rank(
            start.torch,
            program,
            checkpoint,
            options,
            group,
            links,
            poison=start.poison,
            pool_file=start.pool_file,
        )
        if (share := drafts_of(start)) is not None:
            torch_rank.draft_by(share)
        return torch_rank, next_command
    if links is None:
        executor = RankExecutor(
            program,
            checkpoint,
            options,
            group,
            isa=start.isa,
            poison=start.poison,
            pool_file=start.pool_file,
            load_weights=_load_weights(start),
        )
        return _with_drafts(executor, start), next_command
    stage = StageExecutor(
        program,
        checkpoint,
        options,
        group,
        links,
        isa=start.isa,
        poison=start.poison,
        pool_file=start.pool_file,
        load_weights=_load_weights(start),
    )
    return _with_drafts(stage, start), next_command


def _load_weights(start: RankStart) -> LoadWeights:
    """Return what loads the weights: all into memory, or some from disk in each step."""
    if start.stream is None:
        return load_into_memory
    if start.pack_cache is None:  # a launcher's, which started this rank with other flags
        raise SettingError(
            "rank 0 leaves weights on disk (disk_offload_gb), and this rank has no pack_cache to "
            "read its own from: give it --pack-cache DIRECTORY too"
        )
    return partial(load_streamed, StreamPlan(**start.stream))


def _with_drafts(executor: RankExecutor, start: RankStart) -> RankExecutor:
    """Let an executor have the first layers too, where these draft."""
    if (share := drafts_of(start)) is not None:
        executor.draft_by(share)
    return executor


def pool_server(start: RankStart, group: SharedMemoryRank, executor: Rank) -> PoolServer | None:
    """Return what answers rank 0's asks for blocks of the executor, not started; None where rank 0
    shares the memory of the pool, or needs no blocks."""
    server = pool_server_of(start, group)
    if server is not None:
        executor.server = server
    return server


def load_server(executor: Rank) -> LoadServer | None:
    """Return what answers rank 0's asks for counts of experts, not started; None where it asks this
    rank for none."""
    links = executor.links
    if links is None or not links.loads or not executor.expert_loads:
        return None
    (end,) = links.loads.values()
    return LoadServer(executor.group, end, lambda: executor.expert_loads)


def own_finding(error: BaseException, group: SharedMemoryRank) -> str:
    """Return why this rank fails; empty where the group is lost already, which has a reason."""
    is_known = isinstance(error, DeviceLost) and group.native.is_aborted
    return "" if is_known else failure_text(error)


def do_commands(executor: Rank, next_command: NextCommand) -> None:
    """Do what rank 0 does until Stop. Raises DeviceLost where the group is lost."""
    wire = command_wire()
    while True:
        command = wire.decode(next_command())
        if isinstance(command, Stop):
            break
        try:
            executor.do(command)
        except ValueError:  # a batch that rank 0 rejects too
            continue
        except _native.RankLost as error:  # found by an exchange inside the program
            raise DeviceLost(str(error)) from error
    executor.close()
