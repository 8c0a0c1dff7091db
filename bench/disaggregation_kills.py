"""Kill prefill and decode engines in the middle of transfers, many times; nothing may be left.

A prefill engine and a decode engine answer drawn requests. In each round one of them (drawn) is
killed with SIGKILL at a drawn time after the transfer has begun, and started again. Checked in each
round: the answer is that of one engine where the decode engine lives, and at the survivor no lease,
transfer or running request is left. Checked at the end: no process, no directory of sockets, no
file in shared memory, and no more descriptors and memory of a survivor than its first rounds took.
Exits with 1 on any difference.

Run: python -m bench.disaggregation_kills [--kills 1000] [--model FOLDER] [--seed 1] [--out FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import secrets
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.disaggregation import Server, ids
from quire.bench.machine import machine_card

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

    def start(self) -> Server:
        """Start it, if it does not run."""
        if self.server is None:
            key = ("--kv-transfer-key-file", str(self.folder / "key"), "--role", self.role)
            sizes = ("--kv-transfer-size", "16MiB", "--kv-cache-memory", "64MiB")
            sizes += ("--kv-touch-ahead", "0", "--kv-transfer-timeout", "10", "--access-log", "off")
            cores = sorted(os.sched_getaffinity(0))
            self.server = Server(self.model, self.folder, cores[:1], *key, *sizes)
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


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make all kills; return the result."""
    chance, problems = random.Random(args.seed), list[str]()
    shared_before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sockets").mkdir()
        os.environ["TMPDIR"] = str(folder / "sockets")  # of the servers
        key = folder / "key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        whole = Server(args.model, folder, sorted(os.sched_getaffinity(0))[-1:])
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
        left = sorted(path.name for path in (folder / "sockets").iterdir())
        problems += [f"left in the directory of temporary files: {left}"] if left else []
    if new := set(os.listdir("/dev/shm")) - shared_before:
        problems.append(f"left in shared memory: {sorted(new)}")
    return {"kills": args.kills, "seed": args.seed, "seconds": seconds, "problems": problems}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.disaggregation_kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--model", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/disaggregation_kills.json"))
    args = parser.parse_args(arguments)
    result = run(args)
    print(json.dumps(result, indent=1))
    args.out.write_text(json.dumps({"machine": machine_card(), **result}, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
