"""The process of a rank above 0: `main` with the descriptors of the segment and of its answers.

Reads its start from standard input, loads its share of the weights, says so, and does what rank 0
does until Stop. Ends at once when rank 0 is gone: standard input ends with it. Signals for a clean
end go to the server, which drains; this process ignores them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from quire.base.errors import DeviceLost, QuireError
from quire.base.log import Log
from quire.base.log_process import LogSettings, start_logging
from quire.base.user_path import user_path
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.ranks.commands import Stop, command_wire
from quire.ranks.placement import run_on
from quire.ranks.rank_executor import RankExecutor
from quire.ranks.stage_executor import StageExecutor
from quire.ranks.start import RankStart, links_of, program_of, read_start, ready_of
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import PackCache

_RANK_ZERO_GONE = 3
_MAX_FAILURE = 4000  # characters: the line must fit the pipe, which is read after the end


def main() -> int:
    """Run one rank; the exit code."""
    segment, answers = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return _RANK_ZERO_GONE
    threading.Thread(target=_leave_with_rank_zero, name="quire-rank-zero", daemon=True).start()
    try:
        _run(read_start(line), segment, answers)
    except DeviceLost:
        return _RANK_ZERO_GONE
    except Exception as error:  # noqa: BLE001  the process edge: report to rank 0 and end
        text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        _answer(answers, {"failure": text[:_MAX_FAILURE]})
        return 1
    return 0


def _run(start: RankStart, segment: int, answers: int) -> None:
    form: Literal["text", "json"] = "json" if start.log_form == "json" else "text"
    start_logging(f"rank {start.rank}", LogSettings(level=start.log_level, form=form))
    run_on(start.cpus)
    group = SharedMemoryRank(
        segment,
        rank=start.rank,
        degree=start.degree,
        sizes=SegmentSizes(slot_bytes=start.slot_bytes, message_bytes=start.message_bytes),
        timeout_s=start.timeout_s,
        members=start.degree // start.stages,
    )
    cache = None
    if start.pack_cache is not None:
        cache = PackCache(user_path(start.pack_cache), Log(f"rank {start.rank}"))
    options = ExecutorOptions(
        limits=StepLimits(**start.limits), num_threads=start.num_threads, pack_cache=cache
    )
    executor, next_command = _executor(start, options, group, segment)
    ready = ready_of(executor.recipe, executor.weights_digest)
    _answer(answers, {"ready": asdict(ready)})
    wire = command_wire()
    while True:
        command = wire.decode(next_command())
        if isinstance(command, Stop):
            break
        with contextlib.suppress(ValueError):  # a batch that rank 0 rejects too
            executor.do(command)
    executor.close()


def _executor(
    start: RankStart, options: ExecutorOptions, group: SharedMemoryRank, segment: int
) -> tuple[RankExecutor, Callable[[], bytes]]:
    """Return the executor of the rank, and what waits for its next command."""
    program, checkpoint = program_of(start), open_checkpoint(Path(start.checkpoint))
    if start.stages == 1:
        executor = RankExecutor(
            program,
            checkpoint,
            options,
            group,
            isa=start.isa,
            poison=start.poison,
            pool_file=start.pool_file,
        )
        return executor, lambda: group.broadcast(None)
    links = links_of(start, group, segment)
    stage = StageExecutor(
        program, checkpoint, options, group, links, isa=start.isa, poison=start.poison
    )
    if links.commands is None:  # a rank of the last stage
        return stage, lambda: group.broadcast(None)
    return stage, links.commands.receive


def _answer(descriptor: int, answer: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # rank 0 is gone
        os.write(descriptor, json.dumps(answer).encode() + b"\n")


def _leave_with_rank_zero() -> None:
    # The descriptor, not the buffered file: a thread that blocks in the latter holds its lock
    # while the interpreter shuts down.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(_RANK_ZERO_GONE)
