"""How much of a model's weights an engine leaves on disk, from its settings.

A part of the wiring, like executor_choice.py, and loaded only where weights are on disk. Knows the
settings and no model. Always holds: what computes drafts has all its weights in memory, and its
memory is counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from quire.config.groups import EngineConfig
from quire.config.memory import NO_DRAFT, DraftNeeds
from quire.engine.assembly.sizing import buffer_bytes
from quire.execute.executor import ExecutorClass
from quire.execute.missing_memory import TABLE_ENTRY_BYTES
from quire.execute.streamed_weights import StreamingExecutorClass, StreamSize

if TYPE_CHECKING:  # loaded only where there are ranks
    from quire.ranks.executor_class import RankedExecutorClass
    from quire.ranks.kinds import NativeRanks


def stream_size(config: EngineConfig, draft: DraftNeeds = NO_DRAFT) -> StreamSize:
    """Return how many weights stay on disk, of all ranks together, beside what drafts."""
    return StreamSize(
        offload_bytes=config.executor.disk_offload_bytes,
        kv_bytes=config.cache.kv_cache_memory_bytes,
        buffers=partial(_bytes_beside, config, draft),
    )


def beside_drafts(
    config: EngineConfig, executor_class: ExecutorClass, draft: DraftNeeds
) -> ExecutorClass:
    """Return the class that choose_executor_class has made, with room for what drafts."""
    size = stream_size(config, draft)
    if isinstance(executor_class, StreamingExecutorClass):
        return StreamingExecutorClass(size)
    ranks = cast("RankedExecutorClass", executor_class)
    return replace(ranks, kind=replace(cast("NativeRanks", ranks.kind), on_disk=size))


def draft_bytes(
    draft: DraftNeeds, kv_bytes: int | None, token_bytes: int, max_sequences: int
) -> int:
    """Return the memory of what drafts beside a KV cache of kv_bytes, at most. None: the cache is a
    share of what is left, and a part of it is for drafts."""
    if kv_bytes is None or not draft.token_bytes:
        return draft.fixed_bytes
    num_tokens = kv_bytes // token_bytes
    tables = max_sequences * min(draft.max_model_len, num_tokens) * TABLE_ENTRY_BYTES
    return draft.fixed_bytes + num_tokens * draft.token_bytes + tables


def _bytes_beside(config: EngineConfig, draft: DraftNeeds, token_bytes: int) -> int:
    """Return the memory that an engine on a CPU takes beside weights, step buffers and KV cache."""
    kv_bytes, max_num_seqs = config.cache.kv_cache_memory_bytes, config.scheduler.max_num_seqs
    blocks = buffer_bytes(config, token_bytes, device_is_own=False)
    return blocks + draft_bytes(draft, kv_bytes, token_bytes, max_num_seqs)
