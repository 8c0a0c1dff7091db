"""Attention alone: decode against reading the cache once, prefill against PyTorch's attention.

Both in the shape of an 8B model: 32 heads over 8 KV heads of 128 columns, bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.batches import batch_of, columns_for
from bench.gpu.limits import device_limits
from bench.gpu.models import program_of
from bench.gpu.stage import Stage
from quire.execute.executor import StepLimits
from quire.execute.gpu.attention_steps import AttentionSteps, num_programs
from quire.execute.gpu.kernels.attention import attention
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.step_buffers import StepBuffers
from quire.program.ops import Attention


def decode(stage: Stage) -> None:
    """Measure 64 requests at a depth of 4,096, with caches of bf16 and int8."""
    count, depth = (3, 40) if stage.is_dry else (64, 4096)
    limits = device_limits(stage)
    for precision in ("bf16", "int8", "fp8"):
        for exact in (True, False):
            work, pool = _work(stage, [1] * count, [depth - 1] * count, precision, exact=exact)
            seconds = stage.replayed_seconds([work])
            read_bytes = pool.block_bytes * count * columns_for(depth)
            stage.report(
                f"{precision} {'exact' if exact else 'fast'}",
                {
                    "seconds": seconds,
                    "bytes_per_s": read_bytes / seconds,
                    "share_of_copy": read_bytes / seconds / limits["copy_bytes_per_s"],
                },
            )
            del work, pool


def prefill(stage: Stage) -> None:
    """Measure a causal prompt of 8,192 tokens; and the same by scaled_dot_product_attention."""
    tokens = 40 if stage.is_dry else 8192
    limits = device_limits(stage)
    work, _ = _work(stage, [tokens], [0], "bf16", exact=True)
    heads, kv_heads, head_dim = _geometry(stage)
    operations = 4 * heads * head_dim * tokens * (tokens + 1) / 2
    _tell_prefill(stage, "ours", stage.replayed_seconds([work]), operations, limits)
    q = torch.randn(1, heads, tokens, head_dim, device=stage.device).to(stage.dtype)
    k, v = (
        torch.randn(1, kv_heads, tokens, head_dim, device=stage.device).to(stage.dtype)
        for _ in range(2)
    )

    def theirs() -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )

    if stage.is_rehearsal:
        return  # the peer is not part of a rehearsal
    backend = torch.nn.attention.SDPBackend
    for name, kind in (("flash", backend.FLASH_ATTENTION), ("cudnn", backend.CUDNN_ATTENTION)):
        if stage.is_dry:
            kind = backend.MATH
        try:
            with torch.nn.attention.sdpa_kernel(kind):
                seconds = stage.replayed_seconds([theirs])
        except RuntimeError as error:  # a backend that this build or card does not have
            stage.report(f"pytorch {name}", {"not_run": str(error).splitlines()[0]})
            continue
        _tell_prefill(stage, f"pytorch {name}", seconds, operations, limits)


def _tell_prefill(
    stage: Stage, name: str, seconds: float, operations: float, limits: dict[str, Any]
) -> None:
    stage.report(
        name,
        {
            "seconds": seconds,
            "ops_per_s": operations / seconds,
            "share_of_peak": operations / seconds / limits["bf16_ops_per_s"],
        },
    )


def _geometry(stage: Stage) -> tuple[int, int, int]:
    trunk = program_of(stage, "Llama-3.1-8B").segments["trunk"]
    op = next(op for op in trunk if isinstance(op, Attention))
    return op.heads, op.kv_heads, op.head_dim


def _work(
    stage: Stage, counts: list[int], starts: list[int], precision: str, *, exact: bool
) -> tuple[Callable[[], None], CachePool]:
    """Return launches of one layer's attention, and the pool of that layer."""
    program = program_of(stage, "Llama-3.1-8B")
    heads, kv_heads, head_dim = _geometry(stage)
    columns = columns_for(counts[0] + starts[0])
    batch = batch_of(counts, starts, columns=columns, vocab_size=program.vocab_size, samples=False)
    tokens = len(batch.token_ids)
    limits = StepLimits(max_tokens=tokens, max_samples=1, max_sequences=len(counts))
    steps = AttentionSteps(program, limits=limits, exact=exact, programs=num_programs(stage.device))
    steps.allocate(stage.device)
    buffers = StepBuffers(
        max_tokens=tokens,
        max_sequences=len(counts),
        max_columns=columns,
        device=stage.device,
        others=steps.sizes(),
        stream=stage.stream,
    )
    buffers.load(batch, others=steps.plan(batch))
    steps.mirror(buffers.others)
    pool = CachePool.zeros(
        precision,
        layers=1,
        blocks=len(counts) * columns,
        kv_heads=kv_heads,
        block_size=16,
        head_dim=head_dim,
        device=stage.device,
    )
    if precision == "bf16":
        pool.values.normal_()
    else:
        shape = pool.values.shape
        drawn = torch.randint(-127, 128, shape, dtype=torch.int8, device=stage.device)
        pool.values.copy_(drawn.to(stage.dtype))  # bf16 holds the values exactly
        assert pool.scales is not None, "a quantized cache needs scales"
        pool.scales.fill_(0.01)
    q = torch.randn(tokens, heads * head_dim, device=stage.device).to(stage.dtype)
    y = torch.empty_like(q)

    def work() -> None:
        for tiles in steps.tiles(heads // kv_heads):
            attention(
                q,
                pool.layer(0),
                y,
                tiles=tiles,
                positions=buffers.positions[:tokens],
                tables=buffers.block_tables,
                scale=head_dim**-0.5,
            )

    return work, pool
