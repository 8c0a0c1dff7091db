"""Run a generation request: from the body to the response, streamed or whole.

A route hands in a GenerationRoute: its fields, how they are checked, and its dialect. Scheduling
fields, the salt of cached prefixes and the options of streams are read here, because every route
has them; answers and errors are written by the route. Invariants: nothing reaches the engine before
every field has been checked; requests of one cache scope share prefixes with no other scope,
whatever salts are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.engine_protocol import Engine
from quire.api.generation.answer_json import speeds_json, usage_json
from quire.api.generation.choice_streams import ChoiceStreams, Prompt, PromptState
from quire.api.generation.continued_answer import CONTINUATION, continued_streams
from quire.api.generation.fields import SCHEDULING, flag, limited
from quire.api.generation.kv_transfer import with_transfer
from quire.api.generation.request_context import RequestContext, open_request
from quire.api.generation.speculation_fields import speculation_params
from quire.api.generation.stream_cursor import Cursor, read_cursors
from quire.api.generation.usage import Usage, UsageOptions
from quire.api.generation.whole_answer import whole_answer
from quire.api.http.dialect import Dialect
from quire.api.http.request_io import disconnect_of, run_until_disconnect
from quire.api.server_state import OpenRequest, Requester, RequestProgress, ServerState
from quire.api.streaming.continuable_events import continuable
from quire.api.streaming.event_stream import Events, EventStream, Writer
from quire.api.streaming.resumable_stream import resumable_response
from quire.base.errors import InvalidParameter, QuireError
from quire.base.rare_records import CachePin
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.base.show import show
from quire.config.server_config import ServerConfig
from quire.config.tenants import ONLY_TENANT, Tenant

STREAM_OPTIONS = {
    *("include_usage", "include_obfuscation", "continuous_usage_stats", "resumable"),
    "include_output_ids",
}
MAX_SALT_CHARS = 256
BACKGROUND = "quire.background"  # in the scope of a request that is computed beside all others
# Surrounds a cache scope; no salt of a request may begin with it.
_SEAL = "\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields that identify an answer in its body and in every chunk."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def frame(self, kind: str) -> dict[str, Any]:
        """Return the first fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of a stream. include_usage: a last chunk has the usage. continuous_usage,
    continuous_timings: every chunk has them so far. output_ids: see ContinuableEvents."""

    include_usage: bool = False
    continuous_usage: bool = False
    continuous_timings: bool = False
    resumable: bool = False
    output_ids: bool = False


class ChunkWriter:
    """The part of a Writer that is the same for all routes: progress and usage of a stream.

    frame: the fields that every chunk begins with.
    """

    def __init__(self, frame: dict[str, Any], options: StreamOptions) -> None:
        self._frame = frame
        self._options = options

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Return a chunk of prompt progress."""
        return {
            **self._frame,
            "choices": [],
            "prompt_progress": msgspec.to_builtins(progress),
        }

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return the usage and timings that every chunk has."""
        included = {"usage": self._usage(usage)} if self._options.continuous_usage else {}
        return {**included, **(speeds_json(usage) if self._options.continuous_timings else {})}

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """Return the last chunk, with usage and timings; None if neither was requested."""
        if not self._options.include_usage and usage.speeds is None:
            return None
        included = {"usage": self._usage(usage)} if self._options.include_usage else {}
        return {**self._frame, "choices": [], **included, **speeds_json(usage)}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Return the object of `usage`."""
        return usage_json(usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A request after the check of all its fields. respond: returns the response, if the request
    continues without its client. cache_pins: prefixes of the prompt to keep. streams: runs it."""

    prompts: Sequence[Prompt]
    writer: Writer
    respond: Callable[[ChoiceStreams], Response] | None = None
    cache_pins: tuple[CachePin, ...] = ()
    streams: Callable[..., ChoiceStreams] = ChoiceStreams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """The input of a route's `read`: the known fields, the engine, the envelope of the answer."""

    context: RequestContext
    given: Mapping[str, Any]
    engine: Engine
    envelope: Envelope
    stream_options: StreamOptions
    config: ServerConfig

    def limited(
        self, sampling: SamplingParams, num_prompt_tokens: int, *, default_tokens: int | None
    ) -> SamplingParams:
        """Return `sampling` with a max_tokens that the context and the server have room for.

        default_tokens: without a max_tokens; None: the rest of the context.
        """
        room_tokens = self.engine.card.max_model_len - num_prompt_tokens
        return limited(
            sampling,
            default_tokens=room_tokens if default_tokens is None else default_tokens,
            room_tokens=room_tokens,
            cap_tokens=self.config.max_output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRoute:
    """What one route adds.

    honoured: the names of its fields. id_prefix: of answer ids. read: checks the fields; raises
    RequestError. dialect: as in app.DIALECTS for its path. implied: flags that default to true.
    always_streams: without a field `stream`. query_params: parameters of the query that are taken,
    as `context.query`. path_model: the part of the path with the model; "": a field has it.
    model_suffix: that a client may add to a name of the model.
    as_named_here: returns an error with the names that fields have in the API; None: with ours.
    """

    honoured: frozenset[str]
    id_prefix: str
    read: Callable[[GenerationRequest], Coroutine[Any, Any, GenerationJob]]
    dialect: Dialect
    implied: frozenset[str] = frozenset()
    always_streams: bool = False
    query_params: frozenset[str] = frozenset()
    path_model: str = ""
    model_suffix: str = ""
    as_named_here: Callable[[InvalidParameter, Mapping[str, Any]], InvalidParameter] | None = None

    async def job(self, request: GenerationRequest) -> GenerationJob:
        """Return the job of a request. Raises RequestError with the API's names of fields."""
        try:
            return await self.read(request)
        except InvalidParameter as error:
            if self.as_named_here is None:
                raise
            raise self.as_named_here(error, request.given) from error


async def generate(server_state: ServerState, request: Request, route: GenerationRoute) -> Response:
    """Answer a generation request. Raises RequestError and the engine's errors."""
    context, given = await _opened(server_state, request, route)
    engine = context.engine
    cache_salt = cache_salt_of(given, tenant := request.state.tenant)
    terms = scheduling_params_of(given, tenant, background=BACKGROUND in request.scope)
    if "speculation" in given or "prediction" in given:
        terms = replace(terms, speculation=await speculation_params(context))
    if "kv_transfer_params" in given:
        terms, route = with_transfer(given, terms, route, engine.card)
    options = _stream_options(given, stream=(stream := flag(given, "stream")))
    cursors, cursor = read_cursors(given, context) if "output_cursor" in given else ((), None)
    generation_request = GenerationRequest(
        context=context,
        given=given,
        engine=engine,
        envelope=_envelope(server_state, context, cursor),
        stream_options=options,
        config=server_state.config,
    )
    usage_options = UsageOptions(
        has_several_users=server_state.has_several_users and not cache_salt,
        timings=flag(given, "return_timings"),
        speeds=flag(given, "timings") or options.continuous_timings,
    )
    open_ = _register(server_state, request, context.request_id, stream=stream)

    async def answer() -> bytes | Response:
        """Return the body of a whole answer, or the response that streams it."""
        if not server_state.lifecycle.accepting.is_set() and given.get("background") is not True:
            await server_state.lifecycle.wait_while_paused()
            server_state.engine()  # it may have died meanwhile
        job = await route.job(generation_request)
        answers = _streams_of(job, given, cursors, engine)(
            engine,
            server_state.metrics,
            job.prompts,
            context.request_id,
            cache_salt=cache_salt,
            terms=replace(terms, cache_pins=job.cache_pins) if job.cache_pins else terms,
            usage_options=usage_options,
        )
        request.state.answers = answers
        open_.read_progress = lambda: _progress(answers)
        if job.respond is not None:
            return job.respond(answers)
        if not stream:
            return await whole_answer(
                server_state, job.prompts, job.writer, answers, context, open_
            )
        events = _events_of(job, generation_request)(
            answers,
            job.writer,
            route.dialect,
            context.answer_id,
            continuous_usage=options.continuous_usage or options.continuous_timings,
            reports_progress=terms.report_progress,
        )
        if cursor is not None:
            events.number = cursor.num_events
        is_kept = options.resumable and server_state.resumable_streams.has_room()
        respond: Callable[..., Response] = resumable_response if is_kept else EventStream
        return respond(server_state, events, context.headers(), context.deadline, open_)

    try:
        answered = await run_until_disconnect(
            answer(),
            disconnect_of(request.scope, request.receive),
            over=server_state.lifecycle.grace_over,
            deadline=context.deadline,
            cut=open_.cut,
        )
    except BaseException as error:
        known = error if isinstance(error, QuireError) else QuireError("gone")
        server_state.requests.end(open_, known)
        raise
    if isinstance(answered, Response):
        return answered
    server_state.requests.end(open_)
    return Response(answered, headers=context.headers(), media_type="application/json")


def endpoint(
    server_state: ServerState, route: GenerationRoute
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return the function that answers the requests of a route."""

    async def post(request: Request) -> Response:
        return await generate(server_state, request, route)

    return post


async def _opened(
    server_state: ServerState, request: Request, route: GenerationRoute
) -> tuple[RequestContext, dict[str, Any]]:
    """Return the context of a request, and its fields with those that the route implies."""
    context = await open_request(
        server_state,
        request,
        honoured=route.honoured,
        id_prefix=route.id_prefix,
        query_params=route.query_params,
        path_model=route.path_model,
        model_suffix=route.model_suffix,
    )
    always = {"stream": True} if route.always_streams else {}
    return context, {**dict.fromkeys(route.implied, True), **context.given, **always}


def _streams_of(
    job: GenerationJob, given: Mapping[str, Any], cursors: Sequence[Cursor | None], engine: Engine
) -> Callable[..., ChoiceStreams]:
    """Return what runs the prompts of a job."""
    if CONTINUATION.isdisjoint(given):
        return job.streams
    return continued_streams(given, job.prompts, job.writer, cursors, engine.card.vocab_size)


def _events_of(job: GenerationJob, request: GenerationRequest) -> Callable[..., Events]:
    """Return what writes the events of a job's stream. Raises InvalidParameter for ranked ones."""
    _refuse_ranked(job.prompts)
    options = request.stream_options
    return continuable(request.envelope, options) if options.output_ids else Events


def _envelope(
    server_state: ServerState, context: RequestContext, cursor: Cursor | None
) -> Envelope:
    card = context.engine.card
    return Envelope(
        id=context.answer_id,
        created_s=int(time.time()) if cursor is None else cursor.created_s,
        model=card.name,
        fingerprint=server_state.fingerprint(card),
    )


def _register(
    server_state: ServerState, request: Request, request_id: str, *, stream: bool
) -> OpenRequest:
    """Enter the request into the registry of open requests."""
    requester = Requester(request.state.key, request.state.name)
    open_ = OpenRequest(request_id, requester, request.scope["route"].path, stream)
    server_state.requests.begin(open_)
    request.state.open_request = open_
    if server_state.on_begin is not None:
        server_state.on_begin(open_, request)
    return open_


def _progress(answers: ChoiceStreams) -> RequestProgress:
    usage = answers.usage
    return RequestProgress(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        finish_reasons=answers.reasons,
    )


def _refuse_ranked(prompts: Sequence[Prompt]) -> None:
    """Refuse to stream the best of several sequences, which are known only at the end."""
    for sampling in (prompt.sampling for prompt in prompts):
        if sampling.is_ranked:
            raise InvalidParameter(
                f"best_of is {sampling.best_of}, n is {sampling.n} and stream is true; which are "
                "the best is known when all have ended: leave stream out, or make best_of equal "
                "to n",
                param="best_of",
            )


def _stream_options(given: Mapping[str, Any], *, stream: bool) -> StreamOptions:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidParameter(
            f"stream_options is {show(options)}; an object is allowed", param="stream_options"
        )
    for name in () if stream else {"stream_options", "include_output_ids"} & given.keys():
        raise InvalidParameter(
            f"{name} is given without stream: true; add that, or leave it out", param=name
        )
    for name, value in options.items():
        if value is not None and (name not in STREAM_OPTIONS or not isinstance(value, bool)):
            raise InvalidParameter(
                f"stream_options has {show(name)}: {show(value)}; allowed are true or false as "
                f"{', '.join(sorted(STREAM_OPTIONS))}",
                param="stream_options",
            )
    return StreamOptions(
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        continuous_timings=flag(given, "timings_per_token"),
        resumable=bool(options.get("resumable")),
        output_ids=bool(options.get("include_output_ids")) or flag(given, "include_output_ids"),
    )


def scheduling_params_of(
    given: Mapping[str, Any], tenant: Tenant, *, background: bool = False
) -> SchedulingParams:
    """Return the scheduling parameters of a request. Raises InvalidParameter naming the field."""
    fields = {name: given[name] for name in SCHEDULING & given.keys()}
    reports_progress = flag(given, "return_progress") and flag(given, "stream")
    if tenant is ONLY_TENANT and not (fields or reports_progress or background):
        return DEFAULT_SCHEDULING
    terms = SchedulingParams(
        tenant=tenant.name_in_requests,
        report_progress=reports_progress,
        background=background,
        **{"priority": tenant.priority, **fields},
    )
    if not tenant.priority_min <= terms.priority <= tenant.priority_max:
        raise InvalidParameter(
            f"priority is {terms.priority}; tenant {tenant.name} may ask for "
            f"{tenant.priority_min} to {tenant.priority_max} (lower is served earlier)",
            param="priority",
        )
    return terms


def cache_salt_of(given: Mapping[str, Any], tenant: Tenant) -> str:
    """Return the salt of a request's cached prefixes. Raises InvalidParameter."""
    salt = given.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARS or salt.startswith(_SEAL):
        raise InvalidParameter(
            f"cache_salt is {show(salt)}; a text of at most {MAX_SALT_CHARS} characters is "
            "allowed, the first of them not U+0000",
            param="cache_salt",
        )
    return f"{_SEAL}{tenant.cache_scope}{_SEAL}{salt}" if tenant.cache_scope else salt
