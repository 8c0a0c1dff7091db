"""Weights outside of a device's memory as a way to fit: how many GiB, how slow, and from which
batch on it is worth it. Of a CPU they are on disk, of a GPU in host memory.

Predictions of the functions that the engine chooses with (quire/execute/streamed_weights.py,
quire/execute/gpu/offload_plan.py) and of the program's cost model. Knows no disk and no bus:
results are given for some rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.base.errors import SettingError
from quire.config.memory import DEFAULT_SHARE, MemoryNeeds, num_blocks_of
from quire.engine.assembly.offload import draft_bytes
from quire.execute.executor import ExecutorMemory
from quire.execute.gpu.offload_plan import plan_offload
from quire.execute.missing_memory import missing_bytes
from quire.execute.streamed_weights import StreamPlan, fitting_streams
from quire.obs.report import table
from quire.program.table import amount
from quire.sim.hardware import THIS
from quire.sim.plan import Planner, SizedModel, fitted
from quire.sim.ranks import by_stage

# A network disk or SATA, and two generations of NVMe.
DISK_GB_PER_S = (0.5, 3.0, 7.0)
# PCIe 4 and 5 with 16 lanes, and a link between CPU and GPU in one package.
BUS_GB_PER_S = (25.0, 50.0, 350.0)
MAX_BATCH = 4096


def disk_offload(planner: Planner, sized: SizedModel, length: int) -> dict[str, Any] | None:
    """Return what --disk-offload-gb auto would do; None on GPUs, or where it would not help.

    length: tokens of the requests that the speeds are for.
    """
    needs = sized.needs
    if planner.device.is_gpu or sized.config.speculation.proposer == "self":  # which is refused
        return None
    kv_bytes, max_num_seqs = _kv_bytes(planner, needs), needs.max_num_seqs

    def memory_with(plans: Sequence[StreamPlan]) -> ExecutorMemory:
        return replace(_whole(needs), weights_bytes=_kept_bytes(planner, sized, plans))

    streams = fitting_streams(
        sized.shares,
        memory_with,
        planner.memory.available_bytes,
        kv_bytes=kv_bytes,
        max_sequences=max_num_seqs,
        buffer_bytes=_draft_bytes(needs, kv_bytes),
    )
    saved = replace(needs, weights_bytes=_kept_bytes(planner, sized, streams))
    if fitted(saved, planner.memory, concurrency=planner.concurrency)[1]:
        return None
    streamed_bytes = sum(stream.streamed_bytes for stream in streams)
    if not streamed_bytes:  # the weights fit, something else does not
        return None
    of_rank = [stream.streamed_bytes for stream in streams]
    return {
        "gib": _gib(streamed_bytes),
        "streamed_bytes": streamed_bytes,
        "window_bytes": sum(stream.window_bytes for stream in streams),
        "streamed_bytes_of_rank": of_rank if len(of_rank) > 1 else None,
        "rates": [
            _at_rate(planner, sized, _read_of_stages(planner, sized, of_rank), "disk", rate, length)
            for rate in DISK_GB_PER_S
        ],
    }


def _kept_bytes(planner: Planner, sized: SizedModel, streams: Sequence[StreamPlan]) -> int:
    """Return the bytes of weights that stay in memory: of all ranks of this machine, or of the
    largest one, where each has a machine of its own."""
    if planner.device.name == THIS or len(sized.shares) == 1:
        return sized.needs.weights_bytes - sum(stream.saved_bytes for stream in streams)
    kept = (
        share.weight_bytes - stream.saved_bytes
        for share, stream in zip(sized.shares, streams, strict=True)
    )
    return max(kept)


def _read_of_stages(planner: Planner, sized: SizedModel, of_rank: Sequence[int]) -> list[int]:
    """Return the bytes that a disk reads for a step in each stage: of all ranks that share this
    machine's, or of the largest rank."""
    stages = by_stage(of_rank, sized.config.executor)
    return list(map(sum if planner.device.name == THIS else max, stages))


def cpu_offload(planner: Planner, sized: SizedModel, length: int) -> dict[str, Any] | None:
    """Return what --cpu-offload-gb would do on a GPU, or on the GPU of each rank; None on CPUs, and
    where it would not help.

    length: as in disk_offload.
    """
    needs, share = sized.needs, max(sized.shares, key=lambda one: one.weight_bytes)
    drafts_itself = sized.config.speculation.proposer == "self"  # which is refused
    if not planner.device.is_gpu or drafts_itself:
        return None
    kv_bytes, max_num_seqs = _kv_bytes(planner, needs), needs.max_num_seqs
    of_drafts = _draft_bytes(needs, kv_bytes)
    lacking = missing_bytes(
        share,
        _whole(needs),
        planner.memory.available_bytes,
        kv_bytes=kv_bytes,
        max_sequences=max_num_seqs,
        buffer_bytes=needs.exchange_bytes + needs.transfer_bytes + of_drafts,
    )
    gib = _gib(max(lacking, 0))
    try:
        plans = [plan_offload(own, int(gib * 2**30), is_gpu=True) for own in sized.shares]
    except SettingError:  # layers of one save less
        return None
    plan = plans[sized.shares.index(share)]
    saved = replace(needs, weights_bytes=needs.weights_bytes - plan.saved_bytes)
    if not plan.layers or fitted(saved, planner.memory, concurrency=planner.concurrency)[1]:
        return None
    copied = [one.copied_bytes for one in plans]
    copied_by_stage = list(map(max, by_stage(copied, sized.config.executor)))
    return {
        "gib": gib,
        "host_bytes": plan.copied_bytes,
        "saved_bytes": plan.saved_bytes,
        "rates": [
            _at_rate(planner, sized, copied_by_stage, "bus", rate, length) for rate in BUS_GB_PER_S
        ],
    }


def _draft_bytes(needs: MemoryNeeds, kv_bytes: int | None) -> int:
    return draft_bytes(
        needs.draft, kv_bytes, needs.token_bytes, needs.max_num_seqs, needs.block_size
    )


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
    planner: Planner,
    sized: SizedModel,
    read_bytes: Sequence[int],
    what: str,
    gb_per_s: float,
    length: int,
) -> dict[str, Any]:
    """Return the speeds at a rate. read_bytes: for a step, in each stage."""
    times_s = [num_bytes / gb_per_s / 1e9 for num_bytes in read_bytes]
    is_shared = planner.device.name == THIS

    def read_s(batch: int) -> float:
        groups = min(len(times_s), batch)  # steps in flight, each of which reads all weights
        return groups * sum(times_s) if is_shared else max(groups * max(times_s), sum(times_s))

    def step_s(batch: int) -> float:
        return batch / planner.decode_tokens_per_s(sized, length, batch)

    low, high = 1, MAX_BATCH
    while low < high:  # the first that computes as long as weights are read
        middle = (low + high) // 2
        is_enough = step_s(middle) >= read_s(middle)
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return {
        f"{what}_gb_per_s": gb_per_s,
        "tokens_per_s": 1 / max(read_s(1), step_s(1)),
        "batch": low,
        "batch_tokens_per_s": low / max(read_s(low), step_s(low)),
        "batch_kv_bytes": low * length * sized.needs.token_bytes,
    }


def disk_offload_text(offload: Mapping[str, Any], length: int) -> str:
    """Return the table of an outcome of disk_offload."""
    of_rank = offload["streamed_bytes_of_rank"]
    by_rank = ""
    if of_rank is not None:
        by_rank = f"Rank by rank: {', '.join(amount(num_bytes, 'B') for num_bytes in of_rank)}.\n"
    return (
        f"It runs with --disk-offload-gb {offload['gib']:g} --pack-cache DIRECTORY: this part of "
        f"the weights is\nread from disk in each step. {by_rank}Computed, for requests of "
        f"{length:,} tokens and some rates of disks:\n{_rates_text(offload, 'disk')}\n"
        "Batch: the number of requests from which the disk does not slow decoding; more gain "
        "nothing from it."
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
