"""LayeredChunks: a large chunk of a long prompt, computed some layers per step.

Where rows that generate bound what prompts may take of a step, a chunk of a few tokens reads all
weights, and all keys and values before it, for itself. A chunk of some hundred tokens reads them
once and is spread over as many steps as the bound requires (the idea: layered prefill, arXiv
2510.08055). The bits of a row do not depend on what is computed beside it, so no answer changes.
Knows depths, layers and budgets; no blocks. Always holds: one chunk is under way at a time; it
leaves the prompt's last token to an ordinary row, which samples; a request that leaves its slot
loses its chunk; a chunk that replaced another one is computed to the end, or its request leaves,
before a third replaces it.
"""

from __future__ import annotations

import numpy as np

from quire.base.records import PartLayers
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.plan_builder import PlanBuilder, Step
from quire.scheduler.running_batch import Index, RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.sequence_parts import LayeredPart
from quire.scheduler.step_budget import TILE_TOKENS, StepBudget

# A layered chunk must be so many times as fast as an ordinary one of the same step.
WORTH = 1.1


class LayeredChunks(StepExtension):
    """The large chunk of a scheduler, if any. is_active: it was allotted layers in this step."""

    def __init__(self, limits: SchedulerLimits, batch: RunningBatch) -> None:
        self._num_layers = limits.part_layers
        # Steps that a chunk may take, and the fewest layers a step that suffice: more of them leave
        # each less time.
        layers_of = {
            -(-self._num_layers // layers): layers for layers in range(self._num_layers, 0, -1)
        }
        self._shares = sorted(layers_of.items(), reverse=True)
        self._max_tokens = limits.layered_part_tokens
        self._batch = batch
        self._holder: SequenceState | None = None  # the request with the chunk under way
        self._was_taken = False  # the chunk under way replaced another
        self._now: tuple[SequenceState, int] | None = None  # in this step: up to which layer
        self._is_sent = self._had_turn = False  # had_turn: the one under way
        self.tokens_total = 0  # of chunks that were computed to the last layer

    def begin_step(self, step: Step) -> None:
        """Forget what was allotted in the last step."""
        self._now, self._is_sent, self._had_turn, self.is_active = None, False, False, False

    def allot(
        self, budget: StepBudget, sequence: SequenceState, start: int, wanted: int, *, scored: bool
    ) -> int | None:
        """Return the tokens of the chunk of `sequence` that is computed in this step.

        0 where it must wait for the next step; None: it gets an ordinary row.
        """
        if not self._num_layers:
            return None
        part = self._part_of(sequence, start)
        if part is None:
            if scored or sequence.group is not None or self._is_sent or self._is_busy():
                return None
            part = self._new_part(budget, start, wanted, is_long=sequence.entry.is_long)
            if part is None:
                return None
            self._begin(sequence, part)
        self._had_turn = self.is_active = True
        if self._is_sent:
            return 0
        left = self._num_layers - part.layers_done
        num = budget.allot_layers(
            part.start, part.count, left, self._num_layers, is_long=sequence.entry.is_long
        )
        if not num:
            return 0
        self._now = (sequence, part.layers_done + num)
        return part.count

    def row(self, index: Index) -> int | None:
        """Return which of slots `index` is computed by layers in this step; None for none."""
        if self._now is None or self._is_sent:
            return None
        rows = (index == self._now[0].slot).nonzero()[0]
        return int(rows[0]) if len(rows) else None

    def send(self, builder: PlanBuilder) -> None:
        """Put what was allotted into the plan; its blocks are there."""
        assert self._now is not None, "layers were handed out in this step"
        (sequence, end_layer), batch = self._now, self._batch
        part, slot = sequence.part, sequence.slot
        assert part is not None, "a sequence that is handed layers has a part"
        layers = PartLayers(
            slot=slot,
            start=part.start,
            count=part.count,
            store_from=max(part.start, int(batch.stored[slot])),
            first_layer=part.layers_done,
            end_layer=end_layer,
            num_layers=self._num_layers,
        )
        builder.set_layers(layers)
        part.layers_done, self._is_sent = end_layer, True
        if layers.is_last:
            index, end = np.array([slot], np.intp), np.array([part.start + part.count], np.int32)
            batch.schedule(index, end, batch.goal[index])
            sequence.part = self._holder = None
            self.tokens_total += part.count

    def _part_of(self, sequence: SequenceState, start: int) -> LayeredPart | None:
        """Return the chunk under way of `sequence`; drop it if ordinary rows went on since."""
        if sequence.part is not None and sequence.part.start != start:
            sequence.part = None
        return sequence.part

    def _under_way(self) -> SequenceState | None:
        """Return the request with the chunk that is begun and not computed."""
        holder = self._holder
        if holder is not None and holder.slot != NO_SLOT:
            self._part_of(holder, int(self._batch.scheduled[holder.slot]))
        return holder if holder is not None and holder.part is not None else None

    def _is_busy(self) -> bool:
        """Return whether the chunk of another request goes on.

        That is so where its turn was before, or where it replaced one itself. Else it is begun anew
        when its turn comes: prompts are asked in the policy's order, and the first does not wait
        for those behind it.
        """
        return self._under_way() is not None and (self._had_turn or self._was_taken)

    def _begin(self, sequence: SequenceState, part: LayeredPart) -> None:
        other = self._under_way()
        self._was_taken = other is not None
        if other is not None:
            other.part = None
        sequence.part, self._holder = part, sequence

    def _new_part(
        self, budget: StepBudget, start: int, wanted: int, *, is_long: bool
    ) -> LayeredPart | None:
        """Return the chunk by which most tokens are computed per step, within the step's bounds.

        None where there are none, or an ordinary row does about as well.
        """
        room_ms = budget.prompt_room_ms(is_long=is_long)
        if room_ms is None or room_ms <= 0:
            return None
        best, best_pace = 0, WORTH * budget.prompt_pace(start, wanted, is_long=is_long)
        longest = min(self._max_tokens, wanted - 1)
        for num_steps, layers in self._shares:
            if longest <= best_pace * num_steps:  # too few tokens a step, whatever the time allows
                continue
            count = min(budget.part_tokens(start, room_ms * self._num_layers / layers), longest)
            if count < wanted - 1:
                count -= count % TILE_TOKENS
            if count > best_pace * num_steps:
                best, best_pace = count, count / num_steps
        return LayeredPart(start=start, count=best) if best else None
