"""The largest step and the memory needs of an engine, from its settings and its executor class.

The engine sizes its KV cache with these before it loads a byte, and `quire plan` prints them; both
call the same functions, so they agree.
"""

from __future__ import annotations

from quire.config.groups import EngineConfig
from quire.config.memory import NO_DRAFT, DraftNeeds, MemoryNeeds
from quire.execute.executor import ExecutorSizing, StepLimits
from quire.program.program import Program


def step_limits(config: EngineConfig, sizing: ExecutorSizing) -> StepLimits:
    """Return the largest step.

    The default token limit fills the executor and has room for two tokens a request: one of its
    answer and one of a prompt. A larger step would only raise the latency between tokens.
    """
    max_num_seqs = config.scheduler.max_num_seqs
    given = config.scheduler.max_num_batched_tokens
    return StepLimits(
        max_tokens=given or max(sizing.full_step_tokens(), 2 * max_num_seqs),
        max_samples=sizing.head_rows(max_num_seqs),
        max_sequences=max_num_seqs,
    )


def pass_limits(config: EngineConfig, sizing: ExecutorSizing) -> StepLimits:
    """Return the largest pass of the first layers that draft: a token of each request."""
    max_num_seqs = config.scheduler.max_num_seqs
    return StepLimits(
        max_tokens=max_num_seqs,
        max_samples=sizing.head_rows(max_num_seqs),
        max_sequences=max_num_seqs,
    )


def memory_needs(
    config: EngineConfig,
    program: Program,
    sizing: ExecutorSizing,
    limits: StepLimits,
    *,
    model_max_len: int,
    device_is_own: bool,
    draft: DraftNeeds = NO_DRAFT,
) -> MemoryNeeds:
    """Return what `program` needs in memory, as plan_memory takes it.

    device_is_own: the device's memory is not the host's. draft: what drafts need.
    """
    needed = sizing.memory_for(program, limits)
    if device_is_own:
        draft = draft.on_device()
    return MemoryNeeds(
        weights_bytes=needed.weights_bytes,
        step_bytes=needed.step_bytes,
        token_bytes=needed.token_bytes,
        block_size=config.kv_block_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        model_max_len=model_max_len,
        max_model_len=config.model.max_model_len,
        kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
        draft=draft,
        exchange_bytes=needed.exchange_bytes,
        transfer_bytes=buffer_bytes(config, needed.token_bytes, device_is_own=device_is_own),
    )


def buffer_bytes(config: EngineConfig, token_bytes: int, *, device_is_own: bool) -> int:
    """Return the memory of what computes that KV blocks on their way to and from a tier, other
    engines or a store take. token_bytes: of a token in the KV cache."""
    in_host = config.host_block_bytes
    if not config.cache.has_tier and not in_host:
        return 0
    from quire.engine.assembly.tier import disk_buffer_bytes, staging_bytes  # only where it is used

    block_bytes = token_bytes * config.kv_block_tokens
    num_bytes = 0
    if not device_is_own:
        num_bytes += sum(in_host.values())
        if config.cache.kv_tier_path is not None:
            num_bytes += disk_buffer_bytes(block_bytes)
    is_torch = config.executor.executor == "torch"
    if device_is_own or (is_torch and config.executor.num_ranks == 1):  # ranks share host memory
        num_bytes += staging_bytes(block_bytes, in_host=bool(in_host))
    return num_bytes
