"""Weights on disk as a way to fit: how many GiB, how slow, and from which batch on it is worth it.

Predictions of the functions that the engine chooses with (quire/execute/streamed_weights.py) and of
the program's cost model. Knows no disk: results are given for some rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.memory import DEFAULT_SHARE, MemoryNeeds, num_blocks_of
from quire.execute.executor import ExecutorMemory
from quire.execute.streamed_weights import fitting_stream
from quire.obs.report import table
from quire.sim.plan import Planner, SizedModel, fitted

# A network disk or SATA, and two generations of NVMe.
DISK_GB_PER_S = (0.5, 3.0, 7.0)
MAX_BATCH = 4096


def disk_offload(planner: Planner, sized: SizedModel, length: int) -> dict[str, Any] | None:
    """Return what --disk-offload-gb auto would do; None on GPUs, or where it would not help.

    length: tokens of the requests that the speeds are for.
    """
    if planner.device.is_gpu or sized.config.executor.num_ranks > 1:
        return None
    needs = sized.needs
    whole = ExecutorMemory(
        weights_bytes=needs.weights_bytes,
        step_bytes=needs.step_bytes,
        token_bytes=needs.token_bytes,
    )
    stream = fitting_stream(
        sized.program,
        whole,
        planner.memory.available_bytes,
        kv_bytes=_kv_bytes(planner, needs),
        max_sequences=needs.max_num_seqs,
    )
    saved = replace(needs, weights_bytes=needs.weights_bytes - stream.saved_bytes)
    if fitted(saved, planner.memory, concurrency=planner.concurrency)[1]:
        return None
    if not stream.streamed_bytes:  # the weights fit, something else does not
        return None
    return {
        "gib": math.ceil(stream.streamed_bytes / 2**30 * 100) / 100,
        "streamed_bytes": stream.streamed_bytes,
        "window_bytes": stream.window_bytes,
        "rates": [
            _at_rate(planner, sized, stream.streamed_bytes, rate, length) for rate in DISK_GB_PER_S
        ],
    }


def _kv_bytes(planner: Planner, needs: MemoryNeeds) -> int | None:
    """Return the bytes of a KV cache that was asked for, by its size or by what it must hold."""
    if needs.kv_cache_memory_bytes is not None or planner.context is None:
        return needs.kv_cache_memory_bytes
    blocks = (planner.concurrency or 1) * num_blocks_of(planner.context, needs.block_size)
    # The plan takes a share of what is left for the KV cache.
    return int((blocks + 1) * needs.block_size * needs.token_bytes / DEFAULT_SHARE) + 1


def _at_rate(
    planner: Planner, sized: SizedModel, num_bytes: int, gb_per_s: float, length: int
) -> dict[str, Any]:
    disk_s = num_bytes / gb_per_s / 1e9

    def step_s(batch: int) -> float:
        return planner.step_s(sized.program, [1] * batch, [length - 1] * batch)

    low, high = 1, MAX_BATCH
    while low < high:  # the first that computes as long as the disk reads
        middle = (low + high) // 2
        low, high = (low, middle) if step_s(middle) >= disk_s else (middle + 1, high)
    return {
        "disk_gb_per_s": gb_per_s,
        "tokens_per_s": 1 / max(disk_s, step_s(1)),
        "batch": low,
        "batch_tokens_per_s": low / max(disk_s, step_s(low)),
        "batch_kv_bytes": low * length * sized.needs.token_bytes,
    }


def offload_text(offload: Mapping[str, Any], length: int) -> str:
    """Return the table of an outcome of disk_offload."""
    rows = table(
        ("Disk GB/s", "tok/s of one", "batch", "tok/s of all", "KV cache GiB"),
        [
            (
                f"{row['disk_gb_per_s']:g}",
                f"{row['tokens_per_s']:.3g}",
                f"{row['batch']:,}",
                f"{row['batch_tokens_per_s']:,.3g}",
                f"{row['batch_kv_bytes'] / 2**30:.1f}",
            )
            for row in offload["rates"]
        ],
    )
    return (
        f"It runs with --disk-offload-gb {offload['gib']:g} --pack-cache DIRECTORY: so much of the "
        f"weights is\nread from disk in each step. Computed, for requests of {length:,} tokens and "
        f"some rates of disks:\n{rows}\nBatch: from so many requests on the disk does not slow "
        "decoding; more of them gain nothing from it."
    )
