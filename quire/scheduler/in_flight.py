"""InFlightPlans: plans that were sent and not updated, and which rows of a result are valid.

Knows rows and slots, not what they are for. A row is valid if its slot still has the request it had
when the plan was made, and the worker reported no error for it. Always holds: plans land in the
order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.records import RowError, StepPlan, StepResult
from quire.scheduler.running_batch import Bools, Index, Int32s


@dataclass(slots=True, kw_only=True)
class PlanOutcome:
    """The valid rows of a result, and the errors of requests that are still live.

    index, ends: slots computed well, and how far; rows: their rows in the plan, None for all.
    sampled: slots that got a run of tokens, at most one per row whatever its sample_counts.
    entries: the index of each run's first token in the result's arrays, run_lengths: its length;
    both None where every run is one token, in order.
    by_layers: the slot of a chunk that was computed to its last layer, and its end; None for none.
    """

    index: Index
    ends: Int32s
    rows: Index | None
    sampled: Index
    entries: Index | None
    run_lengths: Int32s | None
    errors: tuple[RowError, ...]
    by_layers: tuple[int, int] | None = None


@dataclass(slots=True, kw_only=True)
class InFlightPlan:
    """A plan in flight since `began_ms`.

    index, ends: its slots as an index, and starts + counts. left: slots that their request has left
    since the plan was made. branched: slots that get blocks of others, maybe without a row.
    """

    plan: StepPlan
    index: Index
    ends: Int32s
    began_ms: float = 0.0
    left: list[int] = field(default_factory=list)
    branched: frozenset[int] = frozenset()

    def names(self, index: Index) -> Bools:
        """Return which of slots `index` the plan has a row for, or copies blocks for."""
        layers = self.plan.layers
        others = [*self.branched] if layers is None else [*self.branched, layers.slot]
        most = max(self.index.max(initial=0), index.max(initial=0), *others)
        marks = np.zeros(1 + int(most), np.bool_)
        marks[self.index] = True
        marks[others] = True
        named: Bools = marks[index]
        return named

    def land(self, result: StepResult) -> PlanOutcome:
        """Sort out `result`.

        Raises WorkerError if it does not answer the plan.
        """
        plan = self.plan
        num_rows = len(plan.slots)
        if result.step != plan.step or len(result.token_counts) != num_rows:
            raise WorkerError(
                f"the worker answered step {result.step} with {len(result.token_counts)} rows; "
                f"step {plan.step} has {num_rows} rows: it must answer plans in order"
            )
        if self.left or result.errors:
            return self._land_part(result)
        num_sampled = np.count_nonzero(plan.sample_counts)
        if len(result.token_ids) != num_sampled:  # longer runs, or a mismatch
            return self._land_part(result)
        if np.count_nonzero(result.token_counts == plan.sample_counts) < num_rows:
            return self._land_part(result)
        return PlanOutcome(
            index=self.index,
            ends=self.ends,
            rows=None,
            sampled=self.index if num_sampled == num_rows else self.index[plan.samples],
            entries=None,
            run_lengths=None,
            errors=(),
            by_layers=self._by_layers(),
        )

    def _land_part(self, result: StepResult) -> PlanOutcome:
        plan, counts = self.plan, result.token_counts
        present = np.ones(len(plan.slots), np.bool_)
        if self.left:
            marks = np.zeros(1 + int(max(self.index.max(initial=0), *self.left)), np.bool_)
            marks[self.left] = True
            present = ~marks[self.index]
        failed = [error.row for error in result.errors]
        by_layers = None if len(plan.slots) in failed else self._by_layers()
        stands = present.copy()
        stands[[row for row in failed if row < len(stands)]] = False
        samples = plan.samples
        mismatches = stands & ((counts > 0) != samples)
        if mismatches.any() or (counts < 0).any() or counts.sum() != len(result.token_ids):
            raise self._mismatch(result)
        first_entry = np.cumsum(counts, dtype=np.intp) - counts
        sampling = (stands & samples).nonzero()[0]
        return PlanOutcome(
            index=self.index[stands],
            ends=self.ends[stands],
            rows=stands.nonzero()[0],
            sampled=self.index[sampling],
            entries=first_entry[sampling],
            run_lengths=counts[sampling],
            errors=tuple(e for e in result.errors if plan.slot_of(e.row) not in self.left),
            by_layers=by_layers,
        )

    def _by_layers(self) -> tuple[int, int] | None:
        """Return PlanOutcome.by_layers, where the chunk did not fail."""
        layers = self.plan.layers
        if layers is None or not layers.is_last or layers.slot in self.left:
            return None
        return layers.slot, layers.start + layers.count

    def _mismatch(self, result: StepResult) -> WorkerError:
        wrong = np.flatnonzero((result.token_counts > 0) != self.plan.samples)[:8].tolist()
        return WorkerError(
            f"step {result.step}: the result has {len(result.token_ids)} tokens, counts that sum "
            f"to {result.token_counts.sum()}, and counts other than planned in rows {wrong}; each "
            "row that samples and has no error must have a run of at least one token, and no other "
            "row may have any"
        )


class InFlightPlans:
    """The plans in flight, oldest first. step: the number of the last one sent."""

    def __init__(self) -> None:
        self.step = 0
        self._out: deque[InFlightPlan] = deque()

    def __len__(self) -> int:
        return len(self._out)

    def __iter__(self) -> Iterator[InFlightPlan]:
        return iter(self._out)

    def send(self, flight: InFlightPlan, now_ms: float) -> StepPlan:
        """Send a plan."""
        flight.began_ms = now_ms
        self.step = flight.plan.step
        self._out.append(flight)
        return flight.plan

    def land(self, plan: StepPlan, result: StepResult) -> tuple[PlanOutcome, float]:
        """Return the valid part of `result`, which answers `plan`, and when the plan was sent.

        Raises WorkerError where it does not answer the oldest plan.
        """
        if not self._out or self._out[0].plan is not plan:
            raise WorkerError(
                f"step {plan.step} was updated out of order; the oldest plan that is out is "
                f"{self._out[0].plan.step if self._out else 'none'}"
            )
        outcome = self._out[0].land(result)
        return outcome, self._out.popleft().began_ms

    def left(self, slots: Sequence[int]) -> None:
        """Note that the requests in `slots` have left them."""
        for flight in self._out:
            flight.left.extend(slots)

    def last_steps(self, index: Index) -> NDArray[np.int64]:
        """Return the last plan in flight that names slot index[i]; 0 for none."""
        steps = np.zeros(len(index), np.int64)
        for flight in self._out:
            steps[flight.names(index)] = flight.plan.step
        return steps
