"""A model of 1.5 times the memory limit: decoding at the speed of the disk.

    python -m bench.disk_offload [--shape llama-3.2-1b] [--share 1.5] [--rounds 5] [--ranks 2]
                                 [--write]

A child process in a control group of its own, with a limit of the packed weights' size over the
share, loads the model with weights on disk (`--disk-offload-gb auto`) and runs steps of 1 and 16
rows, each before plain reads of as many bytes of the same file past the page cache, in several
ways of which the fastest counts. A second child
without a limit holds all weights in memory; logits must be equal bit for bit. Reports the share of
the disk's rate that steps reach, and how much more 16 rows decode than one. --ranks N measures the
same over N ranks of tensor parallelism too, in one group, with the limit of what they have
together (each has the whole embedding). Bytes are those that the system has read from the disk for
the processes during a step. Needs the right to make
a control group (root, version 1 or 2 with the memory controller). Writes
bench/results/disk_offload.json with --write.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.checkpoints import SHAPES, cache_folder, random_checkpoint
from bench.parallel.steps import run_step, step_batch
from quire.base.log import Log
from quire.bench.machine import machine_card
from quire.config.machine import num_usable_cores
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.streamed_weights import StreamingExecutorClass, StreamSize
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.kinds import NativeRanks
from quire.ranks.processes import RankProcesses
from quire.ranks.rank_executor import MirroredExecutor
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import PackCache

RESULTS = Path(__file__).parent / "results" / "disk_offload.json"
LIMITS = StepLimits(max_tokens=128, max_samples=64, max_sequences=16)
# Few positions before each row, so that the cache is small beside the weights.
ROWS, DEPTH, NUM_BLOCKS, BLOCK_SIZE = (1, 16), 96, 128, 16
# Readers and bytes of a read; which is fastest depends on the disk.
WAYS = ((1, 4 << 20), (2, 4 << 20), (4, 2 << 20))
ALIGNMENT = 4096
GOAL_SHARE, GOAL_RATIO = 0.85, 10.0


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield a control group with a memory limit. Exits where none can be made."""
    root = Path("/sys/fs/cgroup")
    one = (root / "memory").is_dir()
    group = (root / "memory" if one else root) / f"quire-bench-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if one else "memory.max")
        limit.write_text(str(limit_bytes))
    except OSError as error:
        sys.exit(f"no control group with a memory limit can be made: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def read_gb_per_s(path: Path, num_bytes: int) -> float:
    """Read a file past the page cache in several ways, a part of it each; return the best rate."""
    part = num_bytes // len(WAYS) // ALIGNMENT * ALIGNMENT
    return max(
        _read(path, way * part, part, readers, chunk_bytes)
        for way, (readers, chunk_bytes) in enumerate(WAYS)
    )


def _read(path: Path, first: int, num_bytes: int, readers: int, chunk_bytes: int) -> float:
    """Return GB/s of so many readers, each with huge pages to read into."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, chunk_bytes) for _ in range(readers)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)

    def read(reader: int) -> None:
        for start in range(reader * chunk_bytes, num_bytes, readers * chunk_bytes):
            os.preadv(descriptor, [buffers[reader]], first + start)

    began_s = time.perf_counter()
    with ThreadPoolExecutor(readers) as threads:
        list(threads.map(read, range(readers)))
    seconds = time.perf_counter() - began_s
    os.close(descriptor)
    return num_bytes / seconds / 1e9


def child(shape: str, folder: Path, *, ranks: int, streams: bool, rounds: int) -> None:
    """Load, run steps, and print what was found as JSON."""
    model = random_checkpoint(shape)
    program = build_program(open_model(model), dtype=DType.BF16, max_positions=2048)
    executor = executor_class(program, ranks, streams=streams)(
        program,
        open_checkpoint(model),
        ExecutorOptions(
            limits=LIMITS,
            num_threads=num_usable_cores(),
            pack_cache=PackCache(folder, Log("bench")),
        ),
    )
    executor.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    processes = [os.getpid()]
    if isinstance(executor, MirroredExecutor):
        assert isinstance(executor.processes, RankProcesses), "ranks of this machine"
        processes += executor.processes.process_ids
    steps = []
    packed = max(folder.iterdir(), key=lambda file: file.stat().st_mtime)  # others are of old runs
    for number in range(rounds + 1):
        for rows in ROWS:
            batch = step_batch(rows, 1, program.vocab_size, number, depth=DEPTH)
            before = disk_bytes(processes)
            ms, logits = run_step(executor, batch)
            read = disk_bytes(processes) - before if streams else 0
            steps.append(
                {
                    "rows": rows,
                    "ms": ms,
                    "bytes_read": read,
                    # A rank's file has its share only.
                    "disk_gb_per_s": read_gb_per_s(packed, read // ranks) if read else 0.0,
                    "logits": hashlib.blake2b(logits, digest_size=16).hexdigest(),
                }
            )
    print(json.dumps({"weights_bytes": weight_bytes(program, ranks), "steps": steps}))
    executor.close()


def executor_class(program: Program, ranks: int, *, streams: bool) -> Any:
    """Return the class of one process, or of ranks."""
    kv_bytes = NUM_BLOCKS * BLOCK_SIZE * program.caches[0].token_bytes
    size = StreamSize(offload_bytes=None, kv_bytes=kv_bytes) if streams else None
    if ranks > 1:
        return RankedExecutorClass(degree=ranks, kind=NativeRanks(on_disk=size))
    return NativeExecutor if size is None else StreamingExecutorClass(size)


def weight_bytes(program: Program, ranks: int) -> int:
    """Return the bytes of all weights, of all ranks together."""
    if ranks == 1:
        return program.weight_bytes
    return RankedExecutorClass(degree=ranks).memory_for(program, LIMITS).weights_bytes


def disk_bytes(processes: list[int]) -> int:
    """Return the bytes that the system has read from disks for some processes."""
    counts = [Path(f"/proc/{pid}/io").read_text().splitlines() for pid in processes]
    return sum(
        int(line.split()[1]) for lines in counts for line in lines if line.startswith("read_bytes")
    )


def run_child(args: argparse.Namespace, ranks: int, group: Path | None) -> dict[str, Any]:
    """Run a child, in a control group if there is one, and return what it printed."""
    command = [sys.executable, "-m", "bench.disk_offload", "--shape", args.shape]
    command += ["--rounds", str(args.rounds), "--ranks", str(ranks)]
    command += ["--child", "stream" if group else "whole"]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=enter, check=False)
    if done.returncode:
        sys.exit(f"a child ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return what one process, or ranks, do with weights on disk and in memory."""
    whole = run_child(args, ranks, None)
    limit_bytes = int(whole["weights_bytes"] / args.share)
    with memory_group(limit_bytes) as group:
        streamed = run_child(args, ranks, group)
    if [s["logits"] for s in whole["steps"]] != [s["logits"] for s in streamed["steps"]]:
        sys.exit("logits differ between weights on disk and weights in memory")
    found = summary(streamed["steps"])
    one, many = (found[f"{rows}_rows"] for rows in ROWS)
    return {
        "weights_bytes": whole["weights_bytes"],
        "limit_bytes": limit_bytes,
        "on_disk": found,
        "in_memory": summary(whole["steps"]),
        "batch_ratio": many["tokens_per_s"] / one["tokens_per_s"],
        "logits": whole["steps"][-1]["logits"],
    }


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of each number of rows; the first round warms up."""
    result: dict[str, Any] = {}
    for rows in ROWS:
        own = [step for step in steps if step["rows"] == rows][1:]
        result[f"{rows}_rows"] = {
            "ms": statistics.median(step["ms"] for step in own),
            "tokens_per_s": 1e3 * rows / statistics.median(step["ms"] for step in own),
            "bytes_read": statistics.median(step["bytes_read"] for step in own),
            "disk_gb_per_s": statistics.median(step["disk_gb_per_s"] for step in own),
            "share_of_disk": statistics.median(
                step["bytes_read"] / step["ms"] / 1e6 / step["disk_gb_per_s"]
                if step["bytes_read"]
                else 0
                for step in own
            ),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--share", type=float, default=1.5, help="the model over the limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism, measured too")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--child", choices=("stream", "whole"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = cache_folder() / f"packed-{args.shape}"
    if args.child:
        child(
            args.shape,
            folder,
            ranks=args.ranks,
            streams=args.child == "stream",
            rounds=args.rounds,
        )
        return
    machine = machine_card()
    alone = measured(args, 1)
    logits = alone.pop("logits")
    result = {
        "bench": "disk_offload",
        "machine": machine,
        "shape": args.shape,
        **alone,
        "goals": {"share_of_disk": GOAL_SHARE, "batch_ratio": GOAL_RATIO},
    }
    if args.ranks > 1:
        of_ranks = measured(args, args.ranks)
        if of_ranks.pop("logits") != logits:
            sys.exit("logits differ between ranks and one process")
        result["tensor_parallel"] = {"degree": args.ranks, **of_ranks}
    print(json.dumps(result, indent=1))
    if args.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
