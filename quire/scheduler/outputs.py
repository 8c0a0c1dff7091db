"""From the tokens of a step to StepOutputs.

Rows of requests that just go on stay arrays; an object is made only for those that have an
event. Decides nothing: who has an event, and which, is an argument.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.records import (
    FinishReason,
    RequestOutput,
    StepOutputs,
    StepResult,
    TokenLogprobs,
    token_logprobs,
)
from quire.scheduler.state import Index
from quire.scheduler.ticket import Ticket

_Number = TypeVar("_Number", np.int32, np.float32)


class Event(NamedTuple):
    """The run of row `row` of the step requires an output event for `ticket`.

    token_ids: the part of the run that the request takes. stop_id: its last token, if that ended
    the request.
    """

    row: int
    ticket: Ticket
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_id: int | None = None


def make_outputs(
    result: StepResult,
    entries: Index | None,
    plain: Index | None,
    request_ids: list[str],
    events: list[Event],
    ended: list[RequestOutput],
) -> StepOutputs:
    """Return the outputs of one step.

    entries: indices of the first tokens of the runs (None: all runs are one token, in order).
    plain: the runs without an event (None: all), of the requests request_ids. events: the other
    runs. ended: outputs of requests that ended without a token.
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
    told = [
        event.ticket.output(
            token_ids=event.token_ids,
            logprobs=_run_logprobs(result, entries, event) if len(result.logprobs) else (),
            scores=event.ticket.take_scores() if event.ticket.scores_prompt else None,
            finish_reason=event.finish_reason,
            stop_id=event.stop_id,
        )
        for event in events
    ]
    return StepOutputs(
        step=result.step,
        request_ids=request_ids,
        token_ids=_pick(result.token_ids, of_plain),
        logprobs=_pick(result.logprobs, of_plain),
        top_ids=_pick(result.top_ids, of_plain),
        top_logprobs=_pick(result.top_logprobs, of_plain),
        listed_logprobs=_pick(result.listed_logprobs, of_plain),
        events=(*told, *ended),
    )


def _run_logprobs(
    result: StepResult, entries: Index | None, event: Event
) -> tuple[TokenLogprobs, ...]:
    first = event.row if entries is None else int(entries[event.row])
    arrays = (result.logprobs, result.top_ids, result.top_logprobs, result.listed_logprobs)
    found = [
        token_logprobs(entry, result.token_ids, *arrays)
        for entry in range(first, first + len(event.token_ids))
    ]
    return tuple(chain.from_iterable(found))


def _pick(values: NDArray[_Number], rows: Index | None) -> NDArray[_Number]:
    """values[rows]; an array the worker left empty stays empty."""
    return values if rows is None or not len(values) else values[rows]
