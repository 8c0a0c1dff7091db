"""Initial step costs from the program's counts of bytes and operations.

Assumes a fictitious machine with fixed rates, so only the proportions are meaningful. The
scheduler's estimate learns the scale from the first measured steps, and the rest from later ones.
"""

from __future__ import annotations

from quire.program.cost import Cost, StepShape
from quire.program.program import Program
from quire.scheduler.cost.step_cost import LinearCost

_BYTES_PER_MS = 20e6
_OPS_PER_MS = 500e6
_FAR = 1024


def initial_step_costs(program: Program) -> LinearCost:
    """Return what a step's parts would cost: arithmetic and traffic, one after the other."""

    def cost_of(count: int, start: int, num_samples: int) -> Cost:
        return program.step_cost(StepShape([count], [start], num_samples=num_samples))

    one, two = cost_of(1, 0, 0), cost_of(2, 0, 0)
    far, head = cost_of(1, _FAR, 0), cost_of(1, 0, 1)
    attended_ops = max(far.attention_ops - one.attention_ops, 0)
    read_bytes = max(far.kv_bytes - one.kv_bytes, 0)
    return LinearCost(
        fixed_ms=head.weight_bytes / _BYTES_PER_MS,
        token_ms=(two.product_ops + two.other_ops - one.product_ops - one.other_ops) / _OPS_PER_MS,
        score_ms=max(head.operations - one.operations, 0) / _OPS_PER_MS,
        position_ms=attended_ops / _FAR / _OPS_PER_MS,
        read_ms=read_bytes / _FAR / _BYTES_PER_MS,
    )
