"""Whole tiny models through the Triton kernels match the reference executor.

The kernels run in the interpreter on CPU tensors, along the code path of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.engine.assembly.precision import with_precision  # noqa: E402
from quire.models.registry import build_program, open_model  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.sampling.scoring import ScoreBatch  # noqa: E402
from quire.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.fp8_checkpoints import write_fp8_of  # noqa: E402
from tests.gpu.torch_models import (  # noqa: E402
    program_of,
    reference_executor,
    sequence_logits,
    torch_executor,
)
from tests.kernels.sampling_cases import assert_same_choice, make_batch  # noqa: E402
from tests.models.case import Case  # noqa: E402
from tests.models.cases import DENSE  # noqa: E402
from tests.models.cases_experts import QWEN2_MOE, QWEN3_MOE  # noqa: E402
from tests.models.generate import logits_of  # noqa: E402
from tests.tiny_models import write_tiny  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# As a share of the largest logit.
TOLERANCES = {DType.F32: 1e-4, DType.BF16: 0.02}
OF_INTEGERS = 0.05
FEW = 4  # tokens
SMALL = {
    "num_hidden_layers": 1,
    "num_experts": 7,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}
LLAMA = Case("llama", {"num_hidden_layers": 1}, seed=3, stored="bf16")
# Families that use different kernels: soft caps; head norms, windows by layer; layer norms with
# biases, learned positions.
NAMES = ("gemma2", "gemma3", "gpt2")
FAMILIES = [next(case for case in DENSE if case.name.startswith(name)) for name in NAMES]


def _logits(
    folder: Path, dtype: DType, ids: list[int], *params: str, exact: bool = True, chunk: int = FEW
) -> tuple[np.ndarray, np.ndarray]:
    program = program_of(folder, dtype, *params)
    length = program.max_positions
    executor = torch_executor(folder, program, exact=exact, kernels=True)
    found = sequence_logits(executor, ids, max_positions=length, chunk=chunk)
    right = logits_of(reference_executor(folder, program), ids, max_positions=length)
    return found, right


def _differ(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(found - right).max() / np.abs(right).max())


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("exact", [True, False])
def test_a_llama_matches_the_reference(dtype: DType, exact: bool, tmp_path: Path) -> None:
    ids = LLAMA.token_ids[:FEW]
    found, right = _logits(LLAMA.write(tmp_path), dtype, ids, exact=exact)
    assert _differ(found, right) <= TOLERANCES[dtype]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_families_match_the_reference(case: Case, tmp_path: Path) -> None:
    found, right = _logits(case.write(tmp_path), DType.F32, case.token_ids[:FEW])
    assert _differ(found, right) <= TOLERANCES[DType.F32]


@pytest.mark.parametrize(
    "params",
    [
        *(("int8", "auto"), ("int4-g32", "auto"), ("none", "int8")),
        *(("fp8", "auto"), ("fp8-block", "auto"), ("none", "fp8")),
    ],
)
def test_low_bit_weights_match_the_reference(params: tuple[str, str], tmp_path: Path) -> None:
    found, right = _logits(LLAMA.write(tmp_path), DType.BF16, LLAMA.token_ids[:FEW], *params)
    assert _differ(found, right) <= OF_INTEGERS


def test_a_checkpoint_with_static_scales_matches_the_reference(tmp_path: Path) -> None:
    folder = write_fp8_of(
        LLAMA.write(tmp_path / "plain"), tmp_path / "fp8", kind="tensor", is_static=True
    )
    spec, ids = open_model(folder), LLAMA.token_ids[:FEW]
    built = build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)
    program = with_precision(built, "auto", open_checkpoint(folder), static=True)
    assert program.weights["layers.0.down"].scheme == "fp8-static"
    executor = torch_executor(folder, program, kernels=True)
    found = sequence_logits(executor, ids, max_positions=program.max_positions)
    right = logits_of(reference_executor(folder, program), ids, max_positions=program.max_positions)
    assert _differ(found, right) <= OF_INTEGERS


@pytest.mark.parametrize(
    ("config", "params"),
    [(QWEN2_MOE, ()), (QWEN3_MOE, ("int4-g32",))],
    ids=["qwen2-moe", "qwen3-moe-int4"],
)
def test_mixtures_match_the_reference_and_chunks_change_no_bit(
    config: dict[str, Any], params: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, config | SMALL, seed=6)
    dtype, ids = DType.BF16 if params else DType.F32, list(range(3, 8))
    found, right = _logits(folder, dtype, ids, *params, chunk=5)
    assert _differ(found, right) <= (OF_INTEGERS if params else TOLERANCES[dtype])
    other, _ = _logits(folder, dtype, ids, *params, chunk=3)
    assert np.array_equal(other, found)


@pytest.mark.parametrize("params", [(), ("fp8", "fp8")])
def test_chunks_of_any_size_give_the_same_bits(params: tuple[str, ...], tmp_path: Path) -> None:
    folder = LLAMA.write(tmp_path)
    ids = np.random.default_rng(4).integers(0, 131, 5).tolist()
    whole, _ = _logits(folder, DType.BF16, ids, *params, chunk=5)
    ones, _ = _logits(folder, DType.BF16, ids, *params, chunk=1)
    odd, _ = _logits(folder, DType.BF16, ids, *params, chunk=3)
    assert np.array_equal(whole, ones)
    assert np.array_equal(whole, odd)


def test_device_logits_are_sampled_and_scored_by_kernels(tmp_path: Path) -> None:
    """Logits on a device are sampled and scored there by kernels; arrays are the host's."""
    folder = LLAMA.write(tmp_path)
    executor = torch_executor(folder, program_of(folder, DType.F32), exact=True, kernels=True)
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((3, 37)).astype(np.float32)
    padded = torch.full((3, 48), float("nan"))  # rows lie apart, as in a step's buffer
    padded[:, :37] = torch.from_numpy(logits)
    rare = {"typical_p": [1.0, 0.5, 1.0]}
    batch = make_batch(3, temperature=[0.0, 1.0, 1.0], top_k=5, num_logprobs=2, rare=rare)
    found, right = (executor.sample(given, batch) for given in (padded[:, :37], logits))
    assert_same_choice(found, right)
    wanted = ScoreBatch(
        targets=np.array([4, -1, 36], np.int32),
        num_top=np.array([2, 0, 1], np.int32),
        listed_starts=np.array([0, 0, 1, 2], np.int32),
        listed_ids=np.array([9, 0], np.int32),
    )
    found, right = (executor.score(given, wanted) for given in (padded[:, :37], logits))
    np.testing.assert_array_equal(found.logprobs, right.logprobs)
    np.testing.assert_array_equal(found.top_ids, right.top_ids)
    np.testing.assert_array_equal(found.listed_logprobs, right.listed_logprobs)
