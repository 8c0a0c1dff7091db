"""Outcomes: what a step's result means for the requests it names.

Tokens are appended, first tokens and ends are found, searches are decided, failures are reported.
Rows of requests that just go on stay arrays; objects are made for events only. Always holds: a
row's result touches its own request, or its group, and no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.records import (
    FinishReason,
    RequestOutput,
    RowError,
    StepOutputs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    token_logprobs,
)
from quire.scheduler.in_flight import PlanOutcome
from quire.scheduler.interfaces import DraftVerifier, OutputLengths, PredictionMargin, SlotGroups
from quire.scheduler.prompt_scores import keep_scores, take_scores
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import Bools, Index, Int32s, RunningBatch
from quire.scheduler.sequence import SequenceGroup, SequenceState
from quire.scheduler.token_runs import NO_TAILS, RunTail, run_tails

_Number = TypeVar("_Number", np.int32, np.float32)

# Lengths of answers that are kept before they are learned from.
MAX_NOTED_LENGTHS = 64


class Outcomes:
    """Apply the results of a scheduler's steps. row_errors: how many requests failed in all."""

    def __init__(
        self,
        requests: RequestTable,
        batch: RunningBatch,
        groups: SlotGroups,
        lengths: OutputLengths,
        margin: PredictionMargin,
        drafts: DraftVerifier | None = None,
    ) -> None:
        self._requests = requests
        self._batch = batch
        self._groups = groups
        self._lengths = lengths
        self._margin = margin
        self._drafts = drafts
        self.row_errors = 0

    def apply(
        self, plan: StepPlan, result: StepResult, outcome: PlanOutcome, now_ms: float
    ) -> StepOutputs:
        """Make the valid rows of `result` known, end what has ended, and return the outputs."""
        batch, index, entries = self._batch, outcome.sampled, outcome.entries
        batch.computed[outcome.index] = outcome.ends
        if outcome.by_layers is not None:
            slot, end = outcome.by_layers
            batch.computed[slot] = end
        if result.scores is not None:
            keep_scores(plan, result, outcome.rows, batch.sequence)
        scored = batch.done_without_output(outcome.index, outcome.ends)
        progress = self._progress(outcome) if batch.num_reporting else []
        ids = result.token_ids if entries is None else result.token_ids[entries]
        lengths = batch.append(index, ids, now_ms)
        if len(result.mirostat_mus):
            mus = result.mirostat_mus
            batch.mirostat_mus[index] = mus if entries is None else mus[entries]
        stops = batch.hits_stop(index, ids)
        has_event = stops | (lengths >= batch.next_event[index])
        tails = NO_TAILS
        if outcome.run_lengths is not None or len(result.complete):
            tails = run_tails(plan, result, outcome, self._requests.in_flight)
            has_event[list(tails)] = True
        verified = None
        if plan.draft_ids.size and self._drafts is not None:
            verified = self._drafts.verify(plan, result, outcome)
        rows = has_event.nonzero()[0]
        if not (len(rows) or outcome.errors or scored or progress or verified):
            return make_outputs(result, entries, None, batch.request_ids(index), ())
        plain = (~has_event).nonzero()[0]
        request_ids = batch.request_ids(index[plain])
        groups: Sequence[SequenceGroup] = ()
        if self._groups.is_active:
            groups = self._groups.take(index, rows, result, entries, now_ms)
        events, finished = self._events(result, outcome, lengths, stops, rows, tails, now_ms)
        if verified is not None and self._drafts is not None:
            self._drafts.advance(verified)
        ended: list[RequestOutput] = progress
        if outcome.errors:
            ended += self._fail(outcome.errors, plan)
        if scored:
            ended += self._end_scored(scored, now_ms)
        for group in groups:
            ended += self._end_group(group, now_ms)
        self._finish(finished, now_ms)
        return make_outputs(result, entries, plain, request_ids, (*events, *ended))

    def _finish(self, sequences: list[SequenceState], now_ms: float) -> None:
        """End requests that have their last token, and learn from them."""
        if not sequences:
            return
        known, ended = self._batch.tokens.lengths.item, self._lengths.ended
        for sequence in sequences:
            ended.append((sequence.request, known(sequence.slot) - sequence.num_prompt_tokens))
            if sequence.objectives.end is not None:
                self._margin.came(sequence.objectives.end, now_ms)
        self._learn_lengths()
        self._requests.finish(sequences)

    def _progress(self, outcome: PlanOutcome) -> list[RequestOutput]:
        """Return an output for each request that reports its progress and still has prompt left."""
        slots = self._batch.reporting(outcome.index)
        if outcome.by_layers is not None:
            slots += self._batch.reporting(np.array([outcome.by_layers[0]]))
        outputs = []
        for slot in slots:
            sequence, computed = self._batch.sequence(slot), int(self._batch.computed[slot])
            is_first = math.isnan(sequence.times.first_token_ms)
            if computed < sequence.num_prompt_tokens and is_first:
                output = sequence.output()
                output.prompt_progress = computed
                outputs.append(output)
        return outputs

    def _learn_lengths(self) -> None:
        if len(self._lengths.ended) >= MAX_NOTED_LENGTHS:
            self._lengths.learn()

    def _events(
        self,
        result: StepResult,
        outcome: PlanOutcome,
        lengths: Int32s,
        stops: Bools,
        rows: Index,
        tails: Mapping[int, RunTail],
        now_ms: float,
    ) -> tuple[list[RequestOutput], list[SequenceState]]:
        """Return outputs for `rows`: first tokens, runs of several tokens, and ends.

        rows: of outcome.sampled, like lengths and stops. Also returns the requests that have ended.
        """
        outputs, finished = [], []
        batch, next_event, entries = self._batch, self._batch.next_event, outcome.entries
        first_entries = rows if entries is None else entries[rows]
        of_rows = (rows, outcome.sampled[rows], first_entries, lengths[rows], stops[rows])
        columns = [values.tolist() for values in of_rows]
        ids = result.token_ids[first_entries].tolist()
        for row, slot, entry, length, stops_here, token_id in zip(*columns, ids, strict=True):
            sequence = batch.sequence(slot)
            if sequence.group is not None:
                continue
            times = sequence.times
            if times.first_token_ms != times.first_token_ms:  # NaN: this is the first
                times.first_token_ms = now_ms
                if sequence.objectives.first_token is not None:
                    self._margin.came(sequence.objectives.first_token, now_ms)
                    sequence.objectives.first_token = None
            times.last_token_ms = now_ms
            next_event[slot] = sequence.limit
            reason, token_ids, stop_id = None, (token_id,), None
            if stops_here:
                reason, stop_id = FinishReason.STOP, token_id
            elif tails and row in tails:
                more, stop_id, is_over = tails[row].within(sequence, length)
                batch.extend(slot, more)
                token_ids = (token_id, *more)
                if is_over:
                    reason = FinishReason.STOP
            if reason is None and length + len(token_ids) > sequence.limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                finished.append(sequence)
            output = sequence.output(token_ids, reason, stop_id)
            if len(result.logprobs):
                output.logprobs = _run_logprobs(result, entry, len(token_ids))
            if sequence.scores is not None:
                output.scores = take_scores(sequence)
            outputs.append(output)
        return outputs, finished

    def _fail(self, errors: Sequence[RowError], plan: StepPlan) -> list[RequestOutput]:
        """End the requests of failed rows; return their last outputs."""
        failed = [(self._batch.sequence(plan.slot_of(e.row)), e.message) for e in errors]
        self.row_errors += len(failed)
        groups = {one.group: message for one, message in failed if one.group is not None}
        failed = [(one, message) for one, message in failed if one.group is None]
        self._requests.finish([one for one, _ in failed])
        for group, message in groups.items():
            failed += [(stream, message) for stream in self._requests.end_group(group)]
        return [
            one.output(finish_reason=FinishReason.ERROR, error=message) for one, message in failed
        ]

    def _end_scored(self, sequences: list[SequenceState], now_ms: float) -> list[RequestOutput]:
        """End requests that asked for the scores of their prompt only; return their outputs."""
        self._requests.finish(sequences)
        for sequence in sequences:
            sequence.times.last_token_ms = now_ms
        return [
            one.output(scores=take_scores(one), finish_reason=FinishReason.LENGTH)
            for one in sequences
        ]

    def _end_group(self, group: SequenceGroup, now_ms: float) -> list[RequestOutput]:
        """End a search that is done; return the outputs of its streams."""
        outputs = self._groups.outputs(group, now_ms)
        for stream, output in zip(group.streams, outputs, strict=True):
            self._lengths.ended.append((stream.request, len(output.token_ids)))
        self._learn_lengths()
        self._requests.end_group(group)
        return outputs


def make_outputs(
    result: StepResult,
    entries: Index | None,
    plain: Index | None,
    request_ids: list[str],
    events: tuple[RequestOutput, ...],
) -> StepOutputs:
    """Return the outputs of one step.

    entries: the first tokens of the valid runs of `result` (None: all runs are one token, in
    order). plain: which of the runs need no event (None: all, and there is nothing else), for the
    requests in request_ids. events: outputs of the other runs, and of requests that ended without
    a token.
    """
    if entries is None and plain is None:  # a steady step: all of it, as it is
        return StepOutputs(
            step=result.step,
            request_ids=request_ids,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            top_ids=result.top_ids,
            top_logprobs=result.top_logprobs,
            listed_logprobs=result.listed_logprobs,
        )
    of_plain = entries
    if plain is not None:
        of_plain = plain if entries is None else entries[plain]
    return StepOutputs(
        step=result.step,
        request_ids=request_ids,
        token_ids=_pick(result.token_ids, of_plain),
        logprobs=_pick(result.logprobs, of_plain),
        top_ids=_pick(result.top_ids, of_plain),
        top_logprobs=_pick(result.top_logprobs, of_plain),
        listed_logprobs=_pick(result.listed_logprobs, of_plain),
        events=events,
    )


def _run_logprobs(result: StepResult, first: int, count: int) -> tuple[TokenLogprobs, ...]:
    arrays = (result.logprobs, result.top_ids, result.top_logprobs, result.listed_logprobs)
    found = [token_logprobs(at, result.token_ids, *arrays) for at in range(first, first + count)]
    return tuple(chain.from_iterable(found))


def _pick(values: NDArray[_Number], rows: Index | None) -> NDArray[_Number]:
    """Return values[rows]; an array the worker left empty stays empty."""
    return values if rows is None or not len(values) else values[rows]
