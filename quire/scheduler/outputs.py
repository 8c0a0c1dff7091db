"""From the tokens of a step to StepOutputs.

Rows of requests that just go on stay arrays; an object is made only for those that have an
event. Decides nothing: who has an event, and which, is an argument.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.records import (
    FinishReason,
    RequestOutput,
    StepOutputs,
    StepResult,
    token_logprobs,
)
from quire.scheduler.state import Index
from quire.scheduler.ticket import Ticket

_Number = TypeVar("_Number", np.int32, np.float32)


class Event(NamedTuple):
    """Token `row` of the step gives `ticket` more than just another token. more: tokens after it
    that were certain with it; stop_id: the last of all, where it ended the request."""

    row: int
    ticket: Ticket
    token_id: int
    finish_reason: FinishReason | None = None
    more: tuple[int, ...] = ()
    stop_id: int | None = None


def make_outputs(
    result: StepResult,
    entries: Index | None,
    plain: Index | None,
    request_ids: list[str],
    events: list[Event],
    ended: list[RequestOutput],
) -> StepOutputs:
    """Outputs of one step.

    entries: which tokens of `result` count (None: all). plain: which of those go to requests
    that just go on (None: all, and nothing else is told), named by request_ids. events: the
    others, rows of the same.
    ended: outputs of requests that ended without a token.
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
    ids, logprobs = _pick(result.token_ids, entries), _pick(result.logprobs, entries)
    top_ids, top_logprobs = _pick(result.top_ids, entries), _pick(result.top_logprobs, entries)
    listed = _pick(result.listed_logprobs, entries)
    told = [
        event.ticket.output(
            token_ids=(event.token_id, *event.more),
            logprobs=token_logprobs(event.row, ids, logprobs, top_ids, top_logprobs, listed)
            if len(logprobs)
            else (),
            scores=event.ticket.take_scores() if event.ticket.scores_prompt else None,
            finish_reason=event.finish_reason,
            stop_id=event.stop_id,
        )
        for event in events
    ]
    return StepOutputs(
        step=result.step,
        request_ids=request_ids,
        token_ids=_pick(ids, plain),
        logprobs=_pick(logprobs, plain),
        top_ids=_pick(top_ids, plain),
        top_logprobs=_pick(top_logprobs, plain),
        listed_logprobs=_pick(listed, plain),
        events=(*told, *ended),
    )


def _pick(values: NDArray[_Number], rows: Index | None) -> NDArray[_Number]:
    """values[rows]; an array the worker left empty stays empty."""
    return values if rows is None or not len(values) else values[rows]
