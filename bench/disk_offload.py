"""A model of 1.5 times the memory limit: decoding at the speed of the disk.

    python -m bench.disk_offload [--shape llama-3.2-1b] [--share 1.5] [--rounds 5] [--write]

A child process in a control group of its own, with a limit of the packed weights' size over the
share, loads the model with weights on disk (`--disk-offload-gb auto`) and runs steps of 1 and 16
rows, each before plain reads of as many bytes of the same file past the page cache, in several
ways of which the fastest counts. A second child
without a limit holds all weights in memory; logits must be equal bit for bit. Reports the share of
the disk's rate that steps reach, and how much more 16 rows decode than one. Needs the right to make
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
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import PackCache

RESULTS = Path(__file__).parent / "results" / "disk_offload.json"
ROWS, KV_BYTES, NUM_BLOCKS, BLOCK_SIZE = (1, 16), 64 << 20, 1024, 16
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


def child(shape: str, folder: Path, *, streams: bool, rounds: int) -> None:
    """Load, run steps, and print what was found as JSON."""
    model = random_checkpoint(shape)
    spec = open_model(model)
    program = build_program(spec, dtype=DType.BF16, max_positions=2048)
    make: Any = (
        StreamingExecutorClass(StreamSize(offload_bytes=None, kv_bytes=KV_BYTES))
        if streams
        else NativeExecutor
    )
    executor = make(
        program,
        open_checkpoint(model),
        ExecutorOptions(
            limits=StepLimits(max_tokens=128, max_samples=64, max_sequences=16),
            num_threads=num_usable_cores(),
            pack_cache=PackCache(folder, Log("bench")),
        ),
    )
    executor.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    stream = next(
        (weight.stream for weight in executor.weights.values() if weight.stream is not None), None
    )
    steps = []
    packed = max(folder.iterdir(), key=lambda file: file.stat().st_mtime)  # others are of old runs
    for number in range(rounds + 1):
        for rows in ROWS:
            batch = step_batch(rows, 1, program.vocab_size, number)
            read = stream.bytes_read if stream is not None else 0
            ms, logits = run_step(executor, batch)
            read = stream.bytes_read - read if stream is not None else 0
            steps.append(
                {
                    "rows": rows,
                    "ms": ms,
                    "bytes_read": read,
                    "disk_gb_per_s": read_gb_per_s(packed, read) if read else 0.0,
                    "logits": hashlib.blake2b(logits, digest_size=16).hexdigest(),
                }
            )
    print(json.dumps({"weights_bytes": program.weight_bytes, "steps": steps}))


def run_child(args: argparse.Namespace, group: Path | None) -> dict[str, Any]:
    """Run a child, in a control group if there is one, and return what it printed."""
    command = [sys.executable, "-m", "bench.disk_offload", "--shape", args.shape]
    command += ["--rounds", str(args.rounds), "--child", "stream" if group else "whole"]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=enter, check=False)
    if done.returncode:
        sys.exit(f"a child ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--child", choices=("stream", "whole"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = cache_folder() / f"packed-{args.shape}"
    if args.child:
        child(args.shape, folder, streams=args.child == "stream", rounds=args.rounds)
        return
    whole = run_child(args, None)
    limit_bytes = int(whole["weights_bytes"] / args.share)
    with memory_group(limit_bytes) as group:
        streamed = run_child(args, group)
    if [s["logits"] for s in whole["steps"]] != [s["logits"] for s in streamed["steps"]]:
        sys.exit("logits differ between weights on disk and weights in memory")
    found = summary(streamed["steps"])
    one, many = (found[f"{rows}_rows"] for rows in ROWS)
    result = {
        "bench": "disk_offload",
        "machine": machine_card(),
        "shape": args.shape,
        "weights_bytes": whole["weights_bytes"],
        "limit_bytes": limit_bytes,
        "on_disk": found,
        "in_memory": summary(whole["steps"]),
        "batch_ratio": many["tokens_per_s"] / one["tokens_per_s"],
        "goals": {"share_of_disk": GOAL_SHARE, "batch_ratio": GOAL_RATIO},
    }
    print(json.dumps(result, indent=1))
    if args.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
