"""Kills of whole servers for bench.disaggregation_kills: the HTTP process and its engine.

Slower than kills of engines by the imports of two processes, and with the way that a request takes
through `kv_transfer_params`.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.disaggregation import Server, ids

PARAMS = "kv_transfer_params"
HAND_OVER = {"do_remote_decode": True}
QUIET_S = 30.0
# What a surviving engine process may have more than after its first round.
MAX_GROWTH_DESCRIPTORS, MAX_GROWTH_BYTES = 4, 64 << 20
_LEFT = ("quire_kv_transfer_leases", "quire_kv_transfer_fetching", "quire_running_requests")


@dataclass
class Side:
    """An engine of one role, which is killed and started again."""

    role: str
    model: str
    folder: Path
    server: Server | None = None
    holdings: list[tuple[int, int]] = field(default_factory=list)
    process_ids: set[int] = field(default_factory=set)  # of all its servers and engines

    def start(self) -> Server:
        """Start it, if it does not run."""
        if self.server is None:
            key = ("--kv-transfer-key-file", str(self.folder / "key"), "--role", self.role)
            sizes = ("--kv-transfer-size", "16MiB", "--kv-cache-memory", "64MiB")
            sizes += ("--kv-touch-ahead", "0", "--kv-transfer-timeout", "10", "--access-log", "off")
            cores = sorted(os.sched_getaffinity(0))
            self.server = Server(self.model, self.folder, cores[:1], *key, *sizes)
            self.process_ids |= {self.server.pid, self.server.engine_pid}
            self.holdings.clear()
        return self.server

    def kill(self) -> None:
        """End its engine process and its server at once."""
        assert self.server is not None
        for pid in (self.server.engine_pid, self.server.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.wait()
        self.server = None

    def note_holdings(self) -> None:
        """Note the descriptors and the memory of its engine process."""
        assert self.server is not None
        pid = self.server.engine_pid
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.holdings.append((descriptors, pages * os.sysconf("SC_PAGE_SIZE")))


def body_of(chance: random.Random) -> dict[str, Any]:
    """Return a drawn request."""
    return {
        "prompt": ids(f"kill {chance.random()}", chance.randrange(60, 480)),
        "max_tokens": chance.randrange(2, 12),
        "seed": chance.randrange(1 << 30),
        "temperature": chance.choice([0.0, 1.0]),
        "logprobs": 2,
        "return_token_ids": True,
        "ignore_eos": True,
    }


def told_by(answer: dict[str, Any]) -> Any:
    """Return what must not differ."""
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]


def one_kill(prefill: Side, decode: Side, whole: Server, chance: random.Random) -> list[str]:
    """Kill one side in the middle of a transfer; return what is wrong."""
    body, victim = body_of(chance), chance.choice([prefill, decode])
    survivor = decode if victim is prefill else prefill
    wanted = told_by(whole.post(body))
    handing, fetching = prefill.start(), decode.start()
    offer = handing.post({**body, PARAMS: HAND_OVER})[PARAMS]
    timer = threading.Timer(chance.random() * 0.02, victim.kill)
    timer.start()
    problems = []
    try:
        answer = fetching.post({**body, PARAMS: offer})
        if told_by(answer) != wanted:
            problems.append(f"{victim.role} killed: the answer differs")
    except (OSError, http.client.HTTPException, SystemExit) as error:
        if victim is prefill:
            problems.append(f"prefill killed: the decode engine did not answer: {error}")
    timer.join()
    problems += left_at(survivor)
    return problems


def left_at(survivor: Side) -> list[str]:
    """Return what of the transfer is left at the side that lives, after some time."""
    server, deadline_s = survivor.start(), time.monotonic() + QUIET_S
    while any(server.metric(name) for name in _LEFT):
        if time.monotonic() > deadline_s:
            return [f"{survivor.role}: {name} is {server.metric(name)}" for name in _LEFT]
        time.sleep(0.02)
    survivor.note_holdings()
    return []


def grown(side: Side) -> list[str]:
    """Return what a side has more of than after its first round."""
    if len(side.holdings) < 2:
        return []
    (descriptors, num_bytes), last = side.holdings[0], side.holdings[-1]
    found = []
    if last[0] > descriptors + MAX_GROWTH_DESCRIPTORS:
        found.append(f"{side.role}: {last[0]} descriptors, {descriptors} after its first round")
    if last[1] > num_bytes + MAX_GROWTH_BYTES:
        found.append(f"{side.role}: {last[1]} bytes, {num_bytes} after its first round")
    return found


def run_servers(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make all kills of servers; return the result."""
    chance, problems = random.Random(args.seed), list[str]()
    whole = Server(args.model, folder, sorted(os.sched_getaffinity(0))[-1:])
    process_ids = {whole.pid, whole.engine_pid}
    prefill, decode = (Side(role, args.model, folder) for role in ("prefill", "decode"))
    began_s = time.monotonic()
    try:
        for number in range(args.kills):
            problems += one_kill(prefill, decode, whole, chance)
            problems += grown(prefill) + grown(decode)
            if problems or (number + 1) % 50 == 0:
                print(f"{number + 1} kills, {len(problems)} problems", *problems, flush=True)
            if len(problems) > 5:
                break
        seconds = time.monotonic() - began_s
        for side in (prefill, decode):  # a start removes the directories of killed servers
            side.start()
    finally:
        for side in (prefill, decode):
            if side.server is not None:
                side.server.end()
        whole.end()
    process_ids |= prefill.process_ids | decode.process_ids
    return {"seconds": seconds, "problems": problems, "process_ids": process_ids}
