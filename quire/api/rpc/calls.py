"""One gRPC call: its key, its generation request, its errors, its entry in the metrics.

A call is the request of POST /v1/completions that its fields make: it takes the same path through
the checks, so its tokens are those of the same request over HTTP. Always holds: a client that
cancels, disconnects or reaches its deadline ends its request in the engine.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.generation.choice_streams import ChoiceStreams
from quire.api.generation.fields import COMPLETIONS
from quire.api.generation.generate import (
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    generate,
)
from quire.api.generation.usage import Usage
from quire.api.http.auth import Caller
from quire.api.http.dialect import Dialect
from quire.api.http.errors import report_of
from quire.api.http.request_io import Deadline, run_until_disconnect
from quire.api.rpc.statuses import code_of, details_of
from quire.base.errors import BodyTooLarge, InvalidParameter, NotAuthorized, QuireError
from quire.engine.output.output_stream import TextDelta

if TYPE_CHECKING:
    from quire.api.server_state import ServerState

Read = Callable[[GenerationRequest], Coroutine[Any, Any, GenerationJob]]
Take = Callable[[str, TextDelta], Awaitable[None]]
# What a message has no place for.
_NOT_CARRIED = {
    *("stream", "stream_options", "echo", "suffix", "logprobs", "prompt_logprobs"),
    *("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids", "return_timings"),
    *("timings", "timings_per_token", "return_progress", "return_cached_tokens_details"),
    *("output_ids", "output_cursor"),
}
FIELDS = COMPLETIONS - _NOT_CARRIED
_DISCONNECTED = 499
Context: TypeAlias = Any  # grpc.aio.ServicerContext, which has no types


class WholeMessages:
    """The context of a streaming call, with each of its messages written whole.

    A cancelled task does not cancel its write: gRPC refuses the status of a call while its
    first message is half written (TOO_MANY_OPERATIONS), and the client would wait to its deadline.
    A client that does not read holds up its own status only; the server's end ends it.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._writing: asyncio.Future[None] | None = None
        self.invocation_metadata = context.invocation_metadata

    async def write(self, message: Any) -> None:
        """Write a message; if cancelled, leave it to be written to its end."""
        self._writing = asyncio.ensure_future(self._context.write(message))
        await asyncio.shield(self._writing)

    async def abort(self, code: Any, details: str, metadata: Any = ()) -> None:
        """End the call with a status once the last message is written. Always raises."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._context.abort(code, details, metadata)


class Calls:
    """The calls of one server. read: checks the fields of a completion; dialect: its own."""

    def __init__(self, server_state: ServerState, read: Read, dialect: Dialect) -> None:
        self.server_state = server_state
        self._read, self._dialect = read, dialect

    async def answered(
        self, context: Context, path: str, work: Callable[[Caller], Awaitable[Any]]
    ) -> Any:
        """Return what `work` returns for the sender of a call, or end the call with an error."""
        state, status = self.server_state, 500
        state.metrics.opened()
        try:
            with state.track_request(counts=True):
                result = await work(self._caller(context, path))
            status = 200
            return result
        except QuireError as error:
            status = report_of(error).status
            state.count_error(error)
            await context.abort(code_of(status), str(error), tuple(details_of(error)))
        except asyncio.CancelledError:
            status = _DISCONNECTED
            state.metrics.disconnect()
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  a bug: report it, and keep serving
            state.log.error("gRPC call failed", traceback=traceback.format_exc())
            fault = QuireError(f"internal error ({type(error).__name__}); the server's log has it")
            state.count_error(fault)
            await context.abort(grpc.StatusCode.INTERNAL, str(fault))
        finally:
            state.metrics.answered(route=path, status=status)

    async def generate(
        self, caller: Caller, path: str, fields: dict[str, Any], take: Take
    ) -> tuple[str, Usage]:
        """Run a request; hand the id and each delta to `take`. Return the id and the usage.

        Raises RequestError and the engine's errors.
        """
        body = msgspec.json.encode(fields)
        limit_bytes = self.server_state.config.max_body_bytes
        if len(body) > limit_bytes:
            raise BodyTooLarge(
                f"the request has {len(body)} bytes; at most {limit_bytes} are allowed (--max-body)"
            )
        request = _request_of(path, caller, body)
        route = GenerationRoute(
            honoured=FIELDS, id_prefix="rpc-", read=self._job, dialect=self._dialect
        )
        response = await generate(self.server_state, request, route)
        assert isinstance(response, _Answers), "_job makes one of each request"
        return await self._delivered(request, response.answers, take)

    async def _job(self, request: GenerationRequest) -> GenerationJob:
        job = await self._read(request)
        if any(prompt.sampling.is_ranked for prompt in job.prompts):
            raise InvalidParameter(
                "best_of is more than n; which choices are the best is known when all have ended, "
                "and a call sends them as they are generated: leave best_of out",
                param="best_of",
            )
        return replace(job, respond=_Answers)

    async def _delivered(
        self, request: Request, answers: ChoiceStreams, take: Take
    ) -> tuple[str, Usage]:
        state, open_ = self.server_state, request.state.open_request

        async def deliver() -> None:
            async with aclosing(answers.deltas()) as deltas:
                async for _, delta in deltas:
                    await take(open_.id, delta)

        try:
            await run_until_disconnect(
                deliver(),
                None,
                over=state.lifecycle.grace_over,
                deadline=Deadline(state.config.request_timeout_s),
                cut=open_.cut,
            )
        except BaseException as error:
            state.requests.end(
                open_, error if isinstance(error, QuireError) else QuireError("gone")
            )
            raise
        state.requests.end(open_)
        return open_.id, answers.usage

    def _caller(self, context: Context, path: str) -> Caller:
        """Return the sender of a call. Raises NotAuthorized."""
        sent = dict(context.invocation_metadata() or ())

        def read_key() -> bytes:
            scheme, _, key = _bytes(sent.get("authorization", "")).partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
            key = _bytes(sent.get("x-api-key", "")).strip()
            if not key:
                raise NotAuthorized(
                    "no API key was sent; send the metadata `authorization: Bearer KEY`, or "
                    "`x-api-key: KEY`"
                )
            return key

        return self.server_state.keys.check(path, read_key)


class _Answers(Response):
    """The streams of a call, in place of a response."""

    def __init__(self, answers: ChoiceStreams) -> None:
        super().__init__()
        self.answers = answers


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _request_of(path: str, caller: Caller, body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def endpoint(request: Request) -> Response:
        raise NotImplementedError(path)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "route": Route(path, endpoint),
        "state": {
            "key": caller.key,
            "name": "",
            "trace": "",
            "tenant": caller.tenant,
            "is_admin": False,
        },
        "quire.disconnected": asyncio.get_running_loop().create_future(),
    }
    return Request(scope, receive)
