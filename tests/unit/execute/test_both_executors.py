"""Operations that no Llama uses, in their own program, in both executors: one answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.program.builder import ProgramBuilder
from quire.program.declarations import CacheSpec, WeightPart
from quire.program.program import Program
from quire.program.tensors import DType, View
from quire.weights.checkpoint import open_checkpoint
from quire.weights.dtypes import from_bf16_bits, round_to_bf16
from tests.models.generate import sequence_batch
from tests.safetensors_writer import write_safetensors

WIDTH, POSITIONS, IDS = 22, 6, [5, 0, 5, 8]
OPTIONS = ExecutorOptions(limits=StepLimits(max_tokens=8, max_samples=8, max_sequences=1))


def _vector(p: ProgramBuilder, name: str, size: int) -> str:
    return p.vector(name, [WeightPart(name, name, size)])


def make(dtype: DType) -> Program:
    """Build a learned position, a product with halves normed and scaled separately, caps, a
    copy.
    """
    p = ProgramBuilder("odd", dtype=dtype)
    p.cache(CacheSpec("paged", 1, 1, 4, dtype))
    x = p.embed(p.table("tokens", WeightPart("tokens", "tokens", 9), WIDTH))
    table = p.table("positions", WeightPart("p", "positions", POSITIONS), WIDTH)
    p.add(x, p.embed(table, ids="positions"))
    parts = [WeightPart("a", "a", 10), WeightPart("b", "b", 12)]
    h = p.linear(p.rounded(x), p.matrix("both", parts, WIDTH), out_name="both")
    a, b = p.parts(h, "both")
    outputs: dict[str, View] = {
        "layer": p.norm(
            b, _vector(p, "norm", 12), eps=1e-3, form="layer", bias=_vector(p, "bias", 12)
        ),
        "rms": p.norm(a, _vector(p, "short", 10), eps=1e-3),
        "bare": p.norm(b, None, eps=1e-3, form="layer", dtype=DType.F32),
    }
    outputs["scaled"] = p.scale(b, 0.3)
    outputs["capped"] = p.soft_cap(a, 0.7)
    for name, view in outputs.items():
        p.output(name, view)
    y = p.linear(p.begin_head(p.rounded(x)), p.matrix("head", [WeightPart("h", "h", 9)], WIDTH))
    p.output("logits", p.soft_cap(y, 5.0))
    return p.build(vocab_size=9, max_positions=POSITIONS)


def outputs_of(
    folder: Path, dtype: DType, executor_class: type[NativeExecutor] | type[ReferenceExecutor]
) -> dict[str, NDArray[np.float32]]:
    """Return named outputs of a step of IDS, in float32."""
    program = make(dtype)
    executor = executor_class(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(2, 16)
    batch = sequence_batch(IDS, 1, 16)
    executor.run_trunk(batch)
    found: dict[str, NDArray[np.float32]] = {}
    for name, view in program.outputs.items():
        if name == "logits":
            continue
        if isinstance(executor, NativeExecutor):
            values = executor.output(name, len(IDS))
            found[name] = from_bf16_bits(values) if values.dtype == np.uint16 else values.copy()
        else:
            found[name] = executor._read(view).copy()
    logits = executor.run_head(batch, 0, len(IDS))
    found["logits"] = from_bf16_bits(logits) if logits.dtype == np.uint16 else logits.copy()
    return found


@pytest.fixture
def held(tmp_path: Path) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(12)
    shapes = {
        "tokens": (9, WIDTH), "positions": (POSITIONS, WIDTH), "a": (10, WIDTH), "b": (12, WIDTH),
        "norm": (12,), "bias": (12,), "short": (10,), "h": (9, WIDTH),
    }  # fmt: skip
    held = {
        name: round_to_bf16(rng.standard_normal(shape).astype(np.float32))
        for name, shape in shapes.items()
    }
    write_safetensors(tmp_path / "model.safetensors", held)
    return held


def _layer_norm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-3)


def test_both_executors_compute_the_contract(
    tmp_path: Path, held: dict[str, NDArray[np.float32]]
) -> None:
    wide = {name: values.astype(np.float64) for name, values in held.items()}
    x = wide["tokens"][IDS] + wide["positions"][1:5]
    a, b = x @ wide["a"].T, x @ wide["b"].T
    right = {
        "hidden": x,
        "layer": _layer_norm(b) * wide["norm"] + wide["bias"],
        "bare": _layer_norm(b),
        "rms": a / np.sqrt((a * a).mean(1, keepdims=True) + 1e-3) * wide["short"],
        "scaled": b * 0.3,
        "capped": 0.7 * np.tanh(a / 0.7),
        "logits": 5 * np.tanh(x @ wide["h"].T / 5),
    }
    for kind in (NativeExecutor, ReferenceExecutor):
        found = outputs_of(tmp_path, DType.F32, kind)
        assert found.keys() == right.keys()
        for name, values in right.items():
            np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=2e-5, err_msg=name)


def test_both_executors_round_alike_in_bf16(
    tmp_path: Path, held: dict[str, NDArray[np.float32]]
) -> None:
    native = outputs_of(tmp_path, DType.BF16, NativeExecutor)
    reference = outputs_of(tmp_path, DType.BF16, ReferenceExecutor)
    for name, right in reference.items():
        if name != "bare":  # the one output that is f32
            np.testing.assert_array_equal(round_to_bf16(native[name]), native[name])
        # A sum in another order may round the other way, nothing more.
        np.testing.assert_allclose(native[name], right, rtol=2.0**-6, atol=2e-2, err_msg=name)
        assert (native[name] == right).mean() > 0.8, name


def test_a_position_past_the_table_is_rejected_by_both(
    tmp_path: Path, held: dict[str, NDArray[np.float32]]
) -> None:
    for kind in (NativeExecutor, ReferenceExecutor):
        executor = kind(make(DType.F32), open_checkpoint(tmp_path), OPTIONS)
        executor.allocate_cache(2, 16)
        with pytest.raises(ValueError, match=r"is 6; allowed are 0 to 5"):
            executor.run_trunk(sequence_batch([1, 2], POSITIONS - 1, 16))
