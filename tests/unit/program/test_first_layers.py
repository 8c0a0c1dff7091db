"""The rewrite to the first layers: equal to a model that has only these, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program, open_model
from quire.models.spec import ModelSpec
from quire.program.cost import StepShape
from quire.program.declarations import Weight
from quire.program.first_layers import first_layers, num_layers
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.ops import Linear
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.serialize import to_plain
from quire.program.tensors import DType
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
                    op.with_views(lambda view: replace(view, buffer=buffers[numbers[view.buffer.index]]))
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


@pytest.mark.parametrize("family", sorted(BY_FAMILY))
@pytest.mark.parametrize("num", [1, 3, NUM_LAYERS - 1])
def test_the_rewrite_is_a_model_with_fewer_layers(tmp_path: Path, family: str, num: int) -> None:
    spec = spec_of(tmp_path, dict(BY_FAMILY[family].config))
    short = first_layers(built(spec), num)
    assert num_layers(short) == num
    assert meaning(short) == meaning(built(spec, num))
