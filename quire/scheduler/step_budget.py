"""What a step may hand out: tokens and predicted time (StepBudget), and blocks (BlockShares).

Also keeps the times of the last steps (StepTimes), from which costs are learned. Budgets hand out
in the order they are asked and know no slots or requests. Always holds: the first row that wants
tokens gets at least one, however small the budget, so a step never starves every request; and
bounded rows of several tokens get a few together in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request, StepPlan
from quire.cache.manager import CacheManager
from quire.scheduler.sequence import SequenceState

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Machines compute rows in tiles of so many: one row more costs as much as a whole tile, but for the
# first two, which weights on their way hide.
TILE_TOKENS = 16
# Tokens that prompts get in a step together, however tight their bound: one tile of rows.
MIN_PROMPT_TOKENS = TILE_TOKENS
# Steps that are noted before they are learned from, at most.
MAX_NOTED_STEPS = 64


class CostModel(Protocol):
    """Predicts the milliseconds of a step: a fixed part plus a part for each row."""

    @property
    def fixed_ms(self) -> float:
        """Cost of a step however little it computes."""

    def rows_ms(self, starts: Int32s, counts: Int32s, scored: Bools | None = None) -> Float64s:
        """Return the cost of each row that computes counts[i] tokens from position starts[i].

        scored: rows of which all tokens are scored, so that the head runs on each; None: no row.
        """

    def row_ms(self, start: int, count: int, *, scored: bool = False) -> float:
        """Return the same of one row."""

    def max_tokens(self, start: int, budget_ms: float, *, scored: bool = False) -> int:
        """Return how many tokens from position `start` on cost at most budget_ms."""


class StepBudget:
    """A fresh budget for one step. `tokens` and `ms` say what is left."""

    def __init__(self, tokens: int, ms: float, cost: CostModel | None) -> None:
        self.tokens = self._all_tokens = tokens
        self._cost = cost if ms > 0 else None
        self.ms = ms - self._cost.fixed_ms if self._cost is not None else math.inf
        self._untouched = True
        self._prompt_cost: CostModel | None = None
        self._prompt_ms = self._long_ms = math.inf
        self._least = 0

    @property
    def is_bounded(self) -> bool:
        """Whether prompts are bounded."""
        return self._prompt_cost is not None

    def bound(self, prompt_ms: float, long_ms: float, cost: CostModel) -> None:
        """Bound what further rows of several tokens may take together, and long prompts of that."""
        self._prompt_cost, self._prompt_ms, self._long_ms = cost, prompt_ms, long_ms
        self._least = MIN_PROMPT_TOKENS

    @property
    def spent(self) -> bool:
        """Whether nothing further can be allotted."""
        return self.tokens < 1 or (self.ms <= 0 and not self._untouched)

    def allot(self, starts: Int32s, wanted: Int32s, scored: Bools | None = None) -> Int32s:
        """Return tokens for each row, in order, until the budget is spent."""
        total = int(np.add.reduce(wanted))
        counts: Int32s = wanted
        if not total:
            return counts
        if total > self.tokens:
            before = np.cumsum(wanted, dtype=np.int64) - wanted
            counts = np.clip(self.tokens - before, 0, wanted).astype(np.int32)
            total = self.tokens
            if total < 1:
                return np.zeros_like(wanted)
        if self._cost is not None:
            counts, ms = self._cut_to_time(self._cost, starts, counts, scored)
            total, self.ms = int(np.add.reduce(counts)), self.ms - ms
        self.tokens -= total
        self._untouched = self._untouched and not total
        return counts

    def give_back(self, starts: Int32s, counts: Int32s, scored: Bools | None = None) -> None:
        """Take back tokens of rows that cannot use them now."""
        self.tokens += int(np.add.reduce(counts))
        if self._cost is not None:
            self.ms += float(np.add.reduce(self._cost.rows_ms(starts, counts, scored)))

    def allot_one(
        self, start: int, wanted: int, *, scored: bool = False, is_long: bool = False
    ) -> int:
        """Return tokens for one further row that wants `wanted` >= 1 of them; 0 if none are left.

        is_long: the row is a chunk of a long prompt.
        """
        count = min(wanted, self.tokens)
        if wanted > 1 and self._prompt_cost is not None and (is_long or self._prompt_ms < math.inf):
            count = self._bounded(self._prompt_cost, start, count, scored=scored, is_long=is_long)
        if self._cost is not None and count > 0:
            most = self._cost.max_tokens(start, self.ms, scored=scored)
            count = min(count, max(most, int(self._untouched)))
            self.ms -= self._cost.row_ms(start, count, scored=scored)
        self.tokens -= count
        self._untouched = self._untouched and not count
        return count

    def prompt_room_ms(self, *, is_long: bool) -> float | None:
        """Return what a further prompt chunk may take; None where nothing bounds it."""
        left_ms = self._left_ms(is_long=is_long)
        if self._prompt_cost is None or left_ms == math.inf:
            return None
        return left_ms

    def prompt_pace(self, start: int, wanted: int, *, is_long: bool) -> float:
        """Return the tokens that allot_one would give such a prompt now, where prompts are bounded.

        Fewer where they take longer than the bound: as many as it would allow.
        """
        cost = self._prompt_cost
        assert cost is not None, "prompts are bounded"
        count = min(wanted, self.tokens)
        count = self._within(cost, start, count, scored=False, is_long=is_long)
        left_ms = self._left_ms(is_long=is_long)
        ms = cost.row_ms(start, count)
        return count * left_ms / ms if ms > left_ms > 0 else float(count)

    def part_tokens(self, start: int, ms: float) -> int:
        """Return the tokens of a chunk that is computed by itself, whole, in so much time."""
        assert self._prompt_cost is not None, "prompts are bounded"
        return self._prompt_cost.max_tokens(start, ms - self._prompt_cost.fixed_ms)

    def allot_layers(
        self, start: int, count: int, left: int, num_layers: int, *, is_long: bool
    ) -> int:
        """Return how many of the `left` layers a chunk of so many tokens gets.

        All where prompts are bounded by no time. A chunk reads the weights for itself, so it costs
        a share of a whole step.
        """
        cost = self._prompt_cost
        assert cost is not None, "prompts are bounded"
        room_ms = min(self._left_ms(is_long=is_long), self.ms)
        layer_ms = max((cost.fixed_ms + cost.row_ms(start, count)) / num_layers, 1e-9)
        least = int(self._untouched or self._least > 0)
        num = left if room_ms >= left * layer_ms else max(int(room_ms / layer_ms), least)
        if num:
            self._take(num * layer_ms, count, is_long=is_long)
            self.ms -= num * layer_ms if self._cost is not None else 0.0
            self._untouched = False
        return num

    def _left_ms(self, *, is_long: bool) -> float:
        return min(self._prompt_ms, self._long_ms) if is_long else self._prompt_ms

    def _take(self, ms: float, count: int, *, is_long: bool) -> None:
        self._prompt_ms -= ms
        self._long_ms -= ms * is_long
        self._least = max(self._least - count, 0)

    def _bounded(
        self, cost: CostModel, start: int, count: int, *, scored: bool, is_long: bool
    ) -> int:
        """Return at most `count` tokens of a prompt, within its bounds, which shrink."""
        if self._left_ms(is_long=is_long) == math.inf:
            return count
        count = self._within(cost, start, count, scored=scored, is_long=is_long)
        if count > 0:
            self._take(cost.row_ms(start, count, scored=scored), count, is_long=is_long)
        return count

    def _within(
        self, cost: CostModel, start: int, count: int, *, scored: bool, is_long: bool
    ) -> int:
        """Return at most `count` tokens of a prompt that its bounds allow."""
        most = cost.max_tokens(start, self._left_ms(is_long=is_long), scored=scored)
        if most < count:  # cut by time: to the end of a tile of the step's rows
            in_step = self._all_tokens - self.tokens + most
            most -= in_step % TILE_TOKENS if in_step > 2 * TILE_TOKENS else 0
        return min(count, max(most, self._least))

    def _cut_to_time(
        self, cost: CostModel, starts: Int32s, counts: Int32s, scored: Bools | None
    ) -> tuple[Int32s, float]:
        """Return what fits into the time left, and its cost."""
        first = counts.nonzero()[0][0]
        row_ms = cost.rows_ms(starts, counts, scored)
        until = np.cumsum(row_ms)
        cut = int(np.searchsorted(until, self.ms, side="right"))
        if cut == len(counts):
            return counts, float(until[-1])
        counts = counts.copy()
        left = self.ms - (float(until[cut - 1]) if cut else 0.0)
        is_scored = scored is not None and bool(scored[cut])
        most = cost.max_tokens(int(starts[cut]), left, scored=is_scored)
        counts[cut] = min(int(counts[cut]), most)
        counts[cut + 1 :] = 0
        if self._untouched and not np.count_nonzero(counts):
            counts[first] = 1
        return counts, float(np.add.reduce(cost.rows_ms(starts, counts, scored)))


class StepTimes:
    """Times of steps, kept until a cost estimate learns from them.

    num_steps: how many were noted in all.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._noted: list[tuple[StepPlan, int, float]] = []

    def note(self, plan: StepPlan, num_heads: int, ms: float) -> None:
        """Keep that `plan` took `ms`, with num_heads rows through the head; ignore times of 0."""
        if not 0 < ms < math.inf:
            return
        self._noted.append((plan, num_heads, ms))
        self.num_steps += 1
        if len(self._noted) >= MAX_NOTED_STEPS:
            self._learn()

    def _learn(self) -> None:
        """Take in the noted steps. Here they are dropped."""
        self._noted.clear()


class BlockShares:
    """Which blocks a request may take. Without tenants: all that are free.

    Also counts waiting and running requests, by tenant where there are several.
    """

    has_floors = has_ceilings = limits_running = False

    def __init__(self, cache: CacheManager, num_slots: int) -> None:
        self._cache = cache
        self._num_slots = num_slots
        self.waiting = [0]
        self.running = [0]

    def max_tokens(self, request: Request) -> int:
        """Return how many tokens a request may hold in KV blocks."""
        return self._cache.num_tokens

    def max_running(self, request: Request) -> int:
        """Return how many requests of its tenant may run at once."""
        return self._num_slots

    def shown(self, request: Request) -> str:
        """Return the name of its tenant as it is shown to callers."""
        return "default"

    def check_queue(self, request: Request, retry_after_s: Callable[[], float | None]) -> None:
        """Raise where too many requests of its tenant wait."""

    def enqueued(self, sequence: SequenceState) -> None:
        """Count a request that enters the queue."""
        self.waiting[0] += 1

    def dequeued(self, sequence: SequenceState) -> None:
        """Count a request that leaves the queue, to run or for good."""
        self.waiting[0] -= 1

    def started(self, sequence: SequenceState) -> None:
        """Count a request that has got its slot."""
        self.running[0] += 1

    def stopped(self, slots: Sequence[int]) -> None:
        """Count the requests that leave `slots`."""
        self.running[0] -= len(slots)

    def changed(self) -> None:
        """Forget sums: blocks or goals of running requests have changed."""

    def is_full(self, sequence: SequenceState) -> bool:
        """Return whether as many of its tenant's requests run as may."""
        return False

    def passes_ceiling(self, sequence: SequenceState, num_blocks: int) -> bool:
        """Return whether its tenant may have `num_blocks` more."""
        return True

    def reserved_for_others(self, sequence: SequenceState) -> int:
        """Return how many free blocks are reserved for other tenants."""
        return 0

    def has_floor_left(self, sequence: SequenceState) -> bool:
        """Return whether blocks are reserved for its tenant."""
        return False

    def fits_floor(self, sequence: SequenceState, num_blocks: int) -> bool:
        """Return whether `num_blocks` of those reserved for its tenant are free now."""
        return False

    def any_floor_left(self) -> bool:
        """Return whether blocks are reserved for a tenant with waiting requests."""
        return False

    def can_grow(self, slots: Index, needs: Int32s) -> bool:
        """Return whether each of `slots` may take needs[i] more blocks, all of them together."""
        return self._cache.num_free >= int(np.add.reduce(needs))

    def reserved_from_slot(self, slot: int) -> int:
        """Return how many free blocks are reserved for tenants other than the one in `slot`."""
        return 0

    def may_lose(self, victim: int, slot: int) -> bool:
        """Return whether slot `victim` may be preempted for the request in `slot`."""
        return True

    def may_lose_for(self, victim: int, sequence: SequenceState) -> bool:
        """Return whether slot `victim` may be preempted for the waiting `sequence`."""
        return True

    def above_ceilings(self) -> list[tuple[int, Index]]:
        """Return the tenants that have more than their ceiling, by number, and their slots."""
        return []

    def is_above_ceiling(self, number: int) -> bool:
        """Return whether tenant `number` has more than its ceiling."""
        return False

    def reported_blocks(self, now_ms: float) -> tuple[int, ...]:
        """Return the blocks of each tenant's running requests, for metrics."""
        return (0,)

    def problems(self, num_waiting: int) -> list[str]:
        """Return contradictions between these counts and the running batch, in words."""
        if self.waiting == [num_waiting]:
            return []
        return [f"{self.waiting[0]} requests are counted as waiting, {num_waiting} wait"]
