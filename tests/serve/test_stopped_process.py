"""`quire route` before a server with several API processes, of which one is stopped (SIGSTOP).

The others serve the same port, so that the server answers probes all the time. Only the streams of
the stopped process may go on elsewhere, here at the same server through another process.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.serve.running_router import RunningRouter
from tests.serve.running_server import GIVE_UP_S, RunningServer
from tests.serve.test_api_processes import pids_of
from tests.serve.test_router import MODEL, normal

PATH, NUM_STREAMS = "/v1/completions", 24
ASKED: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "frequency_penalty": 0.4,
    "stream": True,
}


def test_streams_of_a_stopped_api_process_go_on_and_those_of_the_others_stay() -> None:
    flags = ("--api-processes", "3", "--threads", "1", "--max-num-seqs", str(NUM_STREAMS))
    with RunningServer(MODEL, *flags) as server:
        alone = [_alone(server, seed) for seed in range(NUM_STREAMS)]
        num_idle = max(map(_num_sockets, pids_of(server).values()))
        limits = ("--silence-seconds", "600", "--stall-seconds", "600")
        with RunningRouter(server.url, *limits) as router:
            for _ in range(2):
                resumed = router.metric("quire_router_resumed_streams_total")
                answers, pid = _streams_with_a_stop(router, server)
                assert [normal(one) for one in answers] == [normal(one) for one in alone]
                resumed = router.metric("quire_router_resumed_streams_total") - resumed
                assert 0 < resumed <= NUM_STREAMS, router.stderr()
                others = [_num_sockets(one) for one in pids_of(server).values() if one != pid]
                if max(others) > num_idle + 4:  # one process may have accepted all connections
                    assert resumed < NUM_STREAMS, router.stderr()
                os.kill(pid, signal.SIGCONT)
                # Until it has closed what the router has left, it seems to have most streams.
                server.until(partial(_has_at_most, pid, num_idle + 4), "closed connections")
            assert router.metric("quire_router_broken_streams_total") == 0
            assert "replica fenced" not in router.stderr()


def _alone(server: RunningServer, seed: int) -> bytes:
    with server.stream(PATH, {**ASKED, "seed": seed}) as reader:
        return reader.read()


def _streams_with_a_stop(router: RunningRouter, server: RunningServer) -> tuple[list[bytes], int]:
    """Return the answers of streams, and the process that was stopped while they were open."""
    answers = [b""] * NUM_STREAMS
    changed = threading.Condition()

    def stream(seed: int) -> None:
        for line in router.lines("POST", PATH, {**ASKED, "seed": seed}):
            with changed:
                answers[seed] += line
                changed.notify()

    def have_begun() -> bool:
        return min(answer.count(b"\ndata: {") for answer in answers) >= 2

    threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    with changed:
        assert changed.wait_for(have_begun, GIVE_UP_S), "never happened: tokens of each stream"
    pid = max(pids_of(server).values(), key=_num_sockets)
    os.kill(pid, signal.SIGSTOP)
    for thread in threads:
        thread.join()
    return answers, pid


def _has_at_most(pid: int, num: int) -> bool:
    return _num_sockets(pid) <= num


def _num_sockets(pid: int) -> int:
    num = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            num += os.readlink(one).startswith("socket:")
    return num
