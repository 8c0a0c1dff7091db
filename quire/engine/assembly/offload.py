"""How much of a model's weights an engine leaves on disk, or in host memory beside a GPU, from its
settings.

A part of the wiring, like executor_choice.py, and loaded only where weights lie elsewhere. Knows
the settings and no model. Always holds: what computes drafts has all its weights where it computes,
and its memory is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from quire.base.errors import SettingError
from quire.config.groups import EngineConfig
from quire.config.memory import NO_DRAFT, DraftNeeds
from quire.engine.assembly.sizing import buffer_bytes
from quire.execute.executor import ExecutorClass
from quire.execute.missing_memory import TABLE_ENTRY_BYTES

if TYPE_CHECKING:  # each is loaded only where it computes
    from quire.execute.gpu.executor_class import TorchExecutorClass
    from quire.execute.gpu.offload_plan import OffloadSize
    from quire.execute.streamed_weights import StreamSize
    from quire.ranks.executor_class import RankedExecutorClass
    from quire.ranks.kinds import NativeRanks
    from quire.ranks.torch_kind import TorchRanks


def stream_size(config: EngineConfig, draft: DraftNeeds = NO_DRAFT) -> StreamSize:
    """Return how many weights stay on disk, of all ranks together, beside what drafts."""
    from quire.execute.streamed_weights import StreamSize

    return StreamSize(
        offload_bytes=config.executor.disk_offload_bytes,
        kv_bytes=config.cache.kv_cache_memory_bytes,
        buffers=_bytes_beside(config, draft, device_is_own=False),
    )


def offload_size(config: EngineConfig, *, is_gpu: bool) -> OffloadSize:
    """Return how much of a GPU's memory is to be saved. Raises SettingError where there is no GPU:
    its memory would be counted as saved and taken all the same."""
    from quire.execute.gpu.offload_plan import OffloadSize

    settings = config.executor
    if not is_gpu:
        raise SettingError(
            f"cpu_offload_gb is {settings.cpu_offload_gb} and there is no GPU here, so that no "
            "memory can be saved: leave it out, or take --executor native and --disk-offload-gb "
            "for a model larger than memory"
        )
    return OffloadSize(
        saved_bytes=settings.cpu_offload_bytes,
        kv_bytes=config.cache.kv_cache_memory_bytes,
        buffers=_bytes_beside(config, NO_DRAFT, device_is_own=True),
        host_bytes=sum(config.host_block_bytes.values()),
        num_engines=settings.data_parallel_size,
    )


def beside_drafts(
    config: EngineConfig, executor_class: ExecutorClass, draft: DraftNeeds
) -> ExecutorClass:
    """Return the class that choose_executor_class has made, with room for what drafts. Rank 0 has
    it; GPUs of other ranks leave as much, since all have as many KV blocks."""
    is_of_ranks = config.executor.num_ranks > 1
    if config.executor.disk_offload_gb is not None:
        from quire.execute.streamed_weights import StreamingExecutorClass

        size = stream_size(config, draft)
        if not is_of_ranks:
            return StreamingExecutorClass(size)
        ranks = cast("RankedExecutorClass", executor_class)
        return replace(ranks, kind=replace(cast("NativeRanks", ranks.kind), on_disk=size))
    buffers = _bytes_beside(config, draft.on_device(), device_is_own=True)
    if not is_of_ranks:
        one = cast("TorchExecutorClass", executor_class)
        assert one.offload is not None, "it was chosen with one"
        return replace(one, offload=one.offload.beside(buffers, draft.host_bytes))
    ranks = cast("RankedExecutorClass", executor_class)
    kind = cast("TorchRanks", ranks.kind)
    assert kind.offload is not None, "it was chosen with one"
    with_drafts = kind.offload.beside(buffers, draft.host_bytes)
    return replace(ranks, kind=replace(kind, offload=with_drafts))


def draft_bytes(
    draft: DraftNeeds,
    kv_bytes: int | None,
    token_bytes: int,
    max_sequences: int,
    block_size: int,
) -> int:
    """Return the memory of what drafts beside a KV cache of kv_bytes, at most. None: the cache is a
    share of what is left, and a part of it is for drafts. block_size: tokens of a block."""
    if kv_bytes is None or not draft.token_bytes:
        return draft.fixed_bytes
    num_tokens = kv_bytes // token_bytes
    longest = min(draft.max_model_len, num_tokens)
    drafted_tokens = min(num_tokens, max_sequences * -(-longest // block_size) * block_size)
    tables = max_sequences * longest * TABLE_ENTRY_BYTES
    return draft.fixed_bytes + drafted_tokens * draft.token_bytes + tables


def _bytes_beside(
    config: EngineConfig, draft: DraftNeeds, *, device_is_own: bool
) -> Callable[[int], int]:
    """Return what gives the memory that an engine takes beside weights, step buffers and KV cache,
    for the bytes of a cached token."""
    return partial(_beside_bytes, config, draft, device_is_own)


def _beside_bytes(
    config: EngineConfig, draft: DraftNeeds, device_is_own: bool, token_bytes: int
) -> int:
    kv_bytes, max_num_seqs = config.cache.kv_cache_memory_bytes, config.scheduler.max_num_seqs
    blocks = buffer_bytes(config, token_bytes, device_is_own=device_is_own)
    block_size = config.kv_block_tokens
    return blocks + draft_bytes(draft, kv_bytes, token_bytes, max_num_seqs, block_size)
