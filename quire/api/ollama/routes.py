"""The routes of Ollama's API, as app.py lists them.

Routes of a store of models (pull, push, create, copy, delete, blobs) are not served; http/paths.py
says what to use in place of each. Knows no vectors: app.py hands in what reads their fields.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.generation.generate import GenerationRoute, generate
from quire.api.ollama.chat import read_chat
from quire.api.ollama.dialect import OLLAMA
from quire.api.ollama.embed import embed_routes
from quire.api.ollama.fields import OLLAMA_CHAT, OLLAMA_GENERATE
from quire.api.ollama.generate import read_generate
from quire.api.ollama.models import OllamaModelsRoutes
from quire.api.ollama.prompted import LoadedResponse, Read
from quire.api.ollama.request import as_named_here
from quire.api.server_state import ServerState
from quire.base.http_apis import MODEL_TAG

# True unless a request says otherwise; durations are in each answer.
_IMPLIED = frozenset({"stream", "return_timings"})


def ollama_routes(server_state: ServerState, read_vectors: Read) -> list[Route]:
    """Return the routes of this API. read_vectors: checks the fields of /v1/embeddings."""
    models = OllamaModelsRoutes(server_state)
    chat = AnsweringRoute(server_state, OLLAMA_CHAT, read_chat, id_prefix="chat-")
    complete = AnsweringRoute(server_state, OLLAMA_GENERATE, read_generate, id_prefix="gen-")
    return [
        Route("/api/chat", chat.post, methods=["POST"]),
        Route("/api/generate", complete.post, methods=["POST"]),
        *embed_routes(server_state, read_vectors),
        Route("/api/tags", models.tags, methods=["GET"]),
        Route("/api/ps", models.ps, methods=["GET"]),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/version", models.version, methods=["GET"]),
    ]


class AnsweringRoute:
    """A route that generates."""

    def __init__(
        self, server_state: ServerState, honoured: frozenset[str], read: Read, *, id_prefix: str
    ) -> None:
        self._server_state = server_state
        self._route = GenerationRoute(
            honoured=honoured,
            id_prefix=id_prefix,
            read=read,
            dialect=OLLAMA,
            implied=_IMPLIED,
            model_suffix=MODEL_TAG,
            as_named_here=as_named_here,
        )

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        response = await generate(self._server_state, request, self._route)
        if isinstance(response, LoadedResponse):
            self._server_state.requests.end(request.state.open_request)
        return response
