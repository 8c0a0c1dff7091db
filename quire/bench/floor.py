"""Roofline floors: the least time that reading the required bytes, or the arithmetic, can take.

Bytes and operations are those of the program's cost model. A request's floor counts memory only, so
for a long prompt, which is bound by arithmetic, it is far below any machine's time; an operation's
floor counts both. Reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.base.errors import SettingError
from quire.bench.limits import READ, peak_gflops
from quire.config.flags import engine_config
from quire.engine.assembly.model_files import model_folder
from quire.engine.assembly.programs import engine_program
from quire.hub.cache import with_local_model
from quire.models.registry import open_model
from quire.program.cost import Cost, StepShape
from quire.program.expert_ops import Experts
from quire.program.ops import Linear, Op
from quire.program.program import Program
from quire.weights.checkpoint import open_checkpoint

CACHED = "cached"


def program_of(model: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Program:
    """Return the program of an engine with these settings for `model` (empty: built-in).

    Precisions of weights, head and cache are those the engine would use.
    """
    config = with_local_model(engine_config({"model": model, **settings}))
    folder = model_folder(config.model)
    return engine_program(config, open_model(folder), open_checkpoint(folder))


def decode_bytes(program: Program, *, prompt_tokens: int, output_tokens: int) -> int:
    """Return the bytes of weights and cache that one request's decode steps must read.

    Raises SettingError where the request is longer than the model allows.
    """
    longest = prompt_tokens + output_tokens
    if longest > program.max_positions:
        raise SettingError(
            f"{prompt_tokens} tokens in and {output_tokens} out are {longest}; this model allows "
            f"{program.max_positions} in all; ask for fewer"
        )
    depths = range(prompt_tokens, prompt_tokens + output_tokens - 1)
    return sum(program.step_cost(StepShape([1], [depth])).memory_bytes for depth in depths)


def op_floor_s(program: Program, op: Op, cost: Cost, limits: Mapping[str, float]) -> float:
    """Return the least seconds an operation can take: to read its bytes, or its arithmetic."""
    return max(cost.memory_bytes / (1e9 * limits[READ]), arithmetic_s(program, op, cost, limits))


def arithmetic_s(program: Program, op: Op, cost: Cost, limits: Mapping[str, float]) -> float:
    """Return the least seconds an operation's arithmetic can take."""
    products = str(program.caches[0].dtype)
    if isinstance(op, Linear | Experts):
        weight = program.weights[op.weight if isinstance(op, Linear) else op.down]
        products = (weight.scheme or str(weight.dtype)).partition("-")[0]
    computed_s = 0.0
    for operations, precision in (
        (cost.product_ops + cost.attention_ops, products),
        (cost.other_ops, "f32"),
    ):
        peak = peak_gflops(limits, precision)
        computed_s += operations / (1e9 * peak) if peak else 0.0
    return computed_s


def share_text(floor_s: float, seconds: float) -> str:
    """Return the floor as a share of the time, or CACHED where the bytes came from caches."""
    return CACHED if floor_s > seconds else f"{100 * floor_s / seconds:.0f} %"
