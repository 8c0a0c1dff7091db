"""Kill prefill and decode engines in the middle of transfers, many times; nothing may be left.

Three engines, of the roles prefill, decode and both, answer drawn requests: in each round one of
them hands blocks over and another one fetches them. One of the two (drawn) is killed with SIGKILL
at a drawn time after the transfer has begun, and started again. Checked in each round: the answer
is that of one engine where the fetching engine lives, and at the survivor no lease, transfer,
request, block or kept place is left, its books agree, and it has no more descriptors and memory
than after its first rounds. Checked at the end: no process, no file in the directory of temporary
files, and no shared memory, whether it is a file or a segment of System V. Exits with 1 on any
difference.

`--store`: all also share a KV store in a directory, half of the prompts begin as an earlier one,
and in some rounds the store is what is killed: its blocks become unreadable in the middle, and all
are gone afterwards. At the end no claim and no half-written file may be left in it, once they are
as old as those of a killed engine have to be to be removed.

Engines are forked from this process (bench/forked_engines.py), which makes a thousand kills in
minutes. `--servers` kills whole servers of a pair instead: the HTTP process and its engine.

Run: python -m bench.disaggregation_kills [--kills 1000] [--store | --servers] [--model FOLDER]
     [--seed 1] [--backend auto] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.forked_engines import Answer, EngineGone, ForkedEngine, Holdings
from bench.server_kills import run_servers
from quire.base.kv_transfer import KVTransfer
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card

ANSWER_S, QUIET_S = 60.0, 30.0
# What a surviving engine may have more than after its first round.
MAX_GROWTH_DESCRIPTORS, MAX_GROWTH_BYTES = 4, 64 << 20
MAX_PROBLEMS = 5
PAIRS = (("prefill", "decode"), ("prefill", "both"), ("both", "decode"))
# About as long as a transfer takes; agents of NIXL connect first, in a fifth of a second.
KILL_WITHIN_S = {"auto": 0.02, "nixl": 0.4}
_VOCAB = 1000  # ids that every checkpoint has
_SETTLE_S = 0.002
AGED_S = 600.0  # older than any file of a killed engine that is kept


@dataclass
class Side:
    """An engine of one role, which is killed and started again."""

    role: str
    settings: dict[str, Any]
    engine: ForkedEngine | None = None
    first: Holdings | None = None  # after its first round
    last: Holdings | None = None  # after its last round
    process_ids: set[int] = field(default_factory=set)  # of all its processes
    blocks: Counter[str] = field(default_factory=Counter)  # that came to all its processes

    def start(self) -> ForkedEngine:
        """Start it, if it does not run."""
        if self.engine is None:
            self.engine = ForkedEngine({**self.settings, "role": self.role})
            self.process_ids.add(self.engine.process_id)
            self.first = None
        return self.engine

    def kill(self) -> None:
        """End its process at once."""
        self.note_blocks()
        assert self.engine is not None
        self.engine.kill()
        self.engine = None

    def note_blocks(self) -> None:
        """Count the blocks that its process got."""
        if self.last is not None:
            self.blocks["received"] += self.last.received_blocks
            self.blocks["stored"] += self.last.stored_blocks
            self.last = None

    def left(self) -> list[str]:
        """Return what of a round is left where it lives, after some time."""
        engine, deadline_s = self.start(), time.monotonic() + QUIET_S
        while not (found := engine.holdings()).is_quiet:
            if time.monotonic() > deadline_s:
                return [f"{self.role}: {found}"]
            time.sleep(_SETTLE_S)
        self.first, self.last = self.first or found, found
        return [f"{self.role}: {one}" for one in (*found.problems, *_growth(self.first, found))]


class KilledStore:
    """A shared store in a directory, of which the blocks can be taken away and given back."""

    role = "store"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._away = path.with_name("blocks that are gone")

    def kill(self) -> None:
        """Put a file in the place of the directory of all blocks, which engines may make anew."""
        blocks, is_killed = self._path / "blocks", False
        while not is_killed:
            shutil.rmtree(self._away, ignore_errors=True)
            with suppress(FileNotFoundError):
                blocks.rename(self._away)
            with suppress(FileExistsError):
                blocks.touch(0o600, exist_ok=False)
                is_killed = True

    def restore(self) -> None:
        """Let the store be used again, without any block."""
        (self._path / "blocks").unlink(missing_ok=True)
        shutil.rmtree(self._away, ignore_errors=True)

    def age(self, by_s: float) -> None:
        """Make files of claims, and half-written ones, older."""
        for file in self._unfinished():
            with suppress(FileNotFoundError):  # a claim that ends now
                then_s = file.stat().st_mtime - by_s
                os.utime(file, (then_s, then_s))

    def left(self) -> list[str]:
        """Return what should not be there."""
        return [f"store: {file.relative_to(self._path)}" for file in self._unfinished()]

    def _unfinished(self) -> list[Path]:
        return [*(self._path / "claims").glob("*"), *(self._path / "partial").glob("*")]


@dataclass
class Drill:
    """Rounds of kills. sides: by role. kill_within_s: the longest time from a fetching request to
    a kill. num_answers: those of fetching engines that lost the other engine, or the store.
    num_rounds: by the roles of the handing and the fetching engine. last: the prompt of the round
    before."""

    chance: random.Random
    sides: dict[str, Side]
    whole: ForkedEngine
    kill_within_s: float
    store: KilledStore | None = None
    problems: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_rounds: Counter[str] = field(default_factory=Counter)
    last: Request | None = None

    def round(self) -> None:
        """Kill one side, or the store, in the middle of a transfer; note what is wrong."""
        begins_as = self.last if self.store is not None and self.chance.random() < 0.5 else None
        request = self.last = _drawn(self.chance, begins_as)
        pair = tuple(self.sides[role] for role in self.chance.choice(PAIRS))
        self.num_rounds[" to ".join(side.role for side in pair)] += 1
        victims: list[Side | KilledStore] = [*pair]
        if self.store is not None:
            victims.append(self.store)
        victim = self.chance.choice(victims)
        self.whole.start(request)
        handing, fetching = (side.start() for side in pair)
        transfer_id = self.chance.randbytes(16).hex()
        prompt = _handed_over(request, transfer_id)
        handing.start(prompt)
        if self.chance.random() < 0.5:  # else it is fetched while it is computed
            handing.finish(prompt, ANSWER_S)
        offer = handing.offer
        source = KVTransfer(
            transfer_id=transfer_id,
            hand_over=False,
            host=offer["host"],
            port=offer["port"],
            engine_id=offer["engine_id"],
        )
        fetching.start(replace(request, transfer=source))
        fetching.wait(self.chance.random() * self.kill_within_s)
        victim.kill()
        wanted = self.whole.finish(request, ANSWER_S)
        if victim is not pair[1]:
            self._compare(victim.role, fetching, request, wanted)
        for side in pair:
            if side is not victim:
                self.problems += side.left()
        if isinstance(victim, KilledStore):
            victim.restore()

    def last_round(self) -> None:
        """Note what the rounds left in the store."""
        if self.store is None:
            return
        self.store.age(AGED_S)
        prompt = replace(_drawn(self.chance, None), transfer=None)
        decode = self.sides["decode"]
        decode.start()
        decode.kill()  # a new process, which does not count on what it saw of the store
        decode.start().start(prompt)
        decode.start().finish(prompt, ANSWER_S)
        self.problems += decode.left()
        deadline_s = time.monotonic() + QUIET_S
        while (left := self.store.left()) and time.monotonic() < deadline_s:
            time.sleep(_SETTLE_S)  # a thread of the engine ends its claim
        self.problems += left

    def _compare(
        self, victim: str, fetching: ForkedEngine, request: Request, wanted: Answer
    ) -> None:
        try:
            found = fetching.finish(request, ANSWER_S)
        except EngineGone as error:
            self.problems.append(f"{victim} killed: the fetching engine did not answer: {error}")
            return
        self.num_answers += 1
        if found != wanted:
            self.problems.append(f"{victim} killed: the answer differs")


def _drawn(chance: random.Random, begins_as: Request | None) -> Request:
    """Return a drawn request. begins_as: its prompt begins as that of this one."""
    draw = np.random.default_rng(chance.randrange(1 << 30))
    prompt = draw.integers(2, _VOCAB, chance.randrange(60, 480)).astype(np.int32)
    if begins_as is not None:
        beginning = begins_as.prompt_ids[: chance.randrange(len(begins_as.prompt_ids))]
        prompt = np.concatenate((beginning, prompt))[:480]
    sampling = SamplingParams(
        max_tokens=chance.randrange(2, 12),
        seed=chance.randrange(1 << 30),
        temperature=chance.choice([0.0, 1.0]),
        logprobs=2,
    )
    name = f"r{chance.randrange(1 << 60):x}"
    return Request(
        request_id=name,
        group_id=name,
        stream=0,
        prompt_ids=prompt,
        sampling=sampling.resolve(),
        stop_ids=(),
        max_total_tokens=len(prompt) + sampling.max_tokens,
        arrival_ms=0.0,
    )


def _handed_over(request: Request, transfer_id: str) -> Request:
    """Return the request of the prefill engine: one token, and its blocks kept."""
    return replace(
        request,
        sampling=replace(request.sampling, max_tokens=1),
        max_total_tokens=len(request.prompt_ids) + 1,
        transfer=KVTransfer(transfer_id=transfer_id, hand_over=True),
    )


def _growth(first: Holdings, last: Holdings) -> list[str]:
    found = []
    if last.descriptors > first.descriptors + MAX_GROWTH_DESCRIPTORS:
        found.append(f"{last.descriptors} descriptors, {first.descriptors} after its first round")
    if last.num_bytes > first.num_bytes + MAX_GROWTH_BYTES:
        found.append(f"{last.num_bytes} bytes, {first.num_bytes} after its first round")
    return found


def run_engines(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make all kills of engines; return the result."""
    shared = {
        "model": args.model,
        "threads": 1,
        "kv_cache_memory": "64MiB",
        "kv_touch_ahead": 0,
    }
    exchange: dict[str, Any] = {
        "kv_transfer_key_file": str(folder / "key"),
        "kv_transfer_size": "16MiB",
        "kv_transfer_timeout": 0.5,  # how long the lease of a killed engine is kept
        "kv_transfer_backend": args.backend,
    }
    store = None
    if args.store:
        store = KilledStore(folder / "store")
        exchange |= {
            "kv_store": str(folder / "store"),
            "kv_store_size": "64MiB",
            "kv_store_buffer_size": "16MiB",
            "kv_store_fetch": "always",
            "kv_store_timeout": 0.3,  # how long the claim of a killed engine is waited for
        }
    whole = ForkedEngine(shared)
    roles = ("prefill", "decode", "both")
    sides = {role: Side(role, {**shared, **exchange}) for role in roles}
    within_s = KILL_WITHIN_S.get(args.backend, KILL_WITHIN_S["auto"])
    drill = Drill(random.Random(args.seed), sides, whole, within_s, store)
    began_s = time.monotonic()
    try:
        for number in range(args.kills):
            drill.round()
            if drill.problems or (number + 1) % 100 == 0:
                print(f"{number + 1} kills, {len(drill.problems)} problems", flush=True)
                print(*drill.problems, sep="\n", end="", flush=True)
            if len(drill.problems) > MAX_PROBLEMS:
                break
        drill.last_round()
        for side in sides.values():
            side.note_blocks()
        seconds = time.monotonic() - began_s
    finally:
        started = (side.engine for side in sides.values() if side.engine is not None)
        for engine in (whole, *started):
            engine.end()
    return {
        "seconds": seconds,
        "problems": drill.problems,
        "rounds": dict(drill.num_rounds),
        "compared_answers": drill.num_answers,
        "process_ids": {whole.process_id}.union(*(side.process_ids for side in sides.values())),
        "blocks": {
            name: sum(one.blocks[name] for one in sides.values()) for name in ("received", "stored")
        },
    }


class SharedMemory:
    """The files and the System V segments of this machine's shared memory, as of now.

    Other processes make some of them meanwhile. A segment names the process that made it; a file
    does not, but those of others are open in them, and engines that have ended have none open."""

    def __init__(self) -> None:
        self._files = {path for path in Path("/dev/shm").iterdir() if path.is_file()}
        segments = Path("/proc/sysvipc/shm")
        lines = segments.read_text().splitlines()[1:] if segments.exists() else []
        self._segments = {line.split()[1]: int(line.split()[4]) for line in lines}

    def left(self, process_ids: Collection[int]) -> list[str]:
        """Return what is there by now of these processes, which have ended."""
        now = SharedMemory()
        segments = now._segments.items() - self._segments.items()
        new = sorted(f"segment {name}" for name, creator in segments if creator in process_ids)
        return new + sorted(path.name for path in now._files - self._files if not _is_open(path))


def _is_open(file: Path) -> bool:
    """Whether a process of this user has a file mapped or open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or one that ends now
            if str(file) in (process / "maps").read_text():
                return True
            if any(one.readlink() == file for one in (process / "fd").iterdir()):
                return True
    return False


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make all kills; return the result."""
    shared = SharedMemory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "temporary").mkdir()
        os.environ["TMPDIR"] = str(folder / "temporary")  # of the engines
        key = folder / "key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        result = (run_servers if args.servers else run_engines)(args, folder)
        left = sorted(path.name for path in (folder / "temporary").iterdir())
        if left:
            result["problems"].append(f"left in the directory of temporary files: {left}")
    if new := shared.left(result.pop("process_ids")):
        result["problems"].append(f"left in shared memory: {new}")
    of = "servers" if args.servers else "engines and store" if args.store else "engines"
    about = {"kills": args.kills, "of": of, "backend": args.backend, "seed": args.seed}
    return {**about, **result}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.disaggregation_kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=1000)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--store", action="store_true", help="share a KV store, and kill it too")
    which.add_argument("--servers", action="store_true", help="kill whole servers")
    parser.add_argument("--model", default="")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/disaggregation-kills.json"))
    args = parser.parse_args(arguments)
    result = run(args)
    print(json.dumps(result, indent=1))
    seconds = result.pop("seconds")
    print(f"{args.kills} kills in {seconds:.0f} s")  # of this machine, beside whatever else runs
    args.out.write_text(json.dumps({"machine": machine_card(), **result}, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
