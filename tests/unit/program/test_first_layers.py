"""The rewrite to the first layers: equal to a model that has only these, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program
from quire.models.spec import ModelSpec
from quire.program.cost import StepShape
from quire.program.first_layers import first_layers, num_layers
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.ops import Linear, Op
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.serialize import to_plain
from quire.program.tensors import DType
from tests.cases import each_case
from tests.models.cases import CASES
from tests.tiny_models import tiny_config
from tests.unit.models.config_folder import opened

NUM_LAYERS = 6
BY_FAMILY = {case.config.get("architectures", ["LlamaForCausalLM"])[0]: case for case in CASES}
STEP = StepShape([1, 3], [4, 0])


def spec_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    base = config if "architectures" in config else tiny_config(**config)
    return opened(folder, {**base, layers: NUM_LAYERS, "layer_types": None}, layer_types=None)


def built(spec: ModelSpec, num: int | None = None) -> Program:
    if num is not None:
        spec = replace(spec, num_layers=num)
    return build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)


def meaning(program: Program) -> dict[str, Any]:
    """Return the program without names and the numbers of its buffers."""
    numbers: dict[int, int] = {}
    for ops in program.segments.values():
        for op in ops:
            for view in (*op.inputs, *op.outputs):
                numbers.setdefault(view.buffer.index, len(numbers))
    buffers = [replace(program.buffers[old], index=new, name="") for old, new in numbers.items()]
    plain = to_plain(
        replace(
            program,
            name="",
            buffers=tuple(buffers),
            segments={
                name: tuple(
                    op.with_views(
                        lambda view: replace(view, buffer=buffers[numbers[view.buffer.index]])
                    )
                    for op in ops
                )
                for name, ops in program.segments.items()
            },
            outputs={
                name: replace(view, buffer=buffers[numbers[view.buffer.index]])
                for name, view in program.outputs.items()
            },
        )
    )
    plain["weights"].sort(key=lambda weight: weight["name"])
    return plain


@each_case("family", sorted(BY_FAMILY))
@each_case("num", [1, 3, NUM_LAYERS])
def test_the_rewrite_is_a_model_with_fewer_layers(tmp_path: Path, family: str, num: int) -> None:
    spec = spec_of(tmp_path, dict(BY_FAMILY[family].config))
    short = first_layers(built(spec), num)
    assert num_layers(short) == num
    if spec.experts is not None and num <= min(spec.experts.layers):
        return  # a model of only its dense first layers has another builder
    assert meaning(short) == meaning(built(spec, num))


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return built(spec_of(tmp_path, {}))


def test_precisions_are_kept(program: Program) -> None:
    rounded = with_kv_cache_dtype(quantize(program, "int8"), "int8")
    short = first_layers(rounded, 2)
    assert short.caches == (replace(rounded.caches[0], layers=2),)
    assert all(weight == rounded.weights[name] for name, weight in short.weights.items())
    assert short.weights["layers.1.qkv"].scheme == "int8"
    assert "layers.2.qkv" not in short.weights


def test_the_cost_is_that_of_the_kept_layers_and_the_head(program: Program) -> None:
    costs = [first_layers(program, num).step_cost(STEP) for num in (1, 2, 3)]
    ops = [cost.product_ops for cost in costs]
    assert ops[1] - ops[0] == ops[2] - ops[1] > 0
    assert [cost.kv_bytes for cost in costs] == [num * costs[0].kv_bytes for num in (1, 2, 3)]
    head = program.segment_cost("head", STEP)
    assert first_layers(program, 1).segment_cost("head", STEP) == head


@pytest.mark.parametrize("num", [0, NUM_LAYERS + 1, -1])
def test_other_numbers_are_rejected(program: Program, num: int) -> None:
    with pytest.raises(ValueError, match=f"the first {num} of 6 layers; take 1 to 6"):
        first_layers(program, num)


def renamed(program: Program, name: str, to: str) -> Program:
    def over(op: Op) -> Op:
        return replace(op, weight=to) if isinstance(op, Linear) and op.weight == name else op

    weights = {
        to if key == name else key: replace(weight, name=to) if key == name else weight
        for key, weight in program.weights.items()
    }
    segments = {key: tuple(map(over, ops)) for key, ops in program.segments.items()}
    return replace(program, weights=weights, segments=segments)


def test_programs_with_interleaved_layers_are_rejected(program: Program) -> None:
    with pytest.raises(ValueError, match=r"6 layers are not separable.*interleaved"):
        first_layers(renamed(program, "layers.0.qkv", "layers.3.early"), 2)
