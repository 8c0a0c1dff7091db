"""Seconds until an 8B model from local files can answer: loading, the first step, all graphs.

Graphs are of decode steps, then of mixed steps; with weights as in the files, and with
`--quantization fp8`. A server captures graphs when their sizes first occur. The files are written
first (random bytes that are finite numbers), uncounted; they are then in the page cache, as after a
restart.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.batches import batch_of, columns_for
from bench.gpu.models import LLAMA, TINY, executor_of, program_of
from bench.gpu.stage import Stage
from quire.engine.assembly.precision import with_precision
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.gpu.executor import TorchExecutor
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.execute.gpu.step_sizes import Size
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint

SHARD_BYTES = 4 * 2**30
SEQUENCES, STEP_TOKENS = 256, 4096
PRECISIONS = ("none", "fp8")


def ready(stage: Stage) -> None:
    """Write the files; then load as `--quantization` says, take a first step, capture."""
    config = LLAMA | (TINY if stage.is_dry else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = open_model(folder)
        plain = build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)
        if stage.is_rehearsal:
            return _rehearse(stage)
        began = time.perf_counter()
        _write_shards(folder, plain)
        stage.report("seconds_to_write", time.perf_counter() - began)
        for quantization in PRECISIONS:
            if not stage.has_time():
                return
            program = with_precision(plain, quantization, open_checkpoint(folder))
            stage.report(quantization, _seconds(stage, folder, program))


def _seconds(stage: Stage, folder: Path, program: Program) -> dict[str, Any]:
    sequences = 4 if stage.is_dry else SEQUENCES
    began = time.perf_counter()
    executor = TorchExecutorClass(stage.device)(
        program,
        open_checkpoint(folder),
        ExecutorOptions(
            limits=StepLimits(
                max_tokens=16 if stage.is_dry else STEP_TOKENS,
                max_samples=sequences,
                max_sequences=sequences,
            )
        ),
    )
    sizes = executor.sizes
    columns = columns_for(max(sizes.mixed, default=1))
    executor.allocate_cache(sequences * columns, 16)
    stage.settle()
    found: dict[str, Any] = {
        "weight_bytes": program.weight_bytes,
        "to_load": time.perf_counter() - began,
    }
    taken: dict[str, int] = {}
    for what, steps in _steps(executor).items():
        free = _free_bytes(stage)
        for counts in steps:
            _step(executor, program, counts, columns)
            stage.settle()
        found[what] = time.perf_counter() - began
        taken[what] = free - _free_bytes(stage)
    found |= {"graphs": len(sizes.ones), "mixed_graphs": len([*sizes.all_mixed()])}
    found["bytes_taken"] = taken  # by kernels, libraries and graphs
    executor.close()
    return found


def _free_bytes(stage: Stage) -> int:
    return 0 if stage.is_dry else torch.cuda.mem_get_info(stage.device)[0]


def _steps(executor: TorchExecutor) -> dict[str, list[list[int]]]:
    """Return tokens of each sequence in a step of each captured size, in order of size."""
    sizes = executor.sizes
    ones = [[1] * size for size in sizes.ones]
    return {
        "to_first_step": ones[:1],
        "to_all_graphs": ones[1:],
        "to_all_mixed_graphs": [_mixed(size) for size in sizes.all_mixed()],
    }


def _mixed(size: Size) -> list[int]:
    """Return tokens of each sequence of a mixed step of this size: one has several."""
    others = min(size.sequences, size.tokens - 1) - 1
    return [1] * others + [size.tokens - others]


def _step(executor: TorchExecutor, program: Program, counts: list[int], columns: int) -> None:
    batch = batch_of(
        counts, [0] * len(counts), columns=columns, vocab_size=program.vocab_size, samples=True
    )
    executor.run_trunk(batch, head_rows=len(counts))
    executor.run_head(batch, 0, len(counts))


def _rehearse(stage: Stage) -> None:
    """Run the same steps, with nothing loaded."""
    for precision in PRECISIONS:
        program = program_of(stage, "Llama-3.1-8B", precision=precision)
        rows = {"max_tokens": STEP_TOKENS, "max_sequences": SEQUENCES}
        executor = executor_of(stage, program, exact=True, blocks=2**16, **rows)
        columns = columns_for(max(executor.sizes.mixed, default=1))
        for steps in _steps(executor).values():
            for counts in steps:
                _step(executor, program, counts, columns)


def _write_shards(folder: Path, program: Program) -> None:
    """Write every tensor of the program, small random bf16 numbers, in shards and an index."""
    rng = np.random.default_rng(0)
    # Random signs and fractions, exponents about 2^-8: any slice of these is a tensor.
    drawn = rng.integers(0, 2**16, 2**22, dtype=np.uint16)
    drawn = (drawn & np.uint16(0x807F)) | np.uint16(0x3B80)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for source, shape in program.source_shapes().items():
        num_bytes = 2 * int(np.prod(shape))
        if size + num_bytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][source] = shape
        size += num_bytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        _write(folder / file, shard, drawn)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write(path: Path, shapes: dict[str, tuple[int, ...]], drawn: np.ndarray) -> None:
    header, first = {}, 0
    for name, shape in shapes.items():
        end = first + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [first, end]}
        first = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        left = first // 2
        while left:
            taken = min(left, len(drawn))
            file.write(drawn[:taken].tobytes())
            left -= taken
