"""Compute the least time of a workload: its bytes at memory speed, its operations at peak.

Both are counted by the program's cost model and may overlap fully, so the larger one is the floor.
The head counts once per prompt and once per output token, weights once per step, with as many
requests in a step as may run.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.workloads import Workload
from quire.program.cost import StepShape
from quire.program.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes that must be read and operations that must be done."""

    num_bytes: int
    operations: int

    def floor_s(self, read_gb_per_s: float, gflops: float | None) -> float:
        """Seconds; without a known arithmetic limit only bytes count."""
        memory_s = self.num_bytes / read_gb_per_s / 1e9
        return memory_s if gflops is None else max(memory_s, self.operations / gflops / 1e9)


def workload_work(program: Program, workload: Workload, *, decode_only: bool = False) -> Work:
    """Return the work of a whole workload, or of its tokens after the first.

    Prompts are computed in one step each, a shared prefix once for all; then each running request
    computes one token a step.
    """
    num_bytes = operations = 0
    for number, one in enumerate(workload.lengths):
        start = one.shared if number else 0
        if not decode_only:
            prompt = program.step_cost(StepShape([one.prompt - start], [start]))
            operations += prompt.operations
            num_bytes += prompt.kv_bytes
        for depth in range(one.prompt, one.prompt + one.output - 1):
            token = program.step_cost(StepShape([1], [depth]))
            operations += token.operations
            # Requests that share a prefix may read it once a step.
            own_share = 1.0 if not number else (depth - one.shared) / depth
            num_bytes += round(token.kv_bytes * own_share)
    weights = program.step_cost(StepShape([1], [0])).weight_bytes
    num_steps = sum(one.output - 1 for one in workload.lengths) / workload.max_running
    return Work(
        num_bytes=num_bytes + round(weights * (num_steps + (not decode_only))),
        operations=operations,
    )
