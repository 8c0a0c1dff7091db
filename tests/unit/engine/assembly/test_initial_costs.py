"""Initial step costs: each part has one, in proportion."""

from __future__ import annotations

from quire.config.groups import ModelConfig
from quire.engine.assembly.initial_costs import initial_step_costs
from quire.engine.assembly.model_files import model_folder
from quire.models.registry import build_program, open_model
from quire.program.tensors import DType


def test_each_part_of_a_step_has_a_price_and_the_weights_cost_most() -> None:
    spec = open_model(model_folder(ModelConfig()))
    program = build_program(spec, dtype=DType.F32, max_positions=256)
    prices = initial_step_costs(program)
    assert prices.fixed_ms > prices.token_ms > prices.position_ms > 0
    assert prices.score_ms > 0
    assert prices.read_ms > 0
