"""Doors: who is not let in, and what they are told.

What can never run, a queue that is full, and promises that would not be kept, are refused before
anything is computed, with what was found, what is allowed and when to come again. Changes nothing.
"""

from __future__ import annotations

from quire.base.errors import (
    ContextTooLong,
    DeadlineMissed,
    InvalidParameter,
    OverloadedError,
    TimedOut,
)
from quire.base.records import Request
from quire.cache.manager import CacheManager
from quire.scheduler.forecast import Forecast
from quire.scheduler.groups import check_beam_blocks
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.placement import place
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.state import RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import Ticket


def limit_of(
    request: Request, limits: SchedulerLimits, cache: CacheManager, tenants: TenantBooks
) -> int:
    """The most tokens `request` may have.

    Raises ContextTooLong and InvalidParameter for what can never run.
    """
    prompt, room = len(request.prompt_ids), limits.max_model_len
    most = limits.max_num_seqs + limits.max_queued_requests
    num_sequences = request.sampling.num_sequences
    if num_sequences > most:
        param = "n" if request.sampling.best_of is None else "best_of"
        raise InvalidParameter(
            f"{param} is {num_sequences}; {limits.max_num_seqs} may run and "
            f"{limits.max_queued_requests} may wait here: at most {most} are allowed",
            param=param,
        )
    if prompt < 1:
        raise InvalidParameter("the prompt has no tokens; at least one is needed", param="prompt")
    least = 0 if request.sampling.max_tokens == 0 else 1  # 0: it is scored, and no more
    found = f"the prompt has {prompt} tokens" + " and one must be generated" * least
    if prompt + least > room:
        raise ContextTooLong(
            f"{found}; the context length is {room} tokens: shorten the prompt", param="prompt"
        )
    if prompt + least > cache.num_tokens:
        raise ContextTooLong(
            f"{found}; the KV cache holds {cache.num_tokens} tokens: shorten the prompt "
            "or give it more memory",
            param="prompt",
        )
    most_tokens = tenants.most_tokens(request)
    if prompt + least > most_tokens:
        raise ContextTooLong(
            f"{found}; requests of tenant {tenants.shown(request)} have {most_tokens} "
            "tokens of the KV cache at most (its ceiling, and what others' floors leave): "
            "shorten the prompt",
            param="prompt",
        )
    if request.max_total_tokens < prompt + least:
        raise InvalidParameter(
            f"max_total_tokens is {request.max_total_tokens} and the prompt has {prompt}; "
            "there must be room for at least one token",
            param="max_tokens",
        )
    limit = min(request.max_total_tokens, room)
    if request.sampling.use_beam_search:
        max_running = tenants.most_running(request)
        check_beam_blocks(request, limit, max_running, most_tokens, cache.block_size)
    return min(limit, cache.num_tokens, most_tokens)


def check_room(
    limits: SchedulerLimits,
    forecast: Forecast,
    queue: WaitingQueue,
    num_free_slots: int,
    request: Request,
) -> None:
    """Raises OverloadedError where the queue has no place for `request`."""
    most = limits.max_queued_requests
    if len(queue) >= most + num_free_slots:
        raise OverloadedError(
            f"{len(queue)} requests are waiting, at most {most} may beside those that can start; "
            f"try again later{_in_about(forecast)}",
            retry_after_s=forecast.retry_after_s(),
        )
    tokens, most_tokens = len(request.prompt_ids), limits.max_queued_tokens
    # A prompt longer than all that may wait has its turn when nothing else waits.
    if most_tokens and len(queue) and queue.num_tokens + tokens > most_tokens:
        raise OverloadedError(
            f"requests with {queue.num_tokens} tokens are waiting and the prompt has {tokens}; "
            f"at most {most_tokens} may wait; try again later{_in_about(forecast)}",
            retry_after_s=forecast.retry_after_s(),
        )


def broken_promise(
    ticket: Ticket,
    queue: WaitingQueue,
    forecast: Forecast,
    now_ms: float,
    cache: CacheManager,
    state: RunningState,
) -> DeadlineMissed | None:
    """What to say where `ticket`, which waits in `queue`, would miss what it asks for, if its first
    token took as long as forecasts may be exceeded by their margin; None where it would not, and
    for forks: they go with their leader."""
    request = ticket.request
    asks = request.deadline_ms is not None or request.ttft_slo_ms is not None
    if not asks or ticket.leader is not None or not forecast.knows:
        return None
    num_ahead = queue.num_before(ticket)
    late_ms = now_ms - request.arrival_ms
    rest_ms = 0.0 if request.deadline_ms is None else forecast.rest_ms(ticket)
    cached, foretold = 0, forecast.first_token(ticket, num_ahead, now_ms)
    times = forecast.margin.times(foretold)
    missed = _misses(request, late_ms + times * foretold.ms, rest_ms)
    # What is found by prefix is looked up only where it matters.
    if missed is not None and (cached := place(ticket, cache, state).start):
        foretold = forecast.first_token(ticket, num_ahead, now_ms, cached)
        times = forecast.margin.times(foretold)
        missed = _misses(request, late_ms + times * foretold.ms, rest_ms)
    if missed is None:
        ticket.foretold = foretold
        return None
    if _misses(request, late_ms + foretold.ms, rest_ms) is None:
        forecast.margin.refused(foretold)
    what, predicted_ms, wanted_ms = missed
    alone_ms = forecast.first_token(ticket, 0, now_ms, cached).ms
    is_hopeless = predicted_ms - times * foretold.ms + alone_ms > wanted_ms
    return DeadlineMissed(
        f"{what} is predicted {predicted_ms:.0f} ms after the request came, and is wanted within "
        f"{_ms(wanted_ms)} ms: {num_ahead} requests are ahead, and the prompt has "
        f"{len(ticket.token_ids) - cached} tokens to compute"
        + (f" (forecasts like this were exceeded up to {times:.2f} times)" if times > 1 else "")
        + "; nothing of it was computed: "
        + ("allow more time" if is_hopeless else "try again later, or allow more time"),
        retry_after_s=None  # at no time would it be kept
        if is_hopeless
        else min(max((predicted_ms - wanted_ms) / 1000.0, 1.0), 3600.0),
    )


def deadline_passed(ticket: Ticket, forecast: Forecast) -> OverloadedError:
    """What the caller of `ticket` is told when its deadline is over before its answer was."""
    wanted_ms = ticket.request.deadline_ms or 0.0  # it has one: it is over
    if ticket.was_admitted:
        return TimedOut(
            f"the answer was not complete {_ms(wanted_ms)} ms after the request came, its "
            "deadline_ms; it was ended: allow more time, or ask for fewer tokens"
        )
    return DeadlineMissed(
        f"the request waited for its first step until its deadline, {_ms(wanted_ms)} ms after it "
        "came, was over; nothing of it was computed: try again later, or allow more time",
        retry_after_s=forecast.retry_after_s(),
    )


def _misses(request: Request, first_ms: float, rest_ms: float) -> tuple[str, float, float] | None:
    """What would come too late, when it would, and when it should."""
    if request.ttft_slo_ms is not None and first_ms > request.ttft_slo_ms:
        return "the first token", first_ms, request.ttft_slo_ms
    if request.deadline_ms is not None and first_ms + rest_ms > request.deadline_ms:
        return "the end of the answer", first_ms + rest_ms, request.deadline_ms
    return None


def _in_about(forecast: Forecast) -> str:
    return f", in about {forecast.retry_after_s():.0f} s" if forecast.knows else ""


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1 else f"{ms:.3g}"
