"""Loading holds one copy of the weights: memory is measured at each progress report."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama

# Wide enough that weights dominate the growth: 36 M elements.
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 4, "vocab_size": 2048, "num_hidden_layers": 2,
}  # fmt: skip
MOST = 1.15
SCHEMES = ("none", "int8", "int4")
ROOT = Path(__file__).parents[3]
Load = dict[str, Any]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Load]:
    """Load the model once per scheme in a process of their own: RssAnon of this one moves alone."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("wide"), dtype="bf16", shards=2, **SHAPE)
    command = [sys.executable, "-m", "tests.unit.execute.packing_memory", str(folder), *SCHEMES]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return {load["scheme"]: load for load in map(json.loads, printed.splitlines())}


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux tells of a process")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_never_exceeds_the_weights_by_much(loads: dict[str, Load], scheme: str) -> None:
    weight_bytes, counted = loads[scheme]["weight_bytes"], loads[scheme]["counted"]
    assert [done for done, _ in counted] == sorted(done for done, _ in counted)
    assert counted[-1][0] == weight_bytes
    assert max(held for _, held in counted) <= MOST * weight_bytes


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_K", "int8"), ("Q6_K", "none"), ("Q4_0", "int4")])
def test_a_quantized_file_is_dequantized_few_rows_at_a_time(
    kind: str, scheme: str, tmp_path: Path
) -> None:
    shape = {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32,
        "num_key_value_heads": 2, "vocab_size": 40_000, "num_hidden_layers": 1,
    }  # fmt: skip
    file = write_gguf_of(write_tiny_llama(tmp_path / "ck", **shape), tmp_path / "m.gguf", kind=kind)
    program = quantize(build_program(open_model(file), dtype=DType.BF16, max_positions=64), scheme)
    checkpoint = open_checkpoint(file)
    tracemalloc.start()
    executor = NativeExecutor(
        program,
        checkpoint,
        ExecutorOptions(
            limits=StepLimits(max_tokens=4, max_samples=1, max_sequences=1), num_threads=2
        ),
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    executor.close()
    assert most < 0.6 * 4 * 256 * 40_000  # bytes of the embedding as float32
