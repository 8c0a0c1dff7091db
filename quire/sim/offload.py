"""Weights outside of a device's memory as a way to fit: how many GiB, how slow, and from which
batch on it is worth it. Of a CPU they are on disk, of a GPU in host memory.

Predictions of the functions that the engine chooses with (quire/execute/streamed_weights.py,
quire/execute/gpu/offload_plan.py) and of the program's cost model. Knows no disk and no bus:
results are given for some rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.base.errors import SettingError
from quire.config.memory import DEFAULT_SHARE, MemoryNeeds, num_blocks_of
from quire.execute.executor import ExecutorMemory
from quire.execute.gpu.offload_plan import plan_offload
from quire.execute.missing_memory import missing_bytes
from quire.execute.streamed_weights import fitting_stream
from quire.obs.report import table
from quire.sim.plan import Planner, SizedModel, fitted

# A network disk or SATA, and two generations of NVMe.
DISK_GB_PER_S = (0.5, 3.0, 7.0)
# PCIe 4 and 5 with 16 lanes, and a link between CPU and GPU in one package.
BUS_GB_PER_S = (25.0, 50.0, 350.0)
MAX_BATCH = 4096


def disk_offload(planner: Planner, sized: SizedModel, length: int) -> dict[str, Any] | None:
    """Return what --disk-offload-gb auto would do; None on GPUs, or where it would not help.

    length: tokens of the requests that the speeds are for.
    """
    if planner.device.is_gpu or sized.config.executor.num_ranks > 1:
        return None
    needs = sized.needs
    stream = fitting_stream(
        sized.program,
        _whole(needs),
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
        "gib": _gib(stream.streamed_bytes),
        "streamed_bytes": stream.streamed_bytes,
        "window_bytes": stream.window_bytes,
        "rates": [
            _at_rate(planner, sized, stream.streamed_bytes, "disk", rate, length)
            for rate in DISK_GB_PER_S
        ],
    }


def cpu_offload(planner: Planner, sized: SizedModel, length: int) -> dict[str, Any] | None:
    """Return what --cpu-offload-gb would do on a GPU, or on the GPU of each rank; None on CPUs, for
    stages, and where it would not help.

    length: as in disk_offload.
    """
    needs, share = sized.needs, max(sized.shares, key=lambda one: one.weight_bytes)
    computes = sized.config.speculation.computes  # drafts, which are refused beside it
    if not planner.device.is_gpu or len(sized.stages) > 1 or computes:
        return None
    lacking = missing_bytes(
        share,
        _whole(needs),
        planner.memory.available_bytes,
        kv_bytes=_kv_bytes(planner, needs),
        max_sequences=needs.max_num_seqs,
        buffer_bytes=needs.exchange_bytes + needs.transfer_bytes,
    )
    gib = _gib(max(lacking, 0))
    try:
        plan = plan_offload(share, int(gib * 2**30), is_gpu=True)
    except SettingError:  # its layers save less
        return None
    saved = replace(needs, weights_bytes=needs.weights_bytes - plan.saved_bytes)
    if not plan.layers or fitted(saved, planner.memory, concurrency=planner.concurrency)[1]:
        return None
    return {
        "gib": gib,
        "host_bytes": plan.copied_bytes,
        "saved_bytes": plan.saved_bytes,
        "rates": [
            _at_rate(planner, sized, plan.copied_bytes, "bus", rate, length)
            for rate in BUS_GB_PER_S
        ],
    }


def _whole(needs: MemoryNeeds) -> ExecutorMemory:
    return ExecutorMemory(
        weights_bytes=needs.weights_bytes,
        step_bytes=needs.step_bytes,
        token_bytes=needs.token_bytes,
    )


def _gib(num_bytes: int) -> float:
    return math.ceil(num_bytes / 2**30 * 100) / 100


def _kv_bytes(planner: Planner, needs: MemoryNeeds) -> int | None:
    """Return the bytes of a KV cache that was asked for, by its size or by what it must hold."""
    if needs.kv_cache_memory_bytes is not None or planner.context is None:
        return needs.kv_cache_memory_bytes
    blocks = (planner.concurrency or 1) * num_blocks_of(planner.context, needs.block_size)
    # The plan takes a share of what is left for the KV cache.
    return int((blocks + 1) * needs.block_size * needs.token_bytes / DEFAULT_SHARE) + 1


def _at_rate(
    planner: Planner, sized: SizedModel, num_bytes: int, what: str, gb_per_s: float, length: int
) -> dict[str, Any]:
    read_s = num_bytes / gb_per_s / 1e9

    def step_s(batch: int) -> float:
        (seconds,) = planner.stage_times_s(sized, [1] * batch, [length - 1] * batch)
        return seconds

    low, high = 1, MAX_BATCH
    while low < high:  # the first that computes as long as weights are read
        middle = (low + high) // 2
        low, high = (low, middle) if step_s(middle) >= read_s else (middle + 1, high)
    return {
        f"{what}_gb_per_s": gb_per_s,
        "tokens_per_s": 1 / max(read_s, step_s(1)),
        "batch": low,
        "batch_tokens_per_s": low / max(read_s, step_s(low)),
        "batch_kv_bytes": low * length * sized.needs.token_bytes,
    }


def disk_offload_text(offload: Mapping[str, Any], length: int) -> str:
    """Return the table of an outcome of disk_offload."""
    return (
        f"It runs with --disk-offload-gb {offload['gib']:g} --pack-cache DIRECTORY: this part of "
        f"the weights is\nread from disk in each step. Computed, for requests of {length:,} tokens "
        f"and some rates of disks:\n{_rates_text(offload, 'disk')}\nBatch: the number of requests "
        "from which the disk does not slow decoding; more gain nothing from it."
    )


def cpu_offload_text(offload: Mapping[str, Any], length: int) -> str:
    """Return the table of an outcome of cpu_offload."""
    host_gib = offload["host_bytes"] / 2**30
    return (
        f"It runs with --cpu-offload-gb {offload['gib']:g}: {host_gib:.2f} GiB of a GPU's weights "
        "stay in host memory\nand are copied in each step. Computed, for requests of "
        f"{length:,} tokens and some rates of buses:\n{_rates_text(offload, 'bus')}\nBatch: the "
        "number of requests from which the bus does not slow decoding; the GPU must have their\n"
        "KV cache."
    )


def _rates_text(offload: Mapping[str, Any], what: str) -> str:
    return table(
        (f"{what.capitalize()} GB/s", "tok/s of one", "batch", "tok/s of all", "KV cache GiB"),
        [
            (
                f"{row[f'{what}_gb_per_s']:g}",
                f"{row['tokens_per_s']:.3g}",
                f"{'over ' * (row['batch'] == MAX_BATCH)}{row['batch']:,}",
                f"{row['batch_tokens_per_s']:,.3g}",
                f"{row['batch_kv_bytes'] / 2**30:.1f}",
            )
            for row in offload["rates"]
        ],
    )
