"""Build, parity and exact mode on the device: correctness before speed.

A small model with random weights runs through the kernels and through plain PyTorch in float32 on
the host, which tests compare with the reference executor. Nothing is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from bench.gpu.ahead import compile_all
from bench.gpu.batches import batch_of, columns_for
from bench.gpu.integers import integers
from bench.gpu.models import executor_of, program_of
from bench.gpu.stage import Stage
from quire.execute.executor import StepLimits
from quire.execute.gpu.device import choose, look
from quire.execute.gpu.executor import TorchExecutor
from quire.execute.gpu.load import Loaded
from quire.execute.gpu.step_sizes import Sizes
from quire.program.batch import CacheRows
from quire.program.program import Program

DEPTH, SEQUENCES = 700, 3
DENSE, MIXTURE = "Qwen3-0.6B", "Qwen3-MoE"
LAYERS = 4  # of parity: the host's attention takes seconds for each
# Tolerances by storage of weights, keys and values, as shares of the largest logit: both sides
# round activations to bf16 or fp8, and sum in different orders.
TOLERANCES = MappingProxyType({"none": 0.03, "fp8": 0.1})


def build(stage: Stage) -> None:
    """Report the machine as the engine sees it, compile all kernels, and run a small model."""
    machine = look()
    stage.report("pytorch", machine.torch_version)
    stage.report("built_for", machine.built_for)
    stage.report("cards", [f"{card.name} ({card.architecture})" for card in machine.cards])
    stage.report("chosen", str(choose("cpu" if stage.is_dry else "cuda", machine)))
    stage.report("kernels", compile_all(stage))
    began = time.perf_counter()
    executor, program = _small(stage, "none", exact=True)
    _logits(executor, program, chunk=_depth(stage), stage=stage)
    stage.settle()
    stage.report("loaded_and_run_s", time.perf_counter() - began)


def parity(stage: Stage) -> None:
    """Compare integer products with NumPy; whole steps with plain PyTorch on the host, in both
    modes, which have the same weights.
    """
    integers(stage)
    for precision, allowed in TOLERANCES.items():
        right = np.empty(0)
        for exact in (True, False):
            executor, program = _small(stage, precision, exact=exact, layers=LAYERS)
            found = _logits(executor, program, chunk=_depth(stage), stage=stage)
            if not right.size:
                right = found if stage.is_rehearsal else _right(program, executor, stage)
            error = float(np.abs(found - right).max() / np.abs(right).max())
            what = f"{precision} {'exact' if exact else 'fast'}"
            stage.report(what, {"largest_error": error, "allowed": allowed})
            if not error <= allowed:
                raise SystemExit(f"{what}: the kernels differ from plain PyTorch by {error}")


def exact(stage: Stage) -> None:
    """Check that a sequence has the same bits alone, in chunks, and beside others."""
    for precision in TOLERANCES:
        _exact(stage, precision)


def mixtures(stage: Stage) -> None:
    """Compare a mixture of experts with plain PyTorch, and check its bits as those of `exact`."""
    executor, program = _small(stage, "none", exact=True, name=MIXTURE)
    found = _logits(executor, program, chunk=_depth(stage), stage=stage)
    right = found if stage.is_rehearsal else _right(program, executor, stage)
    error = float(np.abs(found - right).max() / np.abs(right).max())
    stage.report("none", {"largest_error": error, "allowed": TOLERANCES["none"]})
    if not error <= TOLERANCES["none"]:
        raise SystemExit(f"a mixture: the kernels differ from plain PyTorch by {error}")
    del executor
    for precision in ("none", "int8", "int4"):
        if precision == "none" or stage.has_time():
            _exact(stage, precision, name=MIXTURE)


def _exact(stage: Stage, precision: str, *, name: str = DENSE) -> None:
    executor, program = _small(stage, precision, exact=True, name=name)
    depth = _depth(stage)
    whole = _logits(executor, program, chunk=depth, stage=stage)
    for chunk in (1, 5) if stage.is_dry else (1, 17, 64, 257):
        again = _logits(executor, program, chunk=chunk, stage=stage)
        same = bool(np.array_equal(whole, again))
        stage.report(f"{precision} chunks_of_{chunk}", same)
        if not same:
            raise SystemExit(f"{precision}: chunks of {chunk} change bits")
        if not stage.has_time():
            break
    beside = _beside(executor, program, stage)
    stage.report(f"{precision} beside_others", beside)
    if not beside:
        raise SystemExit(f"{precision}: other sequences in a step change bits")
    replayed = _replayed(executor, program, stage)
    stage.report(f"{precision} replayed", replayed)
    if not replayed["is_same"]:
        raise SystemExit(f"{precision}: mixed steps have other bits when they are replayed")


def _replayed(executor: TorchExecutor, program: Program, stage: Stage) -> dict[str, Any]:
    """Run mixed steps of one size with changing rows, replayed and then launched kernel by
    kernel.
    """
    depth = _depth(stage)
    steps = [
        batch_of(
            counts,
            [depth - count for count in counts],
            columns=columns_for(depth + 1),
            vocab_size=program.vocab_size,
            samples=True,
        )
        for counts in ([1, 1, 7], [8, 1, 2], [5, 5, 1], [1, 9, 1])
    ]
    before, sizes, found = executor.steps_replayed, executor.sizes, []
    for limits in (sizes, Sizes(StepLimits(max_tokens=1, max_samples=1, max_sequences=1), mixed=0)):
        executor.sizes = limits
        for step in steps:
            rows = len(step.sample_rows)
            executor.run_trunk(step, head_rows=rows)
            found.append(stage.values(executor.run_head(step, 0, rows)))
    executor.sizes, half = sizes, len(steps)
    pairs = zip(found[:half], found[half:], strict=True)
    return {
        "is_same": all(np.array_equal(one, other) for one, other in pairs),
        "steps": executor.steps_replayed - before,
    }


def _depth(stage: Stage) -> int:
    return 11 if stage.is_dry else DEPTH


def _small(
    stage: Stage, precision: str, *, exact: bool, name: str = DENSE, layers: int = 0
) -> tuple[TorchExecutor, Program]:
    kept = precision if precision in ("fp8", "int8") else "auto"
    program = program_of(stage, name, precision=precision, kv_cache_dtype=kept, layers=layers)
    executor = executor_of(
        stage,
        program,
        exact=exact,
        max_tokens=SEQUENCES * _depth(stage),
        max_sequences=16,
        blocks=SEQUENCES * columns_for(_depth(stage) + 1),
    )
    return executor, program


def _right(program: Program, executor: TorchExecutor, stage: Stage) -> np.ndarray:
    return _logits(_on_host(program, executor), program, chunk=_depth(stage), stage=stage)


def _on_host(program: Program, of: TorchExecutor) -> TorchExecutor:
    """Run the same weights in plain PyTorch on the host."""
    held = of.weights
    moved: Mapping[str, Any] = {name: values.cpu() for name, values in held.plain.items()}
    few = {
        name: replace(weight, values=weight.values.cpu(), scales=weight.scales.cpu())
        for name, weight in held.few.items()
    }
    plain = TorchExecutor(
        program,
        Loaded(moved, few),
        device=torch.device("cpu"),
        exact=False,
        limits=StepLimits(max_tokens=SEQUENCES * DEPTH, max_samples=16, max_sequences=16),
    )
    plain.allocate_cache(SEQUENCES * columns_for(DEPTH + 1), 16)
    return plain


def _logits(executor: TorchExecutor, program: Program, *, chunk: int, stage: Stage) -> np.ndarray:
    """Return logits of the last row of one sequence, computed `chunk` tokens at a time."""
    depth, found = _depth(stage), np.empty(0)
    for start in range(0, depth, chunk):
        count = min(chunk, depth - start)
        batch = batch_of(
            [count],
            [start],
            columns=columns_for(depth + 1),
            vocab_size=program.vocab_size,
            samples=True,
        )
        executor.run_trunk(batch, head_rows=1)
        found = stage.values(executor.run_head(batch, 0, 1))
    return found


def _beside(executor: TorchExecutor, program: Program, stage: Stage) -> bool:
    """Return logits of a decode row alone and as one of three."""
    depth, columns = _depth(stage), columns_for(_depth(stage) + 1)
    sizes = {"columns": columns, "vocab_size": program.vocab_size}
    filled = batch_of([depth - 1] * SEQUENCES, [0] * SEQUENCES, samples=False, **sizes)
    executor.run_trunk(filled)
    many = batch_of([1] * SEQUENCES, [depth - 1] * SEQUENCES, samples=True, **sizes)
    executor.run_trunk(many, head_rows=SEQUENCES)
    together = stage.values(executor.run_head(many, 0, SEQUENCES))
    (cache,) = many.caches
    one = replace(
        many,
        token_ids=many.token_ids[:1],
        positions=many.positions[:1],
        rope_positions=many.rope_positions[:1],
        caches=(CacheRows(kv_slots=cache.kv_slots[:1], block_tables=cache.block_tables[:1]),),
        seq_starts=many.seq_starts[:2],
        sample_rows=many.sample_rows[:1],
    )
    executor.run_trunk(one, head_rows=1)
    alone = stage.values(executor.run_head(one, 0, 1))
    return bool(np.array_equal(together[:1], alone))
