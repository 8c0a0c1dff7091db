"""What completions and chats share: from a body to answers, streamed or whole.

A route hands in how its fields are read (`Reader`) and how its JSON is written (`Writer`). Knows
neither API's words. Always holds: nothing reaches the engine before every field has been checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.generation.choice_streams import Choice, ChoiceStreams, Prompt, Usage
from quire.api.generation.fields import flag
from quire.api.generation.request_context import RequestContext, open_request
from quire.api.generation.request_registry import OpenRequest, Requester, RequestProgress
from quire.api.generation.scheduling_fields import cache_salt_of, scheduling_params_of
from quire.api.http.cancellation import disconnect_of, run_until_disconnect
from quire.api.server_state import Engine, ServerState
from quire.api.streaming.event_stream import EventStream, FollowStream
from quire.api.streaming.resumable_stream import ResumableStream
from quire.api.streaming.sse import Chunks, Events
from quire.base.errors import InvalidParameter, QuireError
from quire.base.show import show
from quire.config.groups import ServerConfig
from quire.config.tenants import Tenant

STREAM_OPTIONS = {"include_usage", "include_obfuscation", "continuous_usage_stats", "resumable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every body and chunk of one answer carries."""

    id: str
    created_s: int
    model: str
    fingerprint: str


class Writer(Chunks, Protocol):
    """How an API writes an answer, streamed (Chunks) or whole."""

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A request whose fields are all checked."""

    prompts: Sequence[Prompt]
    writer: Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a Reader is given: the honoured fields, the engine, and the frame of the answer."""

    request: RequestContext
    given: Mapping[str, Any]
    engine: Engine
    envelope: Envelope
    include_usage: bool
    config: ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """include_usage: a last chunk has the usage. continuous_usage: every chunk has it so far."""

    include_usage: bool = False
    continuous_usage: bool = False


Reader = Callable[[GenerationRequest], Coroutine[Any, Any, GenerationJob]]


async def generate(
    serving: ServerState, request: Request, *, honoured: frozenset[str], prefix: str, read: Reader
) -> Response:
    """The response to a request for tokens. Raises RequestError and the engine's errors."""
    begun = await open_request(serving, request, honoured=honoured, prefix=prefix)
    given, engine, deadline = begun.given, begun.engine, begun.deadline
    request_id = begun.request_id
    tenant: Tenant = request.state.tenant
    terms, cache_salt = scheduling_params_of(given, tenant), cache_salt_of(given, tenant)
    envelope = Envelope(
        id=request_id,
        created_s=int(time.time()),
        model=engine.card.name,
        fingerprint=serving.fingerprint(engine.card),
    )
    stream = flag(given, "stream")
    options = _stream_options(given, stream=stream)
    asked = GenerationRequest(
        request=begun,
        given=given,
        engine=engine,
        envelope=envelope,
        include_usage=options.include_usage,
        config=serving.config,
    )
    live = OpenRequest(request_id, _asker(request), request.scope["route"].path, is_stream=stream)
    serving.live.begin(live)
    request.state.live = live

    async def answered() -> bytes | Response:
        """The body of a whole answer, or the response that streams it."""
        await serving.admitted()
        job = await read(asked)
        if stream:
            _refuse_ranked(job.prompts)
        answers = ChoiceStreams(
            engine,
            serving.metrics,
            job.prompts,
            request_id,
            cache_salt=cache_salt,
            terms=terms,
            among_strangers=serving.has_strangers and not cache_salt,
            tells_timings=flag(given, "return_timings"),
            tells_speeds=flag(given, "timings") or flag(given, "timings_per_token"),
        )
        request.state.answers = answers
        live.look = lambda: _progress(answers)
        if stream:
            events = Events(
                answers,
                job.writer,
                live.id,
                continuous_usage=options.continuous_usage,
                continuous_timings=flag(given, "timings_per_token"),
                reports_progress=terms.report_progress,
            )
            return _streamed(serving, begun, events, live)
        return await _written(job, await answers.whole(), answers.usage)

    try:
        done = await run_until_disconnect(
            answered(),
            disconnect_of(request.scope, request.receive),
            over=serving.over,
            deadline=deadline,
            cut=live.cut,
        )
    except BaseException as error:
        serving.live.end(live, error if isinstance(error, QuireError) else QuireError("gone"))
        raise
    if isinstance(done, Response):
        return done
    serving.live.end(live)
    return Response(done, headers=begun.headers(), media_type="application/json")


def _streamed(
    serving: ServerState, begun: RequestContext, events: Events, live: OpenRequest
) -> Response:
    """The stream; resumable where that was asked for and there is room."""
    headers = begun.headers()
    wants = (begun.given.get("stream_options") or {}).get("resumable")
    if not wants or not serving.tellings.has_room():
        return EventStream(serving, events, headers, begun.deadline, live)
    telling = ResumableStream(serving, events, begun.deadline, live)
    serving.tellings.add(telling)
    headers["x-quire-resume-seconds"] = f"{serving.config.resume_s:g}"
    return FollowStream(serving, telling, headers)


def _asker(request: Request) -> Requester:
    return Requester(request.state.key, request.state.name)


def _progress(answers: ChoiceStreams) -> RequestProgress:
    usage = answers.usage
    return RequestProgress(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        finish_reasons=answers.reasons,
    )


async def _written(job: GenerationJob, choices: Sequence[Sequence[Choice]], usage: Usage) -> bytes:
    """The body; one that tells of whole prompts is long, and is written beside the loop."""

    def written() -> bytes:
        return msgspec.json.encode(job.writer.whole(choices, usage))

    is_long = any(prompt.sampling.prompt_logprobs is not None for prompt in job.prompts)
    return await asyncio.to_thread(written) if is_long else written()


def usage_json(usage: Usage, *, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """`usage` as both APIs write it. reasoning_tokens: where answers have reasoning."""
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **_details(usage)},
        **({"completion_tokens_details": details} if details else {}),
        **({"timings": msgspec.to_builtins(usage.timings)} if usage.timings else {}),
    }


def _details(usage: Usage) -> dict[str, Any]:
    """Where cached tokens were found, and for each prompt why no more; if that was asked for."""
    if not usage.cache_uses:
        return {}
    return {
        "cached_tokens_details": {
            "pool": sum(use.pool_tokens for use in usage.cache_uses),
            "host": sum(use.host_tokens for use in usage.cache_uses),
            "disk": sum(use.disk_tokens for use in usage.cache_uses),
            "misses": [
                None if use.miss is None else {"reason": use.miss.reason, "token": use.miss.token}
                for use in usage.cache_uses
            ],
        }
    }


def _refuse_ranked(prompts: Sequence[Prompt]) -> None:
    """The best are known when all have ended: then there is nothing left to stream."""
    for sampling in (prompt.sampling for prompt in prompts):
        if sampling.is_ranked:
            raise InvalidParameter(
                f"best_of is {sampling.best_of}, n is {sampling.n} and stream is true; which are "
                "the best is known when all have ended: leave stream out, or make best_of equal "
                "to n",
                param="best_of",
            )


def _stream_options(given: Mapping[str, Any], *, stream: bool) -> StreamOptions:
    options = given.get("stream_options")
    if options is None:
        return StreamOptions()
    if not isinstance(options, dict):
        raise InvalidParameter(
            f"stream_options is {show(options)}; an object is allowed", param="stream_options"
        )
    if not stream:
        raise InvalidParameter(
            "stream_options is given without stream: true; leave it out", param="stream_options"
        )
    for name, value in options.items():
        if value is not None and (name not in STREAM_OPTIONS or not isinstance(value, bool)):
            raise InvalidParameter(
                f"stream_options has {show(name)}: {show(value)}; include_usage: true or false is "
                "allowed",
                param="stream_options",
            )
    return StreamOptions(
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
    )
