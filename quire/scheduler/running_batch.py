"""RunningBatch: the running requests in arrays, one entry per slot.

A request has tokens known (tokens.lengths), scheduled (handed out in plans) and computed (their
plans have ended well); `goal` is how far it should be scheduled now. There are no phases: a prompt,
a chunk of it and a single new token are the same distance between scheduled and goal. Knows no
blocks, budgets or order of service. Always holds, for running slots: computed <= scheduled <= goal
<= ceiling, and `active` lists them in order of admission.

Slots come in two kinds of array: int32 in plans, and `Index` (the platform's index type) where they
index arrays, which is three times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.scheduler.sequence import NO_SLOT, SequenceState

Int32s = NDArray[np.int32]
Index = NDArray[np.intp]
Bools = NDArray[np.bool_]


class Totals(NamedTuple):
    """Sums over the running requests.

    known: tokens. unscheduled: of these, and of samples in flight, those not scheduled. room:
    tokens they may still have.
    """

    known: float
    unscheduled: float
    room: float


class RunningBatch:
    """Arrays for `num_slots` requests of up to `max_model_len` tokens."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.tokens = TokenTable(num_slots, max_model_len)
        self.scheduled: Int32s = np.zeros(num_slots, np.int32)
        self.computed: Int32s = np.zeros(num_slots, np.int32)
        # Known tokens, and one more for each sample in flight: the worker knows it already.
        self.goal: Int32s = np.zeros(num_slots, np.int32)
        # The last token a request may have needs no computing: goals stop at limit - 1. But a
        # request without output, which is there for its prompt's scores, has all of it computed.
        self.ceiling: Int32s = np.zeros(num_slots, np.int32)
        # The final ceiling: that of a beam rises with each decision.
        self.longest: Int32s = np.zeros(num_slots, np.int32)
        # Positions below lie in shared blocks and are never stored again.
        self.stored: Int32s = np.zeros(num_slots, np.int32)
        # Known length that requires an event: the first token, then the limit.
        self.next_event: Int32s = np.zeros(num_slots, np.int32)
        # Positions before are scored, so that computing them costs more; 0 where none are.
        self._scored_until: Int32s = np.zeros(num_slots, np.int32)
        self._num_scored = 0
        self.num_without_output = 0
        self._without_output: Bools = np.zeros(num_slots, np.bool_)
        self.num_reporting = 0
        self._reports: Bools = np.zeros(num_slots, np.bool_)  # requests with report_progress
        self._stop_ids: Int32s = np.full((num_slots, 0), -1, np.int32)  # padded with -1
        self._stop_ids_of: list[tuple[int, ...]] = [()] * num_slots  # what its row holds
        # How many running requests have a set of stop ids; how many such sets have a token id, and
        # whether any has; the last entry stands for all ids beyond and stays 0. Most steps meet no
        # such id at all.
        self._stop_set_uses: dict[tuple[int, ...], int] = {}
        self._stop_uses: Int32s = np.zeros(1, np.int32)
        self._stops_any: Bools = np.zeros(1, np.bool_)
        self.last_token_ms: NDArray[np.float64] = np.full(num_slots, np.nan)
        self.mirostat_mus: NDArray[np.float32] = np.zeros(num_slots, np.float32)
        self.tpot_slo_ms: NDArray[np.float64] = np.full(num_slots, np.inf)  # inf: not asked for
        self.num_long = 0  # running requests with long prompts
        self.sequences: list[SequenceState | None] = [None] * num_slots
        self.free_slots: list[int] = list(range(num_slots - 1, -1, -1))
        # Replaced on events and never changed in place: between events it is the same object, and
        # so is what was derived from it.
        self.active: Index = np.empty(0, np.intp)
        self.active_slots: Int32s = np.empty(0, np.int32)
        self._request_ids: NDArray[Any] = np.full(num_slots, None, object)
        self._named: tuple[Index, list[str]] | None = None
        # Slots, and where their tokens begin in _flat_tokens: of the last that got any.
        self._placed: tuple[Index, Index] = (self.active, self.active)
        self._runs: Bools = np.zeros(num_slots, np.bool_)
        self._totals: Totals | None = None  # until anything of them changes
        self._flat_tokens: Int32s = self.tokens.tokens.reshape(-1)

    def sequence(self, slot: int) -> SequenceState:
        """Return the request that runs in `slot`."""
        sequence = self.sequences[slot]
        if sequence is None:
            raise RuntimeError(f"slot {slot} is empty; a running one was expected")
        return sequence

    def has_prompt(self, sequence: SequenceState) -> bool:
        """Return whether the blocks of a running request hold its whole prompt."""
        return int(self.computed[sequence.slot]) >= sequence.num_prompt_tokens

    def occupy(self, sequence: SequenceState, start: int, stored: int) -> int:
        """Give `sequence` a slot and return it; the request runs after the next `activate`.

        Positions before `start` count as computed; for `stored` see above.
        """
        slot, request = self.free_slots.pop(), sequence.request
        known, num_prompt_tokens = len(sequence.token_ids), sequence.num_prompt_tokens
        self.tokens.admit(slot, sequence.token_ids, num_prompt_tokens)
        self.scheduled[slot] = self.computed[slot] = start
        self.goal[slot] = known
        self.ceiling[slot] = self.longest[slot] = max(sequence.limit - 1, num_prompt_tokens)
        self.stored[slot] = stored
        first_ms = sequence.times.first_token_ms
        self.next_event[slot] = sequence.limit if first_ms == first_ms else known + 1  # NaN: none
        # An empty slot has what most requests have of the following; release() sees to that.
        if sequence.limit == num_prompt_tokens:
            self._without_output[slot] = True
            self.num_without_output += 1
        if request.report_progress:
            self._reports[slot] = True
            self.num_reporting += 1
        if sequence.scores is not None and sequence.has_positions_to_score:
            self._scored_until[slot] = num_prompt_tokens - 1
            self._num_scored += 1
        if first_ms == first_ms:
            self.last_token_ms[slot] = sequence.times.last_token_ms
        if sequence.preemption.mirostat_mu:
            self.mirostat_mus[slot] = sequence.preemption.mirostat_mu
        if request.tpot_slo_ms is not None:
            self.tpot_slo_ms[slot] = request.tpot_slo_ms
        self.num_long += sequence.entry.is_long
        stop_ids, uses = request.stop_ids, self._stop_set_uses
        if stop_ids in uses:
            uses[stop_ids] += 1
        else:
            uses[stop_ids] = 1
            self._mark_stops(stop_ids)
        if self._stop_ids_of[slot] != stop_ids:  # most requests have the same
            self._hold_stops(slot, stop_ids)
        self._request_ids[slot] = request.request_id
        self.sequences[slot] = sequence
        sequence.slot = slot
        sequence.was_admitted = True
        return slot

    def activate(self, slots: Sequence[int]) -> None:
        """Let `slots`, all occupied since the last call, run from now on."""
        index = np.array(slots, np.intp)
        self._runs[index] = True
        self._set_active(np.concatenate((self.active, index)))

    def hold_at(self, slots: Sequence[int], known: int, *, computed: int) -> None:
        """Let each of `slots`, computed so far, go on to `known` tokens and wait there.

        For rows of which the next token is not chosen by the worker; each result is an event.
        """
        self.scheduled[slots] = self.computed[slots] = computed
        self.goal[slots] = self.ceiling[slots] = known
        self.stored[slots] = np.maximum(self.stored[slots], computed)
        self.next_event[slots] = 0
        self._totals = None

    def runs(self, index: Index) -> Bools:
        """Return which of slots `index` are running."""
        running: Bools = self._runs[index]
        return running

    def schedule(self, index: Index, ends: Int32s, goals: Int32s) -> Int32s:
        """Advance slots `index` to `ends` in this plan; return the sampled positions per row."""
        samples: Bools = ends == goals
        if self.num_without_output:
            samples &= ~self._without_output[index]
        counts: Int32s = samples.astype(np.int32)
        self.scheduled[index] = ends
        self.goal[index] = np.minimum(goals + counts, self.ceiling[index])
        self._totals = None
        return counts

    def done_without_output(self, index: Index, ends: Int32s) -> list[SequenceState]:
        """Return requests of slots `index`, computed up to `ends`, that want no output."""
        if not self.num_without_output:
            return []
        done = self._without_output[index] & (ends >= self.ceiling[index])
        return [self.sequence(slot) for slot in index[done].tolist()]

    def reporting(self, index: Index) -> list[int]:
        """Return the slots of `index` with requests that report prompt progress."""
        slots: list[int] = index[self._reports[index]].tolist()
        return slots

    def still_scored(self, index: Index, starts: Int32s) -> Bools | None:
        """Return which rows of slots `index` compute scored positions, from `starts` on."""
        return starts < self._scored_until[index] if self._num_scored else None

    def append(self, index: Index, token_ids: Int32s, now_ms: float) -> Int32s:
        """Add one more known token for each of slots `index`; return the new lengths."""
        if index is not self._placed[0]:
            self._placed = (index, index * self.tokens.tokens.shape[1])
        known = self.tokens.lengths
        lengths = known[index]
        self._flat_tokens[self._placed[1] + lengths] = token_ids
        lengths += 1
        known[index] = lengths
        self.last_token_ms[index] = now_ms
        self._totals = None
        return lengths

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Further known tokens for one slot, of which no plan that is out has a row."""
        known = int(self.tokens.lengths[slot])
        self.tokens.tokens[slot, known : known + len(token_ids)] = token_ids
        self.tokens.lengths[slot] = known + len(token_ids)
        self.goal[slot] = min(known + len(token_ids), int(self.ceiling[slot]))
        self._totals = None

    def forget_totals(self) -> None:
        """Note that goals or tokens were changed from outside."""
        self._totals = None

    def totals(self) -> Totals:
        """Return the sums over running requests, computed once until one of them changes."""
        if self._totals is None:
            self._totals = self._sum_up()
        return self._totals

    def hits_stop(self, index: Index, token_ids: Int32s) -> Bools:
        """Return whether token_ids[i] ends the request in slot index[i]."""
        hits: Bools = self._stops_any.take(token_ids, mode="clip")
        rows = hits.nonzero()[0]
        if len(rows):
            own = self._stop_ids[index[rows]] == token_ids[rows, None]
            hits[rows] = np.logical_or.reduce(own, axis=1)
        return hits

    def request_ids(self, index: Index) -> list[str]:
        """Return the request ids of slots `index`; the same list while nothing changes."""
        if self._named is None or self._named[0] is not index:
            self._named = (index, self._request_ids[index].tolist())
        return self._named[1]

    def release(self, slots: Sequence[int]) -> None:
        """Free `slots` (distinct); their sequences keep what they need to return."""
        index = np.array(slots, np.intp)
        sequences, uses = self.sequences, self._stop_set_uses
        for slot, last_token_ms in zip(slots, self.last_token_ms[index].tolist(), strict=True):
            sequence = sequences[slot]
            if sequence is None:
                raise RuntimeError(f"slot {slot} is empty; it cannot be released")
            sequence.times.last_token_ms = last_token_ms
            sequence.slot, sequence.part = NO_SLOT, None
            self.num_long -= sequence.entry.is_long
            sequences[slot] = None
            uses[sequence.request.stop_ids] -= 1
            if not uses[sequence.request.stop_ids]:
                self._unwatch_stops(sequence.request.stop_ids)
        self.free_slots.extend(slots)
        self.last_token_ms[index] = np.nan
        self.mirostat_mus[index] = 0.0
        self.tpot_slo_ms[index] = np.inf
        if self.num_without_output:
            self.num_without_output -= int(np.count_nonzero(self._without_output[index]))
            self._without_output[index] = False
        if self.num_reporting:
            self.num_reporting -= int(np.count_nonzero(self._reports[index]))
            self._reports[index] = False
        if self._num_scored:
            self._num_scored -= int(np.count_nonzero(self._scored_until[index]))
            self._scored_until[index] = 0
        self._request_ids[index] = None
        self._runs[index] = False
        self._set_active(self.active[self._runs[self.active]])

    def problems(self) -> list[str]:
        """Return contradictions between the arrays, in words."""
        found = []
        running = [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]
        if sorted(self.active.tolist()) != running:
            found.append(f"slots {running} have sequences, slots {self.active.tolist()} are active")
        if sorted(self.free_slots + running) != list(range(len(self.sequences))):
            found.append(f"free slots {self.free_slots} and running {running} do not add up")
        for slot in running:
            counts = (self.computed[slot], self.scheduled[slot], self.goal[slot])
            bounds = (*counts, self.ceiling[slot])
            if list(bounds) != sorted(bounds) or self.sequences[slot].slot != slot:  # type: ignore[union-attr]
                found.append(f"slot {slot}: computed, scheduled, goal, ceiling are {bounds}")
        if self._totals not in (None, self._sum_up()):
            found.append(f"running requests have {self._sum_up()}, not {self._totals}")
        return found

    def _sum_up(self) -> Totals:
        active = self.active
        goal = self.goal[active]
        return Totals(
            known=float(np.add.reduce(self.tokens.lengths[active], dtype=np.float64)),
            unscheduled=float(np.add.reduce(goal - self.scheduled[active])),
            room=float(np.add.reduce(self.ceiling[active] - goal, dtype=np.float64)),
        )

    def _set_active(self, active: Index) -> None:
        self.active, self.active_slots = active, active.astype(np.int32)
        self._named = self._totals = None

    def _hold_stops(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """Let the row of `slot` hold `stop_ids`."""
        self._stop_ids_of[slot] = stop_ids
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = stop_ids

    def _unwatch_stops(self, stop_ids: tuple[int, ...]) -> None:
        """Forget a set of stop ids that no running request has any more."""
        del self._stop_set_uses[stop_ids]
        for token_id in stop_ids:
            self._stop_uses[token_id] -= 1
            self._stops_any[token_id] = self._stop_uses[token_id] > 0

    def _mark_stops(self, stop_ids: tuple[int, ...]) -> None:
        """Make room for `stop_ids`, a new set, and count them."""
        num_slots, width = self._stop_ids.shape
        if len(stop_ids) > width:
            wider = np.full((num_slots, len(stop_ids)), -1, np.int32)
            wider[:, :width] = self._stop_ids
            self._stop_ids = wider
        highest = max(stop_ids, default=-1)
        if highest + 2 > len(self._stop_uses):
            more = 2 * highest + 2 - len(self._stop_uses)
            self._stop_uses = np.pad(self._stop_uses, (0, more))
            self._stops_any = np.pad(self._stops_any, (0, more))
        for token_id in stop_ids:
            self._stop_uses[token_id] += 1
            self._stops_any[token_id] = True
