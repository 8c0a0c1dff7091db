"""One fused launch for norm, rope and KV store of the heads.

The tests check where operations are fused, the launches saved per layer, and unchanged outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.execute.gpu import kernel_ops  # noqa: E402
from quire.execute.gpu.fused import HeadsToCache, launches  # noqa: E402
from quire.program.ops import Norm, Op, Rope  # noqa: E402
from quire.program.program import Program  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.gpu.launch_log import launched  # noqa: E402
from tests.gpu.torch_models import program_of, sequence_logits, torch_executor  # noqa: E402
from tests.models.case import Case  # noqa: E402
from tests.models.cases import DENSE  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LLAMA = Case("llama", {"num_hidden_layers": 1}, seed=3, stored="bf16")
QWEN3 = next(case for case in DENSE if case.name.startswith("qwen3"))
TOLERANCE = 0.01  # as a share of the largest logit, in bf16: the fused norm adds in another order


def _apart(program: Program, segment: str) -> Iterator[Op]:
    return iter(program.segments.get(segment, ()))


def _kinds(program: Program) -> list[str]:
    """Return the first steps of a layer."""
    found = []
    for step in launches(program, "trunk"):
        found.append("heads" if isinstance(step, HeadsToCache) else step.kind)
        if found[-1] == "attention":
            break
    return found


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_every_family_with_rope_has_one_launch_for_its_heads(case: Case, tmp_path: Path) -> None:
    program = program_of(case.write(tmp_path), DType.BF16)
    trunk = program.segments["trunk"]
    steps = list(launches(program, "trunk"))
    together = [step for step in steps if isinstance(step, HeadsToCache)]
    ropes = sum(isinstance(op, Rope) for op in trunk)
    by_head = sum(isinstance(op, Norm) and op.group > 0 for op in trunk)
    assert 2 * len(together) == ropes
    assert len(steps) == len(trunk) - ropes - by_head
    apart = [step for step in steps if not isinstance(step, HeadsToCache)]
    assert apart == [op for op in trunk if op in apart]
    assert _kinds(program)[-1] == "attention"


def test_unsuitable_operations_stay_separate(tmp_path: Path) -> None:
    program = program_of(QWEN3.write(tmp_path), DType.BF16)
    trunk = list(program.segments["trunk"])
    at = next(index for index, op in enumerate(trunk) if isinstance(op, Rope))
    k = trunk[at + 1].inputs[0]

    def kinds(*changed: Op) -> list[str]:
        ops = (*trunk[: at - 2], *changed, *trunk[at + 2 :])
        return _kinds(replace(program, segments=program.segments | {"trunk": ops}))

    first, second = trunk[at - 2 : at], trunk[at : at + 2]
    assert kinds(*first, *second)[-2:] == ["heads", "attention"]
    assert kinds(*first)[-2:] == ["heads", "attention"]  # without rope
    assert kinds(*first[::-1], *second)[-4:] == ["norm", "norm", "heads", "attention"]
    other = replace(first[1], eps=0.5)
    assert kinds(first[0], other, *second)[-4:] == ["norm", "norm", "heads", "attention"]
    assert kinds(*first, *second[::-1])[-4:] == ["rope", "rope", "store_kv", "attention"]
    read = replace(program, outputs={**program.outputs, "keys": k})
    assert _kinds(read)[-4:] == ["rope", "rope", "store_kv", "attention"]


@pytest.mark.parametrize(
    ("case", "apart", "together"), [(LLAMA, 11, 9), (QWEN3, 13, 9)], ids=["llama", "qwen3"]
)
def test_launches_of_a_layer_with_and_without_fusion(
    case: Case, apart: int, together: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layer has two norms, four products, heads, attention (unsplit, so no merge) and
    activation.
    """
    folder = case.write(tmp_path)
    program = program_of(folder, DType.BF16)
    ids = case.token_ids[:1]
    counts, logits = [], []
    for split in (_apart, launches):
        monkeypatch.setattr(kernel_ops, "launches", split)
        executor = torch_executor(folder, program, kernels=True)
        with launched(monkeypatch) as names:
            logits.append(sequence_logits(executor, ids, max_positions=program.max_positions))
        layers = program.caches[0].layers
        # Outside the layers: last tokens of slots, embedding, last residual add; row gather, norm,
        # head.
        counts.append((len(names) - 6) / layers)
    assert counts == [apart, together]
    assert np.abs(logits[0] - logits[1]).max() <= TOLERANCE * np.abs(logits[0]).max()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_heads_have_the_same_bits_in_chunks_of_any_size(
    kv_cache_dtype: str, tmp_path: Path
) -> None:
    folder = QWEN3.write(tmp_path)
    program = program_of(folder, DType.BF16, "none", kv_cache_dtype)
    ids = QWEN3.token_ids[:5]
    whole, ones, odd = (
        sequence_logits(
            torch_executor(folder, program, kernels=True),
            ids,
            max_positions=program.max_positions,
            chunk=chunk,
        )
        for chunk in (5, 1, 3)
    )
    assert np.array_equal(whole, ones)
    assert np.array_equal(whole, odd)
