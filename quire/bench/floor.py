"""The least time that work can take: bytes that must come from memory, over how fast it reads.

Bytes and operations are those of the program's own cost model. Requests' floors look at memory
only, so that of a long prompt, which is bound by arithmetic, is far below what any machine reaches;
an operation's is of both. Knows no clock.
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
from quire.models.registry import open_model
from quire.program.cost import Cost, StepShape
from quire.program.ops import Linear, Op
from quire.program.program import Program
from quire.weights.checkpoint import open_checkpoint

CACHED = "cached"


def program_of(model: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Program:
    """The program an engine with these settings runs for `model` (empty: the one in the box).

    Precisions count as the engine keeps them: of the weights, the head and the cache.
    """
    config = engine_config({"model": model, **settings})
    folder = model_folder(config.model)
    return engine_program(config, open_model(folder), open_checkpoint(folder))


def decode_bytes(program: Program, *, prompt_tokens: int, output_tokens: int) -> int:
    """Bytes of weights and cache that one request's tokens after the first must read.

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


def prefill_bytes(program: Program, *, prompt_tokens: int) -> int:
    """Bytes of weights and cache that computing a prompt in one step must read or write."""
    return program.step_cost(StepShape([prompt_tokens], [0])).memory_bytes


def op_floor_s(program: Program, op: Op, cost: Cost, limits: Mapping[str, float]) -> float:
    """Return the least seconds an operation can take: to read its bytes, or its arithmetic."""
    return max(cost.memory_bytes / (1e9 * limits[READ]), arithmetic_s(program, op, cost, limits))


def arithmetic_s(program: Program, op: Op, cost: Cost, limits: Mapping[str, float]) -> float:
    """Return the least seconds an operation's arithmetic can take."""
    products = str(program.caches[0].dtype)
    if isinstance(op, Linear):
        weight = program.weights[op.weight]
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
    """The floor's share of the time; what came faster than memory reads has no floor there."""
    return CACHED if floor_s > seconds else f"{100 * floor_s / seconds:.0f} %"
