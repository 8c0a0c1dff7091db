"""Ranks in predictions: their shares, memory and step times.

Computed from each rank's program and the rates of its device; a device named `this` is one machine
that all ranks share, so that each has a part of its rates. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np

from quire.base.records import StepPlan
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig
from quire.engine.assembly.ranks import class_of
from quire.execute.executor import ExecutorMemory, StepLimits
from quire.program.comm_ops import num_exchanges
from quire.program.program import Program
from quire.ranks.stages import StageLayout
from quire.scheduler.cost.step_cost import LinearCost
from quire.sim.cost import RooflineCost, received_of

T = TypeVar("T")


def shares_of(program: Program, settings: ExecutorConfig) -> tuple[Program, ...]:
    """Return each rank's program; the program itself for one. Raises SettingError."""
    if settings.num_ranks == 1:
        return (program,)
    ranked = class_of(settings)
    ranked.check_program(program)
    return tuple(ranked.programs(program))


def by_stage(of_ranks: Sequence[T], settings: ExecutorConfig) -> tuple[tuple[T, ...], ...]:
    """Return what each stage's ranks have, by rank, the first stage first."""
    layout = StageLayout(stages=settings.pipeline_parallel_size, tp=settings.ranks_of_stage)
    return tuple(
        tuple(of_ranks[layout.rank_at(stage, place)] for place in range(layout.tp))
        for stage in range(layout.stages)
    )


def largest_memory(parts: Sequence[ExecutorMemory]) -> ExecutorMemory:
    """Return what a device of any rank needs, where each rank has its own."""
    return ExecutorMemory(
        weights_bytes=max(part.weights_bytes for part in parts),
        step_bytes=max(part.step_bytes for part in parts),
        token_bytes=max(part.token_bytes for part in parts),
        exchange_bytes=max(part.exchange_bytes for part in parts),
    )


def shared_memory_of(
    program: Program, settings: ExecutorConfig, limits: StepLimits
) -> ExecutorMemory:
    """Return what the ranks of an engine on one machine need, as the engine counts it."""
    return class_of(settings).memory_for(program, limits)


def exchanges_of(share: Program) -> int:
    """Return how often a rank waits for the others in a step."""
    return sum(num_exchanges(ops) for ops in share.segments.values())


class RanksCost:
    """A StepCost of ranks that share a described machine: the slowest rank's operations and bytes
    over its part of the rates, and what it receives over the link. num_ranks: that share the rates
    of the machine; None: those of `shares`."""

    def __init__(
        self,
        shares: Sequence[Program],
        *,
        gb_per_s: float,
        gflop_per_s: float,
        fixed_ms: float,
        link_gb_per_s: float,
        exchange_us: float,
        num_ranks: int | None = None,
    ) -> None:
        degree = num_ranks or len(shares)
        waited_ms = exchange_us / 1e3
        self._costs = [
            RooflineCost(
                share,
                gb_per_s=gb_per_s / degree,
                gflop_per_s=gflop_per_s / degree,
                fixed_ms=fixed_ms + waited_ms * exchanges_of(share),
                link_gb_per_s=link_gb_per_s,
            )
            for share in shares
        ]

    def step_ms(self, plan: StepPlan) -> float:
        """See StepCost."""
        return max(cost.step_ms(plan) for cost in self._costs)

    def linear(self) -> LinearCost:
        """See RooflineCost; of the rank with the largest fixed time."""
        return max((cost.linear() for cost in self._costs), key=lambda one: one.fixed_ms)


class StageCost:
    """A StepCost of one stage of a pipeline: its ranks, after the rows of a step have come from the
    stage before, at message_gb_per_s, in message_us more for each message."""

    def __init__(
        self,
        ranks: RanksCost,
        share: Program,
        *,
        message_gb_per_s: float,
        message_us: float,
    ) -> None:
        received = received_of(share)
        row_bytes = sum(op.y.width * op.y.dtype.itemsize for op in received)
        self._ranks = ranks
        self._row_ms = row_bytes / (message_gb_per_s * 1e6)
        self._message_ms = len(received) * message_us / 1e3

    def step_ms(self, plan: StepPlan) -> float:
        """See StepCost; the wait for the stage before is not part of it."""
        num_tokens = float(np.add.reduce(plan.counts))
        return self._message_ms + num_tokens * self._row_ms + self._ranks.step_ms(plan)

    def linear(self) -> LinearCost:
        """See RooflineCost."""
        linear = self._ranks.linear()
        return replace(
            linear,
            fixed_ms=linear.fixed_ms + self._message_ms,
            token_ms=linear.token_ms + self._row_ms,
        )


class PipelineCost:
    """A StepCost of a step alone in a pipeline: its time in all stages, one after the other."""

    def __init__(self, stages: Sequence[StageCost]) -> None:
        self._stages = stages

    def step_ms(self, plan: StepPlan) -> float:
        """See StepCost."""
        return sum(stage.step_ms(plan) for stage in self._stages)

    def linear(self) -> LinearCost:
        """See RooflineCost."""
        parts = [stage.linear() for stage in self._stages]
        return LinearCost(
            **{one.name: sum(getattr(part, one.name) for part in parts) for one in fields(parts[0])}
        )


def token_bytes_of(config: EngineConfig, program: Program) -> int:
    """Return the bytes of a token's keys and values over all ranks, copies included."""
    return sum(
        cache.token_bytes for share in shares_of(program, config.executor) for cache in share.caches
    )
