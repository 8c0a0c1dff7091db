"""StepBudget: what is left to hand out within one step, in tokens and in predicted time.

Hands out in the order it is given and knows nothing of slots, blocks or requests. Always
holds: the first row that wants tokens gets at least one, however small the budget, so a step
never starves everybody; and rows of several tokens, bounded so that those of one are not kept
waiting, get a few together in each step.
"""

from __future__ import annotations

import math

import numpy as np

from quire.scheduler.cost import Bools, CostModel, Int32s

# Machines compute rows in tiles of so many: one row more costs as much as a whole tile, but for the
# first two, which weights on their way hide.
TILE_TOKENS = 16
# What prompts get in a step together, however tight their bound: one tile of rows.
LEAST_PROMPT_TOKENS = TILE_TOKENS


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
        """Further rows of several tokens may take so much together, and long prompts' so much."""
        self._prompt_cost, self._prompt_ms, self._long_ms = cost, prompt_ms, long_ms
        self._least = LEAST_PROMPT_TOKENS

    @property
    def spent(self) -> bool:
        """Whether nothing further can be handed out."""
        return self.tokens < 1 or (self.ms <= 0 and not self._untouched)

    def hand_out(self, starts: Int32s, wanted: Int32s, scored: Bools | None = None) -> Int32s:
        """Tokens for each row, in order, until the budget is spent. scored: see CostModel."""
        total, counts = int(np.add.reduce(wanted)), wanted
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
        """Rows that were handed tokens and cannot use them now."""
        self.tokens += int(np.add.reduce(counts))
        if self._cost is not None:
            self.ms += float(np.add.reduce(self._cost.rows_ms(starts, counts, scored)))

    def hand_out_one(
        self, start: int, wanted: int, *, scored: bool = False, is_long: bool = False
    ) -> int:
        """Tokens for one further row that wants `wanted` >= 1 of them; 0 if none are left.

        is_long: the row is a part of a long prompt.
        """
        count = min(wanted, self.tokens)
        if wanted > 1 and self._prompt_cost is not None:
            count = self._bounded(self._prompt_cost, start, count, scored=scored, is_long=is_long)
        if self._cost is not None and count > 0:
            most = self._cost.most_tokens(start, self.ms, scored=scored)
            count = min(count, max(most, int(self._untouched)))
            self.ms -= self._cost.row_ms(start, count, scored=scored)
        self.tokens -= count
        self._untouched = self._untouched and not count
        return count

    def prompt_room_ms(self, *, is_long: bool) -> float | None:
        """What a further part of a prompt may take; None where nothing bounds it."""
        left_ms = self._left_ms(is_long=is_long)
        if self._prompt_cost is None or left_ms == math.inf:
            return None
        return left_ms

    def prompt_pace(self, start: int, wanted: int, *, is_long: bool) -> float:
        """Tokens that hand_out_one would give such a prompt now, where prompts are bounded; fewer
        where they take longer than the bound: as many as it would allow."""
        cost = self._prompt_cost
        assert cost is not None, "prompts are bounded"
        count = min(wanted, self.tokens)
        count = self._within(cost, start, count, scored=False, is_long=is_long)
        left_ms = self._left_ms(is_long=is_long)
        ms = cost.row_ms(start, count)
        return count * left_ms / ms if ms > left_ms > 0 else float(count)

    def part_tokens(self, start: int, ms: float) -> int:
        """Tokens of a part that is computed by itself, whole, in so much time."""
        assert self._prompt_cost is not None, "prompts are bounded"
        return self._prompt_cost.most_tokens(start, ms - self._prompt_cost.fixed_ms)

    def hand_out_layers(
        self, start: int, count: int, left: int, num_layers: int, *, is_long: bool
    ) -> int:
        """How many of the `left` layers a part of so many tokens gets, once prompts are bounded;
        all where the bound is none. It reads its weights for itself, so that it costs a share of a
        whole step."""
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
        """At most `count` tokens of a prompt, within its bounds, which shrink."""
        if self._left_ms(is_long=is_long) == math.inf:
            return count
        count = self._within(cost, start, count, scored=scored, is_long=is_long)
        if count > 0:
            self._take(cost.row_ms(start, count, scored=scored), count, is_long=is_long)
        return count

    def _within(
        self, cost: CostModel, start: int, count: int, *, scored: bool, is_long: bool
    ) -> int:
        """At most `count` tokens of a prompt that its bounds allow."""
        most = cost.most_tokens(start, self._left_ms(is_long=is_long), scored=scored)
        if most < count:  # cut by time: to the end of a tile of the step's rows
            in_step = self._all_tokens - self.tokens + most
            most -= in_step % TILE_TOKENS if in_step > 2 * TILE_TOKENS else 0
        return min(count, max(most, self._least))

    def _cut_to_time(
        self, cost: CostModel, starts: Int32s, counts: Int32s, scored: Bools | None
    ) -> tuple[Int32s, float]:
        """What fits into the time left, and its cost."""
        first = counts.nonzero()[0][0]
        row_ms = cost.rows_ms(starts, counts, scored)
        until = np.cumsum(row_ms)
        cut = int(np.searchsorted(until, self.ms, side="right"))
        if cut == len(counts):
            return counts, float(until[-1])
        counts = counts.copy()
        left = self.ms - (float(until[cut - 1]) if cut else 0.0)
        is_scored = scored is not None and bool(scored[cut])
        most = cost.most_tokens(int(starts[cut]), left, scored=is_scored)
        counts[cut] = min(int(counts[cut]), most)
        counts[cut + 1 :] = 0
        if self._untouched and not np.count_nonzero(counts):
            counts[first] = 1
        return counts, float(np.add.reduce(cost.rows_ms(starts, counts, scored)))
