"""What bench.parallel computes for other machines: both modes of tensor parallelism, by the ranks'
programs."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.parallel.layout import Layout, has_both_modes
from bench.parallel.other_machines import DESCRIBED, computed
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A model with heads for eight ranks."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512}
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("bench"), seed=1, intermediate_size=1536, **heads
    )
    return build_program(open_model(folder), dtype=DType.BF16, max_positions=64)


@pytest.mark.parametrize("machine", DESCRIBED, ids=lambda machine: machine.name)
def test_modes_of_other_machines_are_computed_and_labelled(
    program: Program, machine: object
) -> None:
    found = computed(program, machine, 4)  # type: ignore[arg-type]
    assert found["computed_for"]["name"] == machine.name  # type: ignore[attr-defined]
    exact, fast = found["exact"], found["fast"]
    assert fast["bytes"] < exact["bytes"]
    assert exact["bytes_per_token"] == exact["bytes"] / 4
    # A sum is two exchanges, of parts and of results: ranks wait equally often.
    assert fast["exchanges"] == exact["exchanges"]


def test_a_mode_that_a_precision_does_not_allow_is_left_out(program: Program) -> None:
    found = computed(quantize(program, "int4-g128"), DESCRIBED[1], 1)
    assert found["fast"] is None
    assert found["exact"]["bytes"] > 0


def test_both_modes_are_measured_where_the_precision_and_the_layout_allow_it(
    program: Program,
) -> None:
    asked = {"degree": 8, "stages": 1, "context": 1, "experts": "split", "mode": "exact"}

    def layout(program: Program, **changes: object) -> Layout:
        made = Namespace(**{**asked, "compare": None, **changes})
        return Layout(made, program, checkpoint=None, options=None)  # type: ignore[arg-type]

    integers = quantize(program, "int4-g128")
    assert has_both_modes(layout(program))
    assert not has_both_modes(layout(integers))
    assert not has_both_modes(layout(program, stages=2))
    with pytest.raises(SystemExit, match="leave out what else divides the model"):
        has_both_modes(layout(program, context=2, compare="modes"))
    with pytest.raises(SystemExit, match="leave out --mode"):
        has_both_modes(layout(program, mode="fast", compare="modes"))
    with pytest.raises(SystemExit, match="integers in groups"):
        has_both_modes(layout(integers, compare="modes"))
