"""A stopped API process (SIGSTOP): the engine pauses its requests, and computes those of others.

Such a process reads nothing, so that what is computed for it is read late or never. When it goes
on, its streams do, with the same bytes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.serve.running_server import GIVE_UP_S, RunningServer
from tests.serve.test_api_processes import FLAGS, calling, events_of, next_event, pid_of
from tests.serve.test_router import MODEL, normal

PATH, NUM_STREAMS = "/v1/completions", 16
ASKED: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 490,
    "ignore_eos": True,
    "frequency_penalty": 0.4,
}
# An engine that computes nothing looks for its client 20 times a second.
IDLE_SHARE, LOOK_S = 0.1, 0.5
WATCHDOG_S = 2.0


def test_an_engine_computes_nothing_while_its_server_is_stopped() -> None:
    flags = ("--threads", "1", "--max-num-seqs", str(NUM_STREAMS), "--restart-engine")
    flags += ("--watchdog-seconds", str(WATCHDOG_S))
    with RunningServer(MODEL, *flags) as server:
        alone = [_answer(server, seed) for seed in range(2)]
        answers, begun = [b""] * NUM_STREAMS, threading.Semaphore(0)
        threads = [
            threading.Thread(target=_read, args=(server, seed, answers, begun))
            for seed in range(NUM_STREAMS)
        ]
        for thread in threads:
            thread.start()
        assert all(begun.acquire(timeout=GIVE_UP_S) for _ in threads)
        engine = server.engine_pid
        server.process.send_signal(signal.SIGSTOP)
        try:
            server.until(partial(_rests, engine), "an engine that computes nothing")
            time.sleep(WATCHDOG_S)  # its pause is no lack of progress
        finally:
            server.process.send_signal(signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert [normal(one) for one in answers[:2]] == [normal(one) for one in alone]
        assert server.metric("quire_holds_total") > 0  # it was not at its end
        assert server.metric("quire_held_requests") == 0
        assert server.metric("quire_engine_restarts_total") == 0


def test_requests_of_other_processes_go_on_meanwhile(tiny: Path) -> None:
    with RunningServer(tiny, *FLAGS) as server, calling() as caller_at:
        asked = {**ASKED, "max_tokens": 3000, "seed": 1}
        expected = events_of(caller_at(server, 2).stream(asked))
        first, second = caller_at(server, 1), caller_at(server, 2)
        stream = first.stream(asked)
        events = [next_event(stream)[1]]
        os.kill(pid_of(server, 1), signal.SIGSTOP)
        try:
            server.until(lambda: second.metric("quire_held_requests") == 1, "a held request")
            answer = events_of(second.stream(asked))
        finally:
            os.kill(pid_of(server, 1), signal.SIGCONT)
        events += events_of(stream)
        assert [_texts(one) for one in (answer, events)] == [_texts(expected)] * 2


def _texts(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event != "[DONE]")


def _answer(server: RunningServer, seed: int) -> bytes:
    with server.stream(PATH, {**ASKED, "seed": seed}) as reader:
        return reader.read()


def _read(
    server: RunningServer, seed: int, answers: list[bytes], begun: threading.Semaphore
) -> None:
    with server.stream(PATH, {**ASKED, "seed": seed}) as reader:
        assert reader.status == 200
        begun.release()
        answers[seed] = reader.read()


def _rests(engine: int) -> bool:
    """Return whether a process uses hardly any processor time for a while."""
    before_s = _cpu_s(engine)
    time.sleep(LOOK_S)
    return _cpu_s(engine) - before_s < IDLE_SHARE * LOOK_S


def _cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
