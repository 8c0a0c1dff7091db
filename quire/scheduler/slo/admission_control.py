"""Admission control: rejects requests before anything of them is computed.

Rejected are requests that can never run, those that find a full queue, and those that would miss an
objective; with what was found, what is allowed and when to come again. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.base.errors import (
    ContextTooLong,
    DeadlineMissed,
    InvalidParameter,
    OverloadedError,
)
from quire.base.records import Request
from quire.cache.manager import CacheManager
from quire.scheduler.admission.slot_allocation import find_kv_source
from quire.scheduler.beam.beam_groups import check_beam_blocks
from quire.scheduler.limits import SchedulerLimits, queue_factor
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.sequence_parts import Prediction
from quire.scheduler.slo.ttft_prediction import TTFTPredictor
from quire.scheduler.step_budget import BlockShares
from quire.scheduler.waiting_queue import WaitingQueue


def check_request(
    request: Request, limits: SchedulerLimits, cache: CacheManager, shares: BlockShares
) -> int:
    """Return the most tokens `request` may have.

    Raises ContextTooLong and InvalidParameter for what can never run.
    """
    prompt, room = len(request.prompt_ids) + len(request.output_ids), limits.max_model_len
    most = limits.max_num_seqs + limits.max_queued_requests
    num_sequences = request.sampling.num_sequences
    if num_sequences > most:
        param = "n" if request.sampling.best_of is None else "best_of"
        raise InvalidParameter(
            f"{param} is {num_sequences}; {limits.max_num_seqs} may run and "
            f"{limits.max_queued_requests} may wait here: at most {most} are allowed",
            param=param,
        )
    if not len(request.prompt_ids):
        raise InvalidParameter("the prompt has no tokens; at least one is needed", param="prompt")
    least = 0 if request.sampling.max_tokens == 0 else 1  # 0: it is scored, and no more
    given = "the prompt has" if not len(request.output_ids) else "prompt and output_ids have"
    found = f"{given} {prompt} tokens" + " and one must be generated" * least
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
    max_tokens = shares.max_tokens(request)
    if prompt + least > max_tokens:
        raise ContextTooLong(
            f"{found}; requests of tenant {shares.shown(request)} have {max_tokens} "
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
        max_running = shares.max_running(request)
        check_beam_blocks(request, limit, max_running, max_tokens, cache.block_size)
    return min(limit, cache.num_tokens, max_tokens)


def check_queue_room(
    limits: SchedulerLimits,
    predictor: TTFTPredictor,
    queue: WaitingQueue,
    num_free_slots: int,
    request: Request,
) -> None:
    """Raise OverloadedError where the queue has no place for `request`."""
    factor = queue_factor(request)
    most = factor * limits.max_queued_requests
    if len(queue) >= most + num_free_slots:
        raise OverloadedError(
            f"{len(queue)} requests are waiting, at most {most} may beside those that can start; "
            f"try again later{_in_about(predictor)}",
            retry_after_s=predictor.retry_after_s(),
        )
    tokens = len(request.prompt_ids) + len(request.output_ids)
    max_tokens = factor * limits.max_queued_tokens
    # A prompt longer than all that may wait has its turn when nothing else waits.
    if max_tokens and len(queue) and queue.num_tokens + tokens > max_tokens:
        raise OverloadedError(
            f"requests with {queue.num_tokens} tokens are waiting and the prompt has {tokens}; "
            f"at most {max_tokens} may wait; try again later{_in_about(predictor)}",
            retry_after_s=predictor.retry_after_s(),
        )


def check_objectives(
    sequence: SequenceState,
    queue: WaitingQueue,
    predictor: TTFTPredictor,
    now_ms: float,
    cache: CacheManager,
    batch: RunningBatch,
) -> DeadlineMissed | None:
    """Return the error where the waiting `sequence` would miss an objective, else None.

    That is so if it took as long as predictions may be exceeded by their margin. None for forks:
    they go with their leader.
    """
    request = sequence.request
    asks = request.deadline_ms is not None or request.ttft_slo_ms is not None
    if not asks or sequence.leader is not None or not predictor.knows:
        return None
    num_ahead = queue.num_before(sequence)
    cached, found = 0, _predict(sequence, predictor, num_ahead, now_ms)
    # What is found by prefix is looked up only where it matters.
    if found.missed is not None and (cached := find_kv_source(sequence, cache, batch).start):
        found = _predict(sequence, predictor, num_ahead, now_ms, cached)
    if found.missed is None:
        sequence.objectives.first_token = found.first
        sequence.objectives.end = found.end if request.deadline_ms is not None else None
        return None
    missed, alone = found.missed, predictor.first_token(sequence, 0, now_ms, cached)
    if found.would_do_without_margin:
        predictor.margin.refused(missed.prediction)
    predicted_ms, wanted_ms, times = missed.predicted_ms, missed.wanted_ms, missed.times
    is_hopeless = predicted_ms - times * (found.first.ms - alone.ms) > wanted_ms
    return DeadlineMissed(
        f"{missed.what} is predicted {predicted_ms:.0f} ms after the request came, and is wanted "
        f"within {_ms(wanted_ms)} ms: {num_ahead} requests are ahead, and the prompt has "
        f"{len(sequence.token_ids) - cached} tokens to compute"
        + (f" (predictions like this were exceeded up to {times:.2f} times)" if times > 1 else "")
        + "; nothing of it was computed: "
        + ("allow more time" if is_hopeless else "try again later, or allow more time"),
        retry_after_s=None  # at no time would it be kept
        if is_hopeless
        else min(max((predicted_ms - wanted_ms) / 1000.0, 1.0), 3600.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missed:
    """An objective that would be missed: `prediction` times its margin is too late."""

    what: str
    prediction: Prediction
    times: float
    predicted_ms: float  # after the request came
    wanted_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prediction:
    """When a request has its first token and its end, and the objective that this misses."""

    first: Prediction
    end: Prediction
    missed: _Missed | None
    would_do_without_margin: bool


def _predict(
    sequence: SequenceState,
    predictor: TTFTPredictor,
    num_ahead: int,
    now_ms: float,
    num_cached: int = 0,
) -> _Prediction:
    """Predict `sequence`, behind num_ahead others, with num_cached of its tokens found by prefix.

    The end of an answer has at least the margin of its first token, which more requests teach. One
    that continues (output_ids) was accepted elsewhere, so it is ended by its deadline alone.
    """
    request, margin = sequence.request, predictor.margin
    late_ms = now_ms - request.arrival_ms
    first = predictor.first_token(sequence, num_ahead, now_ms, num_cached)
    rest_ms = 0.0 if request.deadline_ms is None else predictor.rest_ms(sequence)
    end = replace(first, ms=first.ms + rest_ms, is_end=True)
    first_times = margin.times(first)
    end_times = max(margin.times(end), first_times)
    end_wanted_ms = None if len(request.output_ids) else request.deadline_ms
    wanted = (
        ("the first token", first, first_times, request.ttft_slo_ms),
        ("the end of the answer", end, end_times, end_wanted_ms),
    )
    missed, keeps_all = None, True
    for what, prediction, times, wanted_ms in wanted:
        if wanted_ms is None:
            continue
        predicted_ms = late_ms + times * prediction.ms
        if predicted_ms > wanted_ms and missed is None:
            missed = _Missed(
                what=what,
                prediction=prediction,
                times=times,
                predicted_ms=predicted_ms,
                wanted_ms=wanted_ms,
            )
        keeps_all = keeps_all and late_ms + prediction.ms <= wanted_ms
    return _Prediction(first=first, end=end, missed=missed, would_do_without_margin=keeps_all)


def _in_about(predictor: TTFTPredictor) -> str:
    return f", in about {predictor.retry_after_s():.0f} s" if predictor.knows else ""


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1 else f"{ms:.3g}"
