"""The torch executor on CPU tensors: whole models match the reference executor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quire.engine.assembly.precision import with_precision  # noqa: E402
from quire.execute.gpu import plain_routing  # noqa: E402
from quire.execute.quantized_weights import quantize_weight  # noqa: E402
from quire.execute.reference_experts import route as reference_route  # noqa: E402
from quire.models.registry import build_program, open_model  # noqa: E402
from quire.program.expert_ops import Route  # noqa: E402
from quire.program.expert_parallel import mixtures  # noqa: E402
from quire.program.forms import RouterScore, RoutingForm  # noqa: E402
from quire.program.tensors import Buffer, DType, Rows, View  # noqa: E402
from quire.weights.binding import bind  # noqa: E402
from quire.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.fp8_checkpoints import KINDS, write_fp8_of  # noqa: E402
from tests.gpu.torch_models import program_of, reference_executor, torch_executor  # noqa: E402
from tests.models.case import Case  # noqa: E402
from tests.models.cases import DENSE  # noqa: E402
from tests.models.cases_experts import CASES as EXPERT_CASES  # noqa: E402
from tests.models.generate import logits_of  # noqa: E402

pytestmark = pytest.mark.gpu

# As a share of the largest logit. Sums have another order; bf16 rounds activations to 8 bits, and
# an integer activation may become the next of 127, an fp8 one the next of 8 in its binade.
TOLERANCES = {DType.F32: 2e-5, DType.BF16: 0.02}
OF_INTEGERS = 0.05
NUM_TOKENS = 12
LLAMA = Case("llama", seed=3, stored="bf16")
# A shared expert behind a gate; groups, a bias of the choice and a dense layer; more experts than
# a step has rows.
NAMES = ("mixtral", "qwen2_moe", "qwen3_moe_many", "dots1_groups")
MIXTURES = [case for case in EXPERT_CASES if case.name in NAMES]


def _differ(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(found - right).max() / np.abs(right).max())


def _assert_agree(
    folder: Path, case: Case, dtype: DType, tolerance: float, *params: str, exact: bool = True
) -> None:
    program = program_of(folder, dtype, *params)
    ids = case.token_ids[:NUM_TOKENS]
    right = logits_of(reference_executor(folder, program), ids, max_positions=program.max_positions)
    executor = torch_executor(folder, program, exact=exact)
    found = logits_of(executor, ids, max_positions=program.max_positions)
    assert _differ(found, right) <= tolerance


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_every_family_matches_the_reference_in_f32(case: Case, tmp_path: Path) -> None:
    _assert_agree(case.write(tmp_path), case, DType.F32, TOLERANCES[DType.F32])


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_mixtures_match_the_reference_and_chunks_change_no_bit(case: Case, tmp_path: Path) -> None:
    """In bf16 and by integers the median row: near a tie a router may choose another expert."""
    folder, ids = case.write(tmp_path), case.token_ids[:NUM_TOKENS]
    for dtype, precision in ((DType.F32, "none"), (DType.BF16, "none"), (DType.BF16, "int4-g32")):
        program = program_of(folder, dtype, precision)
        right = logits_of(
            reference_executor(folder, program), ids, max_positions=program.max_positions
        )
        executor = torch_executor(folder, program)
        found = logits_of(executor, ids, max_positions=program.max_positions)
        rows = np.abs(found - right).max(axis=1) / np.abs(right).max()
        worst = rows.max() if dtype is DType.F32 else np.median(rows)
        assert worst <= TOLERANCES[dtype], precision
        chosen = [sum(loads) for loads in executor.expert_loads]
        top_k = {op.gate_up: op.top_k for op in mixtures(program)}
        assert chosen == [NUM_TOKENS * count for count in top_k.values()]
        chunks = logits_of(executor, ids, max_positions=program.max_positions, chunk=5)
        assert np.array_equal(chunks, found), precision


@pytest.mark.parametrize("score", list(RouterScore))
@pytest.mark.parametrize("groups", [0, 4])
def test_experts_are_chosen_as_by_the_reference(score: RouterScore, groups: int) -> None:
    """Ties go to the lower id, and NaN comes last."""
    buffer = Buffer(0, "logits", Rows.TOKENS, 12, DType.F32)
    view = View(buffer, 0, 12)
    op = Route(
        x=view,
        y=view,
        score=score,
        form=RoutingForm.NORMALIZED,
        top_k=3,
        groups=groups,
        top_groups=2 if groups else 0,
        scale=2.5,
    )
    draw = np.random.default_rng(6)
    logits = draw.standard_normal((40, 12)).astype(np.float32)
    logits[:20] = np.round(logits[:20])
    bias = np.round(draw.standard_normal(12)).astype(np.float32)
    bias[5] = np.nan
    for given in (None, bias):
        right = reference_route(op, logits, given)
        of_choice = None if given is None else torch.from_numpy(given)
        found = plain_routing.route(op, torch.from_numpy(logits), of_choice).numpy()
        np.testing.assert_array_equal(found != 0, right != 0)
        np.testing.assert_allclose(found, right, rtol=1e-5)
    slots = plain_routing.slots_of(torch.from_numpy(right), 2)
    first_two = [np.flatnonzero(row)[:2].tolist() for row in right]
    assert slots.experts.tolist() == first_two, "of more than top_k the first count"


@pytest.mark.parametrize(
    "case", [case for case in DENSE if case.stored == "bf16"], ids=lambda case: case.name
)
def test_families_match_the_reference_in_bf16(case: Case, tmp_path: Path) -> None:
    _assert_agree(case.write(tmp_path), case, DType.BF16, TOLERANCES[DType.BF16])


@pytest.mark.parametrize("dtype", list(DType))
def test_fast_mode_matches_the_reference(dtype: DType, tmp_path: Path) -> None:
    _assert_agree(LLAMA.write(tmp_path), LLAMA, dtype, TOLERANCES[dtype], exact=False)


@pytest.mark.parametrize(
    "precision", ["int8", "int4-g32", "int4-g64-zp", "int4-g128", "fp8", "fp8-block"]
)
@pytest.mark.parametrize("dtype", list(DType))
def test_low_bit_weights_match_the_reference(precision: str, dtype: DType, tmp_path: Path) -> None:
    _assert_agree(LLAMA.write(tmp_path), LLAMA, dtype, OF_INTEGERS, precision)


@pytest.mark.parametrize(
    ("kind", "is_static"), [*((kind, False) for kind in KINDS), ("tensor", True), ("channel", True)]
)
def test_fp8_checkpoints_match_and_keep_their_codes(
    kind: str, is_static: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    plain = replace(LLAMA, changes=sizes | heads)
    folder = write_fp8_of(
        plain.write(tmp_path / "plain"), tmp_path / "fp8", kind=kind, is_static=is_static
    )
    spec, checkpoint = open_model(folder), open_checkpoint(folder)
    built = build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)
    program = with_precision(built, "auto", checkpoint, static=spec.static_activations)
    ids = plain.token_ids[:NUM_TOKENS]
    right = logits_of(reference_executor(folder, program), ids, max_positions=program.max_positions)
    executor = torch_executor(folder, program)
    found = logits_of(executor, ids, max_positions=program.max_positions)
    assert _differ(found, right) <= OF_INTEGERS
    name = "layers.0.gate_up"
    kept, (matrix, _) = (
        executor.weights.few[name],
        quantize_weight(program.weights[name], bind(program, checkpoint)),
    )
    assert np.array_equal(kept.values.float().numpy(), matrix.values)
    assert np.array_equal(kept.scales.numpy().reshape(matrix.scales.shape), matrix.scales)
    assert (kept.input_scale is not None) == is_static


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "bf16", "fp8"])
@pytest.mark.parametrize("dtype", list(DType))
def test_other_kv_cache_types_match_the_reference(
    kv_cache_dtype: str, dtype: DType, tmp_path: Path
) -> None:
    _assert_agree(LLAMA.write(tmp_path), LLAMA, dtype, OF_INTEGERS, "none", kv_cache_dtype)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(
    "params", [("none", "auto"), ("int8", "int8"), ("int4-g32", "auto"), ("fp8", "fp8")]
)
def test_chunks_of_any_size_give_the_same_bits(
    dtype: DType, params: tuple[str, str], tmp_path: Path
) -> None:
    folder = LLAMA.write(tmp_path)
    program = program_of(folder, dtype, *params)
    ids = np.random.default_rng(4).integers(0, 131, 60).tolist()
    whole, ones, odd = (
        logits_of(
            torch_executor(folder, program), ids, max_positions=program.max_positions, chunk=chunk
        )
        for chunk in (60, 1, 13)
    )
    assert np.array_equal(whole, ones)
    assert np.array_equal(whole, odd)


def test_an_exported_block_is_unchanged_after_import(tmp_path: Path) -> None:
    folder = LLAMA.write(tmp_path)
    program = program_of(folder, DType.BF16, "none", "int8")
    one, other = torch_executor(folder, program), torch_executor(folder, program)
    logits_of(one, LLAMA.token_ids, max_positions=program.max_positions)
    raw, again = (np.zeros(one.block_bytes, np.uint8) for _ in range(2))
    one.export_block(32, raw)
    assert raw.any()
    other.import_block(5, raw)
    other.copy_blocks(np.array([5, 7], np.int32), np.array([7, 9], np.int32))
    other.export_block(9, again)
    assert np.array_equal(raw, again)
