"""The process of a rank above 0 that rank 0 has started: `main` with the descriptors of the
segment and of its answers.

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
from dataclasses import asdict
from typing import Literal

from quire.base.errors import DeviceLost
from quire.base.log_process import LogSettings, start_logging
from quire.ranks.connected_pools import PoolServer
from quire.ranks.other_ranks import GROUP_LOST
from quire.ranks.placement import run_on
from quire.ranks.rank_loop import do_commands, group_of, load, load_server, own_finding, pool_server
from quire.ranks.stage_loads import LoadServer
from quire.ranks.start import RankStart, failure_text, read_start, ready_of


def main() -> int:
    """Run one rank; the exit code."""
    segment, answers = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return GROUP_LOST
    threading.Thread(target=_leave_with_rank_zero, name="quire-rank-zero", daemon=True).start()
    try:
        return _run(read_start(line), segment, answers)
    except Exception as error:  # noqa: BLE001  the process edge: report to rank 0 and end
        _answer(answers, {"failure": failure_text(error)})
        return 1


def _run(start: RankStart, segment: int, answers: int) -> int:
    """Be a rank until rank 0 ends it or it fails; return the exit code. Rank 0 gets the reason."""
    form: Literal["text", "json"] = "json" if start.log_form == "json" else "text"
    start_logging(f"rank {start.rank}", LogSettings(level=start.log_level, form=form))
    run_on(start.cpus)
    group = group_of(start, segment)
    servers: list[LoadServer | PoolServer] = []
    code = 0
    try:
        executor, next_command = load(start, group)
        asked = pool_server(start, group, executor), load_server(executor)
        _answer(answers, {"ready": asdict(ready_of(executor.recipe, executor.weights_digest))})
        for server in asked:
            if server is not None:
                server.start()
                servers.append(server)
        do_commands(executor, next_command)
    except Exception as error:  # noqa: BLE001  the process edge: report to rank 0 and end
        if finding := own_finding(error, group):
            _answer(answers, {"failure": finding})
        group.abort()  # after the answer, which rank 0 then has as the reason
        code = GROUP_LOST if isinstance(error, DeviceLost) else 1
    for server in servers:
        server.join()  # a thread in the compiled module must not meet the interpreter's end
    return code


def _answer(descriptor: int, answer: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # rank 0 is gone
        os.write(descriptor, json.dumps(answer).encode() + b"\n")


def _leave_with_rank_zero() -> None:
    # The descriptor, not the buffered file: a thread that blocks in the latter holds its lock
    # while the interpreter shuts down.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(GROUP_LOST)
