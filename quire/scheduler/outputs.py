"""From the tokens of a step to StepOutputs.

Rows of requests that just go on stay arrays; an object is made only for those that have an
event. Decides nothing: who has an event, and which, is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.records import (
    FinishReason,
    RequestOutput,
    StepOutputs,
    StepResult,
    token_logprobs,
)
from quire.scheduler.state import Bools, Int32s
from quire.scheduler.ticket import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Token `row` of the step gives `ticket` more than just another token."""

    row: int
    ticket: Ticket
    finish_reason: FinishReason | None = None


def make_outputs(
    result: StepResult,
    entries: Int32s | None,
    request_ids: NDArray[Any],
    has_event: Bools,
    events: list[Event],
    errors: list[RequestOutput],
) -> StepOutputs:
    """Outputs of one step.

    entries: which tokens of `result` count (None: all); the other arrays have a row for each of
    them. `events` are the rows where has_event is True, in order.
    """
    ids, logprobs = result.token_ids, result.logprobs
    top_ids, top_logprobs = result.top_ids, result.top_logprobs
    if entries is not None:
        ids = ids[entries]
        logprobs = logprobs[entries] if len(logprobs) else logprobs
        top_ids = top_ids[entries] if len(top_ids) else top_ids
        top_logprobs = top_logprobs[entries] if len(top_logprobs) else top_logprobs
    told = [
        event.ticket.output(
            token_ids=(int(ids[event.row]),),
            logprobs=token_logprobs(event.row, ids, logprobs, top_ids, top_logprobs),
            finish_reason=event.finish_reason,
            stop_id=int(ids[event.row]) if event.finish_reason is FinishReason.STOP else None,
        )
        for event in events
    ]
    if events:
        plain = np.flatnonzero(~has_event)
        ids, request_ids = ids[plain], request_ids[plain]
        logprobs = logprobs[plain] if len(logprobs) else logprobs
        top_ids = top_ids[plain] if len(top_ids) else top_ids
        top_logprobs = top_logprobs[plain] if len(top_logprobs) else top_logprobs
    return StepOutputs(
        step=result.step,
        request_ids=request_ids.tolist(),
        token_ids=ids,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        events=(*told, *errors),
    )
