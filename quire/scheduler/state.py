"""RunningState: the running requests in arrays, one entry a slot.

A request has tokens known (tokens.lengths), scheduled (handed out in plans) and computed (their
plans have ended well); `goal` is how far it should be scheduled now. There are no phases: a
prompt, a chunk of it and a single new token are the same distance between scheduled and goal.
Knows no blocks, budgets or order of service. Always holds, for running slots:
computed <= scheduled <= goal <= limit - 1, and `active` lists them in order of admission.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.scheduler.ticket import NO_SLOT, Ticket

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


class RunningState:
    """Room for `num_slots` requests of up to `max_model_len` tokens."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.tokens = TokenTable(num_slots, max_model_len)
        self.scheduled: Int32s = np.zeros(num_slots, np.int32)
        self.computed: Int32s = np.zeros(num_slots, np.int32)
        # Known tokens, and one more for each sample in flight: the worker knows it already.
        self.goal: Int32s = np.zeros(num_slots, np.int32)
        # The last token a request may have needs no computing: goals stop at limit - 1.
        self.ceiling: Int32s = np.zeros(num_slots, np.int32)
        # Positions below lie in shared blocks and are never stored again.
        self.stored: Int32s = np.zeros(num_slots, np.int32)
        # Known length that is worth an event: the first token, then the limit.
        self.next_event: Int32s = np.zeros(num_slots, np.int32)
        self.stop_ids: Int32s = np.full((num_slots, 0), -1, np.int32)  # padded with -1
        self.last_token_ms: NDArray[np.float64] = np.full(num_slots, np.nan)
        self.request_ids: NDArray[Any] = np.full(num_slots, None, object)
        self.tickets: list[Ticket | None] = [None] * num_slots
        self.active: Int32s = np.empty(0, np.int32)
        self.free_slots: list[int] = list(range(num_slots - 1, -1, -1))
        self._runs: Bools = np.zeros(num_slots, np.bool_)

    def ticket(self, slot: int) -> Ticket:
        """The request that runs in `slot`."""
        ticket = self.tickets[slot]
        if ticket is None:
            raise RuntimeError(f"slot {slot} is empty; a running one was expected")
        return ticket

    def occupy(self, ticket: Ticket, start: int, stored: int) -> int:
        """Give `ticket` a slot. Positions before `start` count as computed; see `stored` above."""
        slot = self.free_slots.pop()
        known, stops = len(ticket.token_ids), ticket.request.stop_ids
        self.tokens.admit(slot, ticket.token_ids, ticket.num_prompt_tokens)
        self.scheduled[slot] = self.computed[slot] = start
        self.goal[slot] = known
        self.ceiling[slot] = ticket.limit - 1
        self.stored[slot] = stored
        first = known == ticket.num_prompt_tokens
        self.next_event[slot] = known + 1 if first else ticket.limit
        self._widen_stop_ids(len(stops))
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops
        self.last_token_ms[slot] = ticket.last_token_ms
        self.request_ids[slot] = ticket.request.request_id
        self.tickets[slot] = ticket
        self.active = np.append(self.active, np.int32(slot))
        self._runs[slot] = True
        ticket.slot = slot
        ticket.was_admitted = True
        return slot

    def schedule(self, slots: Int32s, ends: Int32s, goals: Int32s) -> Bools:
        """Rows of `slots` reach `ends` in the plan being made; returns which of them sample."""
        samples: Bools = ends == goals
        self.scheduled[slots] = ends
        self.goal[slots] = np.minimum(goals + samples, self.ceiling[slots])
        return samples

    def append(self, slots: Int32s, token_ids: Int32s, now_ms: float) -> Int32s:
        """One more known token for each of `slots`; returns the new lengths."""
        lengths = self.tokens.lengths[slots]
        self.tokens.tokens[slots, lengths] = token_ids
        lengths += 1
        self.tokens.lengths[slots] = lengths
        self.last_token_ms[slots] = now_ms
        return lengths

    def hits_stop(self, slots: Int32s, token_ids: Int32s) -> Bools:
        """Whether token_ids[i] ends the request in slots[i]."""
        hits: Bools = (self.stop_ids[slots] == token_ids[:, None]).any(axis=1)
        return hits

    def release(self, slots: Int32s) -> None:
        """Give `slots` (distinct) back; their tickets know what they need when they return."""
        for slot in slots.tolist():
            ticket = self.ticket(slot)
            ticket.last_token_ms = float(self.last_token_ms[slot])
            ticket.slot = NO_SLOT
            self.tickets[slot] = None
            self.request_ids[slot] = None
            self.free_slots.append(slot)
        self._runs[slots] = False
        self.active = self.active[self._runs[self.active]]

    def problems(self) -> list[str]:
        """Contradictions in words; empty when the arrays agree with each other."""
        found = []
        running = [slot for slot, ticket in enumerate(self.tickets) if ticket is not None]
        if sorted(self.active.tolist()) != running:
            found.append(f"slots {running} have tickets, slots {self.active.tolist()} are active")
        if sorted(self.free_slots + running) != list(range(len(self.tickets))):
            found.append(f"free slots {self.free_slots} and running {running} do not add up")
        for slot in running:
            counts = (self.computed[slot], self.scheduled[slot], self.goal[slot])
            bounds = (*counts, self.ceiling[slot])
            if list(bounds) != sorted(bounds) or self.tickets[slot].slot != slot:  # type: ignore[union-attr]
                found.append(f"slot {slot}: computed, scheduled, goal, ceiling are {bounds}")
        return found

    def _widen_stop_ids(self, width: int) -> None:
        num_slots, old = self.stop_ids.shape
        if width > old:
            wider = np.full((num_slots, width), -1, np.int32)
            wider[:, :old] = self.stop_ids
            self.stop_ids = wider
