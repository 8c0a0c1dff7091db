"""Open the torch executor on CPU tensors for a tiny model, and the executor to compare it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.gpu.executor import LaunchOptions, TorchExecutor
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.execute.gpu.graphs import Capture
from quire.execute.gpu.load import load
from quire.execute.gpu.stream import Stream
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights.binding import bind
from quire.weights.checkpoint import open_checkpoint
from tests.models.generate import sequence_batch

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def program_of(
    folder: Path, dtype: DType, precision: str = "none", kv_cache_dtype: str = "auto"
) -> Program:
    """Return the program of a checkpoint under the given settings."""
    spec = open_model(folder)
    plain = build_program(spec, dtype=dtype, max_positions=spec.max_positions)
    return with_kv_cache_dtype(quantize(plain, precision), kv_cache_dtype)


def packed_for(kernels: bool) -> dict[str, Any]:
    """Return how `load` packs integer weights, and those of experts."""
    if not kernels:
        return {}
    from quire.execute.gpu.kernels.grouped_ints import stacked
    from quire.execute.gpu.products import pack_ints

    return {"pack": pack_ints, "stack": stacked}


def torch_executor(
    folder: Path,
    program: Program,
    *,
    exact: bool = True,
    max_tokens: int = 128,
    max_samples: int = 0,
    blocks: int = 0,
    kernels: bool = False,
    capture: Capture | None = None,
    stream: Stream | None = None,
) -> TorchExecutor:
    """Create the executor, with NaN in all buffers before each run and KV cache for
    max_model_len. max_samples: rows of a slice of the head; 0: those of a step.
    """
    executor = TorchExecutor(
        program,
        load(program, bind(program, open_checkpoint(folder)), CPU, None, **packed_for(kernels)),
        device=CPU,
        exact=exact,
        limits=StepLimits(
            max_tokens=max_tokens, max_samples=max_samples or max_tokens, max_sequences=16
        ),
        launch=LaunchOptions(kernels=kernels, capture=capture, stream=stream),
        poison=True,
    )
    executor.allocate_cache(blocks or -(-program.max_positions // BLOCK_SIZE) + 1, BLOCK_SIZE)
    return executor


def reference_executor(
    folder: Path, program: Program, *, max_tokens: int = 128
) -> ReferenceExecutor:
    """Create the reference executor."""
    executor = ReferenceExecutor(
        program,
        open_checkpoint(folder),
        ExecutorOptions(
            limits=StepLimits(max_tokens=max_tokens, max_samples=max_tokens, max_sequences=16)
        ),
    )
    executor.allocate_cache(-(-program.max_positions // BLOCK_SIZE) + 1, BLOCK_SIZE)
    return executor


def made(device: torch.device = CPU, *, exact: bool = True) -> TorchExecutorClass:
    """Return the executor class that the engine receives."""
    return TorchExecutorClass(device, exact)


def sequence_logits(
    executor: TorchExecutor, ids: list[int], *, max_positions: int, chunk: int = 128
) -> NDArray[np.float32]:
    """Return logits as tests.models.generate.logits_of does; head and trunk run together."""
    rows = []
    for start in range(0, len(ids), chunk):
        batch = sequence_batch(ids[start : start + chunk], start, max_positions)
        executor.run_trunk(batch, head_rows=len(batch.sample_rows))
        logits = torch.as_tensor(executor.run_head(batch, 0, len(batch.token_ids)))
        rows.append(logits.clone().numpy())
    return np.concatenate(rows)
