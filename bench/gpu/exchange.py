"""KV blocks handed from one engine to another: equal bytes and tokens, and the speed of each copy.

Two processes have equal executors on one GPU. The first computes a prompt in two steps and saves
its whole blocks to shared memory that is pinned where it lies, those of the first step before the
second. The other one, started from this file, maps that memory, copies the blocks to pinned memory
of its own, loads them, computes the rest of the prompt and generates. What engines say to each
other over a socket needs the compiled module, and no GPU.

    python -m bench.gpu.exchange SEGMENT [--dry-run-on-cpu]    # the second process
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.batches import BLOCK_SIZE, columns_for
from bench.gpu.host_tier import admission, key_of, loaded, plan_of, saved, seated
from bench.gpu.loop import Idle, run
from bench.gpu.models import executor_of, program_of
from bench.gpu.stage import Stage
from quire.base.block_copies import CopiesEnded
from quire.base.records import StepPlan
from quire.base.report import Field
from quire.execute.gpu.executor import TorchExecutor
from quire.runner.model_runner import ModelRunner
from quire.runner.tier_mover import TierMover
from quire.transfer.host import HostStore
from quire.transfer.links.messages import Segment
from quire.transfer.links.shared_memory import MappedSegment, OwnSegment

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Tokens of the prompt, of its first step, and of the answer."""

    prompt: int
    first: int
    answer: int

    @property
    def columns(self) -> int:
        """Blocks of the request."""
        return columns_for(self.prompt + self.answer + 1)

    @property
    def whole(self) -> int:
        """Blocks that the prompt fills."""
        return self.prompt // BLOCK_SIZE


FULL = Load(prompt=4105, first=2048, answer=32)
DRY = Load(prompt=40, first=16, answer=4)


def exchange(stage: Stage) -> None:
    """Report the copies of both processes. Raises RuntimeError where bytes or tokens differ."""
    load = DRY if stage.is_dry else FULL
    executor = _executor(stage, load)
    segment = OwnSegment(load.whole * executor.block_bytes)
    began = time.perf_counter()
    executor.pin(segment.memory)
    pinned_s = time.perf_counter() - began
    stage.report("pinned", {"bytes": segment.memory.nbytes, "seconds": pinned_s})
    store = HostStore([segment.memory], executor.block_bytes)
    tokens, copies = _tokens(stage, executor, store, load, _handing(load))
    stage.report("saved", {"blocks": copies.saved, "seconds": copies.save_ms / 1e3})
    if stage.is_rehearsal:
        return
    found = _at_the_other(segment, stage)
    stage.report("fetched", found["fetched"])
    stage.report("tokens", {"are_equal": found["tokens"] == tokens, "tokens": len(tokens)})
    executor.close()
    segment.close()
    if copies.saved != load.whole or not found["fetched"]["bytes_are_equal"]:
        raise RuntimeError(f"{copies.saved} blocks were saved, and arrived so: {found['fetched']}")
    if found["tokens"] != tokens:
        raise RuntimeError(f"the other engine got {found['tokens']}, this one {tokens}")


def _at_the_other(segment: OwnSegment, stage: Stage) -> dict[str, Any]:
    """Return what the second process prints."""
    command = [sys.executable, "-m", "bench.gpu.exchange", segment.message().pack().hex()]
    command += ["--dry-run-on-cpu"] if stage.is_dry else []
    left_s = None if stage.ends == float("inf") else max(stage.ends - time.monotonic(), 1.0)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=left_s)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _fetched(stage: Stage, described: Segment) -> dict[str, Any]:
    """Fetch the prompt's blocks and generate; return tokens and copies."""
    load = DRY if stage.is_dry else FULL
    executor = _executor(stage, load)
    size = executor.block_bytes
    theirs = MappedSegment(described).view(0, load.whole * size)
    own = executor.host_memory(theirs.nbytes)
    began = time.perf_counter()
    own[:] = theirs
    copied_s = time.perf_counter() - began
    store = HostStore([own], size)
    for place in range(load.whole):
        store.save(place, key_of(place), store.room(place))
    tokens, copies = _tokens(stage, executor, store, load, _fetching(load))
    again = executor.host_memory(theirs.nbytes)
    blocks = np.arange(load.whole, dtype=np.int32)
    executor.export_blocks(blocks, [*again.reshape(load.whole, size)])()
    fetched = {
        "blocks": copies.fetched,
        "bytes_are_equal": bool(np.array_equal(again, theirs)),
        "between_processes_s": copied_s,
        "to_the_device_s": copies.fetch_ms / 1e3,
    }
    executor.close()
    return {"tokens": tokens, "fetched": fetched}


def _executor(stage: Stage, load: Load) -> TorchExecutor:
    """Return an executor that is equal in both processes."""
    return executor_of(
        stage,
        program_of(stage, "Qwen3-0.6B"),
        exact=True,
        max_tokens=max(load.first, load.prompt - load.first),
        max_sequences=1,
        blocks=load.columns,
    )


def _tokens(
    stage: Stage,
    executor: TorchExecutor,
    store: HostStore,
    load: Load,
    plans: Iterator[StepPlan],
) -> tuple[list[int], CopiesEnded]:
    """Return the tokens of plans that copy blocks to or from `store`, and these copies."""

    def report(problem: str, **fields: Field) -> None:
        print(problem, fields, flush=True)

    mover = TierMover(executor, store, now_ms=lambda: 1e3 * time.perf_counter(), report=report)
    runner = ModelRunner(
        executor,
        num_slots=1,
        max_model_len=load.columns * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_samples=1,
        overlap=True,
        mover=mover,
    )
    results = list(run(runner, plans, plans_in_flight=2, idle=Idle(stage, executor)))
    runner.end_thread()
    copies = mover.ended()
    if copies is None or copies.broken:
        raise RuntimeError("no block was copied")
    return np.concatenate([result.token_ids for result in results]).tolist(), copies


def _handing(load: Load) -> Iterator[StepPlan]:
    """Compute the prompt in two steps, and save what the step before has computed."""
    blocks = np.arange(load.whole, dtype=np.int32)
    early = load.first // BLOCK_SIZE
    yield plan_of(_begun(load), [0], [0], [load.first], samples=False)
    more = {"tier_copies": saved(blocks[:early])}
    yield plan_of(more, [0], [load.first], [load.prompt - load.first])
    yield from _answer(load, {"tier_copies": saved(blocks[early:], early)})


def _fetching(load: Load) -> Iterator[StepPlan]:
    """Load the whole blocks, then compute the rest of the prompt."""
    blocks = np.arange(load.whole, dtype=np.int32)
    yield StepPlan(step=0, tier_copies=loaded(blocks))
    start = load.whole * BLOCK_SIZE
    yield plan_of(_begun(load), [0], [start], [load.prompt - start])
    yield from _answer(load, {})


def _begun(load: Load) -> dict[str, Any]:
    return seated([admission(0, load.prompt)], load.columns)


def _answer(load: Load, more: dict[str, Any]) -> Iterator[StepPlan]:
    """Generate all tokens after the first; more: fields of the first plan."""
    for step in range(load.answer - 1):
        yield plan_of(more if step == 0 else {}, [0], [load.prompt + step], [1])


def main() -> None:
    """Be the second process."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("segment")
    parser.add_argument("--dry-run-on-cpu", action="store_true")
    asked = parser.parse_args()
    if asked.dry_run_on_cpu:
        from bench.gpu.interpreter import mend

        mend()
    stage = Stage(is_dry=asked.dry_run_on_cpu, ends=float("inf"), report=lambda what, value: None)
    print(json.dumps(_fetched(stage, Segment.unpack(bytes.fromhex(asked.segment)))), flush=True)


if __name__ == "__main__":
    main()
