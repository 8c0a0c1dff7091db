"""Compiles what steps of whole models launch, for a card that is not there.

    TRITON_INTERPRET=0 python -m tests.gpu.compile_models [MODEL...]

compile_for.py gives launchers arguments of its own; here an executor does, with the strides, types
and sizes of its buffers, for the models of bench/gpu in all precisions, both modes, steps of few
rows and of many. Each kernel is compiled once for what Triton tells apart and kept in its cache
(TRITON_CACHE_DIR): a card's machine with the same Triton finds it there, under the same path.
Prints a JSON line a model and precision; exit code 1 where something does not compile. Nothing is
computed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from bench.gpu.batches import batch_of, columns_for
from bench.gpu.models import SHAPES
from quire.execute.gpu import attention_steps
from quire.execute.gpu.executor import TorchExecutor
from quire.execute.gpu.kernels.int4_layout import BLOCK, PANEL, Int4Weight
from quire.execute.gpu.kernels.linear_bytes import ByteWeight
from quire.execute.gpu.load import E4M3, TORCH_TYPES, Fp8Weight, Loaded
from quire.models.registry import build_program, open_model
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.ops import DType, Rows, Weight, WeightForm
from quire.program.program import Program
from quire.program.quantize import quantize
from tests.gpu.compile_for import TARGET, compiled
from tests.kernels.sampling_cases import make_batch

PRECISIONS = (
    ("none", "auto"),
    ("none", "int8"),
    ("fp8", "fp8"),
    ("fp8-block", "auto"),
    ("int8", "auto"),
    ("int4-g128", "auto"),
)
# Tokens of each sequence of a step, and of those before.
STEPS = [([1] * rows, [40] * rows) for rows in (1, 17, 33, 64)]
STEPS += [([count], [0]) for count in (20, 40, 100, 300, 2000)] + [([40, 1, 1], [0, 30, 300])]
MOST_TOKENS, MOST_ROWS = 4096, 64
PROGRAMS = 4 * 132  # of an H200


class Kernels:
    """What was launched, by Triton's keys, and what did not compile."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.failed: dict[str, str] = {}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """While open, launches compile."""
        launch, kernels = JITFunction.run, self

        def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
            kernels.launched(self, arguments, named)

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = launch

    def launched(self, kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """As a launch asks for it, debugging options included: they are part of the cache's key."""
        named |= {"debug": knobs.runtime.debug}
        named |= {"instrumentation_mode": knobs.compilation.instrumentation_mode}
        bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
        _, specialization, options = bind(*arguments, **named)
        name = kernel.fn.__name__
        key = f"{name} {specialization} {options}"
        if key in self.keys:
            return
        self.keys.add(key)
        try:
            compiled(kernel, arguments, named)
        except Exception as error:  # noqa: BLE001  of a compiler: told, and the next one is tried
            self.failed[key] = f"{name}: {type(error).__name__}: {error}"


def steps(program: Program, *, exact: bool) -> None:
    """Have all of STEPS launched, with choice and scores."""
    executor = TorchExecutor(
        program,
        weights(program),
        device=torch.device("cpu"),
        exact=exact,
        max_rows={Rows.TOKENS: MOST_TOKENS, Rows.SAMPLES: MOST_ROWS, Rows.SEQUENCES: MOST_ROWS},
        kernels=True,
    )
    executor.allocate_cache(8, 16)
    for counts, starts in STEPS:
        columns = columns_for(max(map(sum, zip(counts, starts, strict=True))))
        made = batch_of(
            counts, starts, columns=columns, vocab_size=program.vocab_size, samples=True
        )
        # In blocks that are there.
        tables, slots = np.zeros_like(made.block_tables), made.kv_slots % 16
        batch = replace(made, block_tables=tables, kv_slots=slots)
        rows = len(counts)
        executor.run_trunk(batch, head_rows=rows)
        logits = executor.run_head(batch, 0, rows)
        slots = np.arange(rows, dtype=np.int32)
        for wishes in (
            make_batch(rows, temperature=1.0),
            make_batch(rows, num_logprobs=2, repetition_penalty=1.1, history=[[1, 2]] * rows),
        ):
            executor.sample_later(logits, wishes, slots)
    executor.close()


def weights(program: Program) -> Loaded:
    """Of a program's shapes, of whatever is in memory."""
    plain = {
        name: torch.empty(_shape(weight), dtype=_dtype(weight))
        for name, weight in program.weights.items()
        if weight.quantized is None
    }
    few = {
        name: _few(weight)
        for name, weight in program.weights.items()
        if weight.quantized is not None
    }
    return Loaded(plain, few)


def _shape(weight: Weight) -> tuple[int, ...]:
    return (weight.rows, weight.columns) if weight.columns else (weight.rows,)


def _dtype(weight: Weight) -> torch.dtype:
    return torch.float32 if weight.form is WeightForm.VECTOR else TORCH_TYPES[weight.dtype]


def _few(weight: Weight) -> Any:
    scheme, rows, columns = weight.quantized, weight.rows, weight.columns
    assert scheme is not None, "asked for weights in few bits"
    if scheme.is_float:
        blocks = (
            (-(-rows // scheme.group), -(-columns // scheme.group)) if scheme.group else (rows,)
        )
        values = torch.empty((rows, columns), dtype=E4M3)
        return Fp8Weight(scheme=scheme, values=values, scales=torch.ones(blocks))
    if scheme.bits == 8:
        values = torch.empty((rows, -(-columns // 128) * 128), dtype=torch.int8)
        return ByteWeight(values, torch.ones(rows))
    packed = torch.empty((-(-rows // PANEL), -(-columns // BLOCK), 64, 64), dtype=torch.uint8)
    scales = torch.ones((scheme.num_groups(columns), rows), dtype=torch.bfloat16)
    zeros = torch.zeros(scales.shape, dtype=torch.uint8) if scheme.has_zero_points else None
    return Int4Weight(packed, scales, zeros, scheme.group, columns)


def programs(name: str) -> Iterator[tuple[str, Program]]:
    """One layer of a model in all precisions."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPES[name], "num_hidden_layers": 1}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = open_model(Path(folder))
        plain = build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)
    for precision, cache in PRECISIONS:
        yield f"{name} {precision} {cache}", with_kv_cache_dtype(quantize(plain, precision), cache)


def main(names: list[str]) -> int:
    """Compile what these models launch, or all of bench/gpu."""
    attention_steps.PROGRAMS_OF_CPU = PROGRAMS  # tiles are cut as there
    kernels = Kernels()
    for name in names or SHAPES:
        for title, program in programs(name):
            with kernels.compiling():
                for exact in (False, True):
                    steps(program, exact=exact)
            print(json.dumps({"model": title, "kernels": len(kernels.keys)}), flush=True)
    for failure in kernels.failed.values():
        print(failure, file=sys.stderr)
    return 1 if kernels.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
