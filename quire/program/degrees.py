"""Over how many ranks a program can be split, and the KV heads of each.

Knows no rewrite. Always holds: a refusal says what was found, and which degrees work.
"""

from __future__ import annotations

from quire.base.errors import SettingError
from quire.program.expert_ops import Experts
from quire.program.expert_parallel import SPLIT_EXPERTS, ExpertPlacement, Span
from quire.program.ops import Attention
from quire.program.program import Program

MAX_DEGREE = 64


def check_degree(
    program: Program, degree: int, placement: ExpertPlacement = SPLIT_EXPERTS, context: int = 1
) -> None:
    """Raise SettingError unless the program can be split over `degree` ranks, of which `context`
    at a time have the same heads."""
    tensor = degree // context
    given = f"tensor_parallel_size is {tensor}"
    if context > 1:
        given = f"context_parallel_size is {context}" + (f" and {given}" if tensor > 1 else "")
    if not 1 <= degree <= MAX_DEGREE:
        raise SettingError(f"{given}; 1 to {MAX_DEGREE} ranks are allowed")
    problems = _problems(program, degree, placement, context)
    if degree > 1 and problems:
        raise SettingError(
            f"{given}; {program.name} cannot be split over ranks: " + "; ".join(problems)
        )
    if not _divides(program, tensor):
        works = [str(other) for other in range(1, MAX_DEGREE + 1) if _divides(program, other)]
        heads = " and ".join(f"{h} heads over {kv}" for h, kv in sorted(_head_counts(program)))
        raise SettingError(
            f"tensor_parallel_size is {tensor}; {program.name} has {heads} KV heads, which do not "
            f"divide over so many ranks; these degrees work: {', '.join(works)}; "
            "context_parallel_size divides positions instead of heads"
        )


def kv_span(kv_heads: int, rank: int, degree: int) -> Span:
    """Return the KV heads of a rank."""
    first = rank * kv_heads // degree
    return first, first + max(kv_heads // degree, 1)


def _problems(program: Program, degree: int, placement: ExpertPlacement, context: int) -> list[str]:
    problems = []
    fewest = min((heads for heads, _ in _head_counts(program)), default=degree)
    if context > 1 and fewest < degree:
        problems.append(
            f"it has {fewest} heads, and each rank merges at least one: at most {fewest} ranks work"
        )
    inner = [
        program.weights[op.down]
        for op in program.operations()
        if isinstance(op, Experts) and not placement.of(op)
    ]
    columns = min((min(down.columns, down.expert_rows) for down in inner), default=degree)
    if columns < degree:
        problems.append(f"its experts have {columns} columns: at most {columns} ranks work")
    floats = [w.name for w in program.weights.values() if w.quantized and w.quantized.is_float]
    if floats:
        problems.append(
            f"{len(floats)} of its weights are kept in fp8 ({floats[0]} and so on), which shares "
            "blocks of rows; --quantization none, int8 or int4 can be split"
        )
    return problems


def _head_counts(program: Program) -> set[tuple[int, int]]:
    return {(op.heads, op.kv_heads) for op in program.operations() if isinstance(op, Attention)}


def _divides(program: Program, degree: int) -> bool:
    return all(
        heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
        for heads, kv_heads in _head_counts(program)
    )
