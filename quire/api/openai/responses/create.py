"""POST /v1/responses: answer a conversation in the form of OpenAI's Responses API.

The prompt, the parameters and so the tokens are those of the same chat at /v1/chat/completions. A
finished response is stored before the client has its last byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from quire.api.generation.generate import (
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    generate,
)
from quire.api.openai.responses.conversations import ConversationRoutes, Conversations
from quire.api.openai.responses.dialect import RESPONSES_DIALECT
from quire.api.openai.responses.fields import RESPONSES
from quire.api.openai.responses.input_tokens import InputTokensRoute
from quire.api.openai.responses.item_ids import RESPONSE_PREFIX
from quire.api.openai.responses.request import as_named_here
from quire.api.openai.responses.response_request import ResponseRequest
from quire.api.openai.responses.store import ResponseStore
from quire.api.openai.responses.stored_routes import Forward, StoredRoutes
from quire.api.server_state import ServerState
from quire.api.streaming.event_stream import PacedResponse


def responses_routes(
    server_state: ServerState, store: ResponseStore, forward: Forward | None = None
) -> list[Route]:
    """Return the routes of this API. forward: asks the other API processes."""
    conversations = Conversations(store)
    create = ResponsesRoute(server_state, store, conversations)
    return [
        Route("/v1/responses", create.post, methods=["POST"]),
        Route(
            "/v1/responses/input_tokens",
            InputTokensRoute(server_state, store, conversations).post,
            methods=["POST"],
        ),
        *StoredRoutes(server_state, store, forward).routes(),
        *ConversationRoutes(server_state, store, conversations).routes(),
    ]


class ResponsesRoute:
    """The route."""

    def __init__(
        self, server_state: ServerState, store: ResponseStore, conversations: Conversations
    ) -> None:
        self._server_state = server_state
        self._store, self._conversations = store, conversations
        # Each request replaces `read` and `dialect` by its own.
        self._route = GenerationRoute(
            honoured=RESPONSES,
            id_prefix=RESPONSE_PREFIX,
            read=_read,
            dialect=RESPONSES_DIALECT,
            as_named_here=as_named_here,
        )

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        asked = ResponseRequest(self._server_state, self._store, self._conversations, request)
        route = replace(self._route, read=asked.read, dialect=asked.dialect)
        response = await generate(self._server_state, request, route)
        if asked.is_background:
            return response
        if isinstance(response, PacedResponse):
            return _SavedStream(response, asked.save)
        await asked.save()
        return response


async def _read(request: GenerationRequest) -> GenerationJob:
    """Not used: the route of each request has its own."""
    raise NotImplementedError(request.envelope.id)


class _SavedStream(Response):
    """A stream, with `save` awaited before its last part is sent."""

    def __init__(self, stream: Response, save: Callable[[], Awaitable[None]]) -> None:
        self.raw_headers = stream.raw_headers
        self._stream = stream
        self._save = save

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_when_saved(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await self._save()
            await send(message)

        await self._stream(scope, receive, send_when_saved)
