"""The least time that work can take: bytes that must come from memory, over how fast it reads.

Bytes are those of the program's own cost model. Only memory is looked at here, so the floor of a
long prompt, which is bound by arithmetic, is far below what any machine reaches. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.engine.model_files import model_folder
from quire.engine.programs import engine_program
from quire.models.registry import open_model
from quire.program.cost import StepShape, step_cost
from quire.program.program import Program
from quire.weights.checkpoint import open_checkpoint


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
    return sum(step_cost(program, StepShape([1], [depth])).memory_bytes for depth in depths)


def prefill_bytes(program: Program, *, prompt_tokens: int) -> int:
    """Bytes of weights and cache that computing a prompt in one step must read or write."""
    return step_cost(program, StepShape([prompt_tokens], [0])).memory_bytes
