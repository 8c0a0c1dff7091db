"""Predict the time of a step on the simulated machine: from measured steps or a roofline.

`MeasuredCost` combines timed steps (quire/sim/profile.py). `LearnedCost` has the prices that a
running engine learned from its steps. `RooflineCost` counts what the program computes
(quire/program/cost.py) and divides by the machine's rates. None reads a clock. Always holds: the
time of a step depends on the step alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import PartLayers, StepPlan
from quire.program.cost import Cost, StepShape
from quire.program.expert_ops import expert_reads
from quire.program.program import Program
from quire.program.stage_ops import Recv
from quire.program.tensors import Rows
from quire.scheduler.cost.step_cost import LinearCost

Points = tuple[tuple[int, float], ...]  # (rows or tokens, milliseconds), ascending


class StepCost(Protocol):
    """Predicts one step."""

    def step_ms(self, plan: StepPlan) -> float:
        """Return the milliseconds from submitting the plan to having its result."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a plan computes, as far as its time depends on it.

    num_rows: rows, and draft tokens, each of which is sampled like a row. single_positions: cached
    positions of rows with one token, summed. chunk_pairs: pairs of a token of a longer row (a
    chunk) and a position before the chunk.
    """

    num_tokens: int
    num_rows: int
    single_positions: int
    chunk_pairs: int


def step_work(plan: StepPlan) -> StepWork:
    """Return the sums over the rows of a plan."""
    counts, starts = plan.counts, plan.starts
    num_rows = len(counts)
    num_tokens = int(np.add.reduce(counts))
    positions = int(np.add.reduce(starts, dtype=np.int64))
    if num_tokens == num_rows:
        return StepWork(num_tokens, num_rows, positions, 0)
    chunks = (counts > 1).nonzero()[0]
    chunk_starts = starts[chunks].astype(np.int64)
    pairs = int(np.dot(chunk_starts, counts[chunks]))
    num_rows += int(plan.draft_ids.size)
    return StepWork(num_tokens, num_rows, positions - int(np.add.reduce(chunk_starts)), pairs)


class MeasuredCost:
    """Step times interpolated between measured ones.

    chunk_ms: one chunk of so many tokens from position 0. rows_ms: so many rows of one token, at
    position 0. pair_ms: for each token of a chunk and position before the chunk. read_ms: for each
    position before a row of one token, by the number of such rows. loop_ms: the engine's own part
    of each step.
    """

    def __init__(
        self,
        *,
        chunk_ms: Points,
        rows_ms: Points,
        pair_ms: float,
        read_ms: Points,
        loop_ms: float = 0.0,
    ) -> None:
        most = max(chunk_ms[-1][0], rows_ms[-1][0]) + 1
        trunk = interpolate(chunk_ms, most)
        rows = interpolate(rows_ms, most)
        self._loop_ms = loop_ms
        self._trunk_ms: list[float] = (trunk + loop_ms).tolist()
        # Extra time of separate rows over one chunk of as many tokens: mostly the head.
        self._rows_more_ms: list[float] = (rows - trunk).tolist()
        self._read_ms: list[float] = interpolate(read_ms, most).tolist()
        self._pair_ms = pair_ms

    def step_ms(self, plan: StepPlan) -> float:
        """See StepCost."""
        work = step_work(plan)
        last = len(self._trunk_ms) - 1
        tokens, rows = min(work.num_tokens, last), min(work.num_rows, last)
        cost_ms = self._trunk_ms[tokens] + self._rows_more_ms[rows]
        cost_ms += work.single_positions * self._read_ms[rows] + work.chunk_pairs * self._pair_ms
        if work.num_tokens > last:
            cost_ms *= work.num_tokens / tokens
        return cost_ms if plan.layers is None else cost_ms + self._layers_ms(plan.layers)

    def _layers_ms(self, layers: PartLayers) -> float:
        """Return the time of a chunk's share that is computed by layers."""
        last = len(self._trunk_ms) - 1
        tokens = min(layers.count, last)
        chunk_ms = (self._trunk_ms[tokens] - self._loop_ms) * layers.count / tokens
        return layers.share * (chunk_ms + layers.count * layers.start * self._pair_ms)


class LearnedCost:
    """Step times from the prices that a running engine has learned (quire/scheduler/cost)."""

    def __init__(self, prices: LinearCost) -> None:
        self._prices = prices

    def step_ms(self, plan: StepPlan) -> float:
        """See StepCost."""
        counts = plan.counts.astype(np.float64)
        tokens = float(np.add.reduce(counts))
        pairs = float(np.dot(counts, plan.starts + 0.5 * (counts + 1.0)))
        reads = tokens + float(np.add.reduce(plan.starts, dtype=np.float64))
        heads = float(np.add.reduce(plan.sample_counts))
        cost_ms = self._ms(1.0, tokens, heads, pairs, reads)
        layers = plan.layers
        if layers is None:
            return cost_ms
        count, end = float(layers.count), float(layers.start + layers.count)
        pairs = count * (layers.start + 0.5 * (count + 1.0))
        return cost_ms + layers.share * self._ms(1.0, count, 0.0, pairs, end)

    def _ms(self, steps: float, tokens: float, heads: float, pairs: float, reads: float) -> float:
        prices = self._prices
        return (
            steps * prices.fixed_ms
            + tokens * prices.token_ms
            + heads * prices.score_ms
            + pairs * prices.position_ms
            + reads * prices.read_ms
        )


def interpolate(points: Points, length: int) -> NDArray[np.float64]:
    """Return values at 0 .. length - 1, linear between points and beyond the last one."""
    at = [point for point, _ in points]
    values = [value for _, value in points]
    everywhere = np.arange(length)
    found: NDArray[np.float64] = np.interp(everywhere, at, values)
    if len(points) > 1:
        last = bisect_right(at, length)
        if last == len(at):
            slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
            beyond = everywhere > at[-1]
            found[beyond] = values[-1] + slope * (everywhere[beyond] - at[-1])
    return found


def roofline_ms(
    cost: Cost, *, gb_per_s: float, product_gflop_per_s: float, attention_gflop_per_s: float
) -> float:
    """Return the least milliseconds of a step's cost, as RooflineCost counts them."""
    per_byte_ms = 1e3 / (gb_per_s * 1e9)
    products_ms = cost.product_ops * 1e3 / (product_gflop_per_s * 1e9)
    attention_ms = cost.attention_ops * 1e3 / (attention_gflop_per_s * 1e9)
    return max(cost.weight_bytes * per_byte_ms, products_ms) + max(
        cost.kv_bytes * per_byte_ms, attention_ms
    )


class RooflineCost:
    """The program's operations and bytes over the machine's rates.

    Products, and attention, each take as long as the slower of arithmetic and memory; other
    arithmetic is ignored. fixed_ms: overhead of each step. link_gb_per_s: of what a rank receives
    from others of its stage; rows of the stage before are left out (see StageCost).
    """

    def __init__(
        self,
        program: Program,
        *,
        gb_per_s: float,
        gflop_per_s: float,
        fixed_ms: float,
        link_gb_per_s: float = math.inf,
    ) -> None:
        self._per_byte_ms = 1e3 / (gb_per_s * 1e9)
        self._per_op_ms = 1e3 / (gflop_per_s * 1e9)
        self._fixed_ms = fixed_ms
        self._prices = _prices(program)
        self._experts = _experts(program)
        self._per_received_ms = 1e3 / (link_gb_per_s * 1e9)
        # Milliseconds of weights, products, keys and values, attention and exchanges, by feature.
        self._times_ms = np.array(
            [
                [price * per_ms for price in self._prices[name]]
                for name, per_ms in (
                    ("weight_bytes", self._per_byte_ms),
                    ("product_ops", self._per_op_ms),
                    ("kv_bytes", self._per_byte_ms),
                    ("attention_ops", self._per_op_ms),
                    ("comm_bytes", self._per_received_ms),
                )
            ]
        )

    def step_ms(self, plan: StepPlan) -> float:
        """See StepCost."""
        counts = plan.counts.astype(np.float64)
        num_tokens = float(np.add.reduce(counts))
        pairs = float(np.dot(counts, plan.starts + 0.5 * (counts + 1.0)))
        reads = num_tokens + float(np.add.reduce(plan.starts, dtype=np.float64))
        num_samples = float(len(counts) + plan.draft_ids.size)
        rows_ms = self._ms((1.0, num_tokens, num_samples, pairs, reads))
        layers = plan.layers
        if layers is None:
            return self._fixed_ms + rows_ms
        count, end = layers.count, layers.start + layers.count
        pairs = count * (layers.start + 0.5 * (count + 1))
        return self._fixed_ms + rows_ms + layers.share * self._ms((1.0, count, 0.0, pairs, end))

    def _ms(self, features: tuple[float, ...]) -> float:
        found = (self._times_ms @ features).tolist()
        weights_ms, products_ms, kv_ms, attention_ms, received_ms = found
        weights_ms += self._per_byte_ms * _read_experts(self._experts, features[1])
        return float(max(weights_ms, products_ms) + max(kv_ms, attention_ms) + received_ms)

    def linear(self) -> LinearCost:
        """Return the cost model of a step budget: weights as fixed time (of experts those of one
        row), arithmetic by token."""
        ops, attended = self._prices["product_ops"], self._prices["attention_ops"]
        received = self._prices["comm_bytes"]
        weight_bytes = self._prices["weight_bytes"][0] + _read_experts(self._experts, 1.0)
        return LinearCost(
            fixed_ms=self._fixed_ms + weight_bytes * self._per_byte_ms,
            token_ms=ops[1] * self._per_op_ms + received[1] * self._per_received_ms,
            position_ms=attended[3] * self._per_op_ms,
            score_ms=ops[2] * self._per_op_ms + received[2] * self._per_received_ms,
        )


def _prices(program: Program) -> Mapping[str, tuple[float, ...]]:
    """Return each field of Cost per step, token, sampled row, attended pair and position read.

    All are linear in these (attention windows are ignored), so a few steps that differ in one of
    them determine the coefficients. Bytes of experts are not, and are left out.
    """
    # Six steps that vary rows, samples, depth of one row, and a chunk at depth.
    shapes = (
        ((1,), (0,), 1),
        ((1, 1), (0, 0), 1),
        ((1, 1), (0, 0), 2),
        ((1,), (64,), 1),
        ((4,), (64,), 1),
        ((4, 1), (0, 64), 2),
    )
    steps = [StepShape(counts, starts, num_samples=rows) for counts, starts, rows in shapes]
    features = np.array(
        [
            (1, sum(counts), rows, step.attended_positions(0), step.read_positions(0))
            for step, (counts, _, rows) in zip(steps, shapes, strict=True)
        ],
        np.float64,
    )
    costs = [_without_messages(program, _without_experts(program, step), step) for step in steps]
    prices = {}
    for field in fields(Cost):
        values = np.array([getattr(cost, field.name) for cost in costs], np.float64)
        found, *_ = np.linalg.lstsq(features, values, rcond=None)
        prices[field.name] = tuple(found.tolist())
    return prices


def _experts(program: Program) -> list[tuple[int, float]]:
    return expert_reads(program, [op for ops in program.segments.values() for op in ops])


def _read_experts(experts: list[tuple[int, float]], num_tokens: float) -> float:
    """Return the bytes of experts that a step's tokens are expected to read."""
    read = 0.0
    for num_bytes, left_out in experts:
        read += num_bytes * (1.0 - math.pow(left_out, num_tokens))
    return read


def _without_experts(program: Program, step: StepShape) -> Cost:
    cost = program.step_cost(step)
    read = _read_experts(_experts(program), step.rows(Rows.TOKENS))
    return replace(cost, weight_bytes=cost.weight_bytes - round(read))


def _without_messages(program: Program, cost: Cost, step: StepShape) -> Cost:
    received = [op.cost(program, step).comm_bytes for op in received_of(program)]
    return replace(cost, comm_bytes=cost.comm_bytes - sum(received))


def received_of(program: Program) -> list[Recv]:
    """Return what a stage receives from the stage before in a step."""
    return [op for op in program.segments["trunk"] if isinstance(op, Recv)]
