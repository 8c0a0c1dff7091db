"""How much of a model's weights an engine leaves on disk, from its settings.

A part of the wiring, like executor_choice.py, and loaded only where weights are on disk. Knows the
settings and no model.
"""

from __future__ import annotations

from functools import partial

from quire.config.groups import EngineConfig
from quire.engine.assembly.sizing import buffer_bytes
from quire.execute.streamed_weights import StreamSize


def stream_size(config: EngineConfig) -> StreamSize:
    """Return how many weights stay on disk, of all ranks together."""
    return StreamSize(
        offload_bytes=config.executor.disk_offload_bytes,
        kv_bytes=config.cache.kv_cache_memory_bytes,
        buffers=partial(_bytes_beside, config),
    )


def _bytes_beside(config: EngineConfig, token_bytes: int) -> int:
    """Return the memory that an engine on a CPU takes beside weights, step buffers and KV cache."""
    num_bytes = buffer_bytes(config, token_bytes, device_is_own=False)
    if num_tokens := config.speculation.speculate_history_tokens:
        from quire.speculative.history import history_bytes  # only where one is kept

        num_bytes += history_bytes(num_tokens)
    return num_bytes
