"""Results: what a step's result means for the requests it names.

Tokens are appended, first tokens and ends are found, searches are decided, failures are told.
Knows no plans to come. Always holds: a row's result touches its own request, or its group of
beams, and nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from quire.base.records import (
    FinishReason,
    RequestOutput,
    RowError,
    StepOutputs,
    StepPlan,
    StepResult,
)
from quire.scheduler.flight import Landing
from quire.scheduler.groups import BeamGroup, BeamGroups
from quire.scheduler.lengths import LengthHistory
from quire.scheduler.margin import Margin
from quire.scheduler.outputs import Event, make_outputs
from quire.scheduler.roster import Roster
from quire.scheduler.scores import keep_scores
from quire.scheduler.state import Bools, Index, Int32s, RunningState
from quire.scheduler.ticket import Ticket
from quire.scheduler.token_runs import NO_IDS, RunTail, run_tails


class Results:
    """Of one scheduler's steps. row_errors: how many requests failed in all."""

    def __init__(
        self,
        roster: Roster,
        state: RunningState,
        beams: BeamGroups,
        lengths: LengthHistory,
        margin: Margin,
    ) -> None:
        self._roster = roster
        self._state = state
        self._beams = beams
        self._lengths = lengths
        self._margin = margin
        self.row_errors = 0

    def apply(
        self, plan: StepPlan, result: StepResult, landing: Landing, now_ms: float
    ) -> StepOutputs:
        """What `landing` says stands of `result` becomes known; what is to be told."""
        state, index, entries = self._state, landing.sampled, landing.entries
        state.computed[landing.index] = landing.ends
        if landing.by_layers is not None:
            slot, end = landing.by_layers
            state.computed[slot] = end
        keep_scores(plan, result, landing.rows, state.ticket)
        scored = state.done_without_output(landing.index, landing.ends)
        progress = self._progress(landing)
        ids = result.token_ids if entries is None else result.token_ids[entries]
        lengths = state.append(index, ids, now_ms)
        if len(result.mirostat_mus):
            mus = result.mirostat_mus
            state.mirostat_mus[index] = mus if entries is None else mus[entries]
        stops = state.hits_stop(index, ids)
        has_event = stops | (lengths >= state.next_event[index])
        tails = run_tails(plan, result, landing, self._roster.flights)
        if tails:
            has_event[list(tails)] = True
        rows = has_event.nonzero()[0]
        if not (len(rows) or landing.errors or scored or progress):
            return make_outputs(result, entries, None, state.request_ids(index), [], [])
        plain = (~has_event).nonzero()[0]
        request_ids = state.request_ids(index[plain])
        found = self._beams.take(index, rows, result, entries, now_ms)
        events = self._events(index, ids, lengths, stops, rows, tails, now_ms)
        ended = self._fail(landing.errors, plan) + self._end_scored(scored, now_ms)
        ended += progress
        ended += [output for group in found for output in self._end_beams(group, now_ms)]
        finished = [event.ticket for event in events if event.finish_reason is not None]
        for ticket in finished:
            num_tokens = int(state.tokens.lengths[ticket.slot]) - ticket.num_prompt_tokens
            self._lengths.note(ticket.request, num_tokens)
            if ticket.foretold_end is not None:
                self._margin.came(ticket.foretold_end, now_ms)
        self._roster.end_all(finished)
        return make_outputs(result, entries, plain, request_ids, events, ended)

    def _progress(self, landing: Landing) -> list[RequestOutput]:
        """Return an output for each request that reports its progress and is not done with its
        prompt."""
        slots = self._state.reporting(landing.index)
        if landing.by_layers is not None:
            slots += self._state.reporting(np.array([landing.by_layers[0]]))
        outputs = []
        for slot in slots:
            ticket, computed = self._state.ticket(slot), int(self._state.computed[slot])
            if computed < ticket.num_prompt_tokens and math.isnan(ticket.first_token_ms):
                outputs.append(ticket.output(prompt_progress=computed))
        return outputs

    def _events(
        self,
        index: Index,
        ids: Int32s,
        lengths: Int32s,
        stops: Bools,
        rows: Index,
        tails: Mapping[int, RunTail],
        now_ms: float,
    ) -> list[Event]:
        """Return the events of `rows`: first tokens, runs of several tokens, and ends."""
        events = []
        state, next_event = self._state, self._state.next_event
        of_rows = (rows, index[rows], ids[rows], lengths[rows], stops[rows])
        columns = [values.tolist() for values in of_rows]
        for row, slot, token_id, length, stops_here in zip(*columns, strict=True):
            ticket = state.ticket(slot)
            if ticket.beams is not None:
                continue
            if ticket.first_token_ms != ticket.first_token_ms:  # NaN: this is the first
                ticket.first_token_ms = now_ms
                if ticket.foretold is not None:
                    self._margin.came(ticket.foretold, now_ms)
                    ticket.foretold = None
            ticket.last_token_ms = now_ms
            next_event[slot] = ticket.limit
            reason, more, stop_id = None, NO_IDS, None
            if stops_here:
                reason, stop_id = FinishReason.STOP, token_id
            elif row in tails:
                more, stop_id, is_over = tails[row].within(ticket, length)
                state.extend(slot, more)
                if is_over:
                    reason = FinishReason.STOP
            if reason is None and length + len(more) >= ticket.limit:
                reason = FinishReason.LENGTH
            events.append(Event(row, ticket, (token_id, *more), reason, stop_id))
        return events

    def _fail(self, errors: Sequence[RowError], plan: StepPlan) -> list[RequestOutput]:
        """End the requests of failed rows; their last outputs."""
        if not errors:
            return []
        failed = [(self._state.ticket(plan.slot_of(e.row)), e.message) for e in errors]
        self.row_errors += len(failed)
        groups = {ticket.beams: message for ticket, message in failed if ticket.beams is not None}
        failed = [one for one in failed if one[0].beams is None]
        self._roster.end_all([ticket for ticket, _ in failed])
        for group, message in groups.items():
            failed += [(stream, message) for stream in self._roster.forget_beams(group)]
        return [t.output(finish_reason=FinishReason.ERROR, error=message) for t, message in failed]

    def _end_scored(self, tickets: list[Ticket], now_ms: float) -> list[RequestOutput]:
        """End requests that wanted their prompt scored and nothing else; their only outputs."""
        self._roster.end_all(tickets)
        for ticket in tickets:
            ticket.last_token_ms = now_ms
        return [
            t.output(scores=t.take_scores(), finish_reason=FinishReason.LENGTH) for t in tickets
        ]

    def _end_beams(self, group: BeamGroup, now_ms: float) -> list[RequestOutput]:
        """A search is done; what its streams are told."""
        outputs = self._beams.outputs(group, now_ms)
        for stream, output in zip(group.streams, outputs, strict=True):
            self._lengths.note(stream.request, len(output.token_ids))
        self._roster.forget_beams(group)
        return outputs
