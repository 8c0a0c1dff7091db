"""Norms and activations fused with the quantization for the next product.

The fused kernels give the bits of two launches; the tests count where they apply and the launches
saved per layer.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.execute.gpu import fused
from quire.execute.gpu.fused import BytesToProduct, launches
from quire.execute.gpu.kernels.activation import activation
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.norm import norm
from quire.execute.gpu.products import ROW_FORMS
from quire.program.ops import Activation, Linear, Norm, Op
from quire.program.program import Program
from quire.program.tensors import DType
from tests.gpu.launch_log import launched
from tests.gpu.tensors import Float32s, array, empty, normal, rounded, tensor, wide
from tests.gpu.torch_models import program_of, sequence_logits, torch_executor
from tests.models.case import Case
from tests.models.cases import DENSE

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LLAMA = Case("llama", {"num_hidden_layers": 1}, seed=3, stored="bf16")


def room(form: str, rows: int, columns: int) -> ByteRows:
    """Return an oversized buffer with old content; a per-tensor scale is given."""
    dtype, scaled = ROW_FORMS[form]
    made = ByteRows.empty(rows + 1, columns, "cpu", dtype=dtype, scaled=scaled)
    made.values.view(torch.uint8).fill_(77)
    made.scales.fill_(0.02 if scaled == "tensor" else float("nan"))
    return made


def rows_of(columns: int, dtype: str) -> Float32s:
    """Return rows of all magnitudes, one of zeros and one with an infinity."""
    rng = np.random.default_rng(1)
    x = normal(rng, 4, columns) * np.exp(normal(rng, 4, columns) * 2)
    x[1], x[2, 3] = 0.0, np.inf
    return rounded(x, dtype)


def assert_same_bytes(found: ByteRows, right: ByteRows, rows: int) -> None:
    """Compare values, zero padding and scales."""
    values = (made.values[:rows].view(torch.uint8) for made in (found, right))
    assert torch.equal(*values)
    kept = (made.first(rows).scales.contiguous().view(torch.int32) for made in (found, right))
    assert torch.equal(*kept)


@pytest.mark.parametrize("form", list(ROW_FORMS))
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("columns", "norm_form"), [(8, "rms"), (300, "layer"), (1290, "rms")])
def test_a_fused_norm_quantizes_what_it_stores(
    form: str, dtype: str, columns: int, norm_form: str
) -> None:
    rng = np.random.default_rng(2)
    x, delta = rows_of(columns, "f32"), normal(rng, 4, columns, dtype=dtype)
    vectors = {"weight": tensor(normal(rng, columns)), "bias": tensor(normal(rng, columns))}
    how = vectors | {"eps": 1e-5, "form": norm_form}
    alone, together, y = wide(x, "f32"), wide(x, "f32"), empty(4, columns, dtype)
    norm(alone, y, delta=wide(delta, dtype), **how)
    right = room(form, 4, columns)
    quantize_rows(y, right)
    for stores_y in (True, False):
        made, kept, x_again = room(form, 4, columns), empty(4, columns, dtype), together.clone()
        norm(x_again, kept, delta=wide(delta, dtype), out=made, stores_y=stores_y, **how)
        assert_same_bytes(made, right, 4)
        np.testing.assert_array_equal(array(x_again), array(alone))
        expected = array(y) if stores_y else np.full((4, columns), np.nan, np.float32)
        np.testing.assert_array_equal(array(kept), expected)


@pytest.mark.parametrize("form", list(ROW_FORMS))
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("columns", "curve"), [(8, "relu"), (300, "gelu_tanh"), (2200, "silu"), (8200, "gelu_tanh")]
)
def test_a_fused_activation_quantizes_what_it_stores(
    form: str, dtype: str, columns: int, curve: str
) -> None:
    gate = wide(rows_of(columns, dtype), dtype)
    up = None if curve == "relu" else wide(rows_of(columns, dtype)[::-1].copy(), dtype)
    y, right = empty(4, columns, dtype), room(form, 4, columns)
    activation(gate, up, y, form=curve)
    quantize_rows(y, right)
    for stores_y in (True, False):
        made, kept = room(form, 4, columns), empty(4, columns, dtype)
        activation(gate, up, kept, form=curve, out=made, stores_y=stores_y)
        assert_same_bytes(made, right, 4)
        if stores_y:
            np.testing.assert_array_equal(array(kept), array(y))


def test_wrong_shapes_are_rejected() -> None:
    x = torch.zeros(2, 256)
    with pytest.raises(ValueError, match="at least 2 rows of 256"):
        norm(x, x, eps=1e-5, out=ByteRows.empty(1, 256, "cpu"))
    with pytest.raises(ValueError, match="groups of 128 do not become bytes"):
        norm(x, x, eps=1e-5, group=128, out=ByteRows.empty(2, 256, "cpu"))
    with pytest.raises(ValueError, match="at least 2 rows of 256"):
        activation(x, None, x, form="relu", out=ByteRows.empty(2, 128, "cpu"))


def _pairs(program: Program) -> list[tuple[Op, Op]]:
    """Yield operations that produce whole rows, each with the product that consumes the
    rows next.
    """
    found = []
    for ops in program.segments.values():
        for maker, product in pairwise(ops):
            is_maker = isinstance(maker, Activation) or (
                isinstance(maker, Norm) and maker.group == 0
            )
            if is_maker and isinstance(product, Linear) and product.x == maker.outputs[0]:
                found.append((maker, product))
    return found


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_every_family_fuses_quantization_before_low_bit_products(
    case: Case, tmp_path: Path
) -> None:
    folder = case.write(tmp_path)
    program = program_of(folder, DType.BF16, "int8")
    steps = [step for segment in program.segments for step in launches(program, segment)]
    together = [step for step in steps if isinstance(step, BytesToProduct)]
    assert [(step.maker, step.product) for step in together] == _pairs(program)
    assert len(together) >= program.caches[0].layers
    everything = [op for ops in program.segments.values() for op in ops]
    taps = list(program.outputs.values())
    for step in together:
        y = step.maker.outputs[0]
        others = [view for op in everything if op is not step.product for view in op.inputs]
        is_read = any(view.buffer == y.buffer for view in (*others, *taps))
        assert step.is_read == is_read
    plain = program_of(folder, DType.BF16)
    assert not any(isinstance(step, BytesToProduct) for step in launches(plain, "trunk"))


@pytest.mark.parametrize("precision", ["int8", "int4-g32", "fp8", "fp8-block"])
def test_fusion_saves_three_launches_a_layer_and_keeps_the_bits(
    precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the rows of attention, which many programs write, still need their own launch."""
    folder = LLAMA.write(tmp_path)
    program = program_of(folder, DType.BF16, precision)
    ids, layers = LLAMA.token_ids[:3], program.caches[0].layers
    logits, names = [], []
    for is_apart in (True, False):
        with monkeypatch.context() as patched, launched(patched) as seen:
            if is_apart:
                patched.setattr(fused, "_takes_bytes", lambda program, rows, product: False)
            executor = torch_executor(folder, program, kernels=True)
            logits.append(sequence_logits(executor, ids, max_positions=program.max_positions))
        names.append(seen)
    apart, together = names
    assert apart.count("_quantize") == 4 * layers + 1
    assert together.count("_quantize") == layers
    assert len(apart) - len(together) == 3 * layers + 1
    # Nine of a layer in full precision (see test_fused.py); six of these quantize.
    assert (len(together) - 6) / layers == 9 + 1
    assert np.array_equal(*logits)


def test_rows_that_are_also_read_unquantized_are_stored(tmp_path: Path) -> None:
    folder = LLAMA.write(tmp_path)
    program = program_of(folder, DType.BF16, "int8")
    (maker, _), *_ = _pairs(program)
    tapped = replace(program, outputs={**program.outputs, "normed": maker.outputs[0]})
    found = []
    for kernels in (True, False):
        executor = torch_executor(folder, tapped, kernels=kernels)
        sequence_logits(executor, LLAMA.token_ids[:3], max_positions=program.max_positions)
        found.append(executor.output("normed", 3))
    np.testing.assert_allclose(*found, rtol=0.01, atol=1e-3)
