"""The least time that work can take: bytes that must come from memory, over how fast it reads.

Bytes are those of the program's own cost model. Only memory is looked at here, so the floor of a
long prompt, which is bound by arithmetic, is far below what any machine reaches. Knows no clock.
"""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import SettingError
from quire.config.groups import DTYPE_NAMES
from quire.models.registry import box_path, build_program, compute_dtype, open_model
from quire.program.cost import StepShape, step_cost
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.program import Program


def program_of(model: str, dtype: str = "auto", kv_cache_dtype: str = "auto") -> Program:
    """The program the engine runs for the model in folder `model` (empty: the one in the box)."""
    spec = open_model(Path(model).expanduser() if model else box_path())
    computed_in = compute_dtype(spec, dtype)
    program = build_program(spec, dtype=computed_in, max_positions=spec.max_positions)
    return with_kv_cache_dtype(program, DTYPE_NAMES.get(kv_cache_dtype, kv_cache_dtype))


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
