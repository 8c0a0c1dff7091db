"""The routes of /v1/models, in OpenAI's form, or in Anthropic's for requests with its header.

Both APIs have these paths. Clients of Anthropic's say which version they read (`anthropic-version`)
and send their key as `x-api-key`, which is read here for that reason. Errors have OpenAI's form,
since they may precede the route.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.anthropic.models import MAX_LISTED, NUM_LISTED, AnthropicModelsRoutes
from quire.api.anthropic.paging import limit_of
from quire.api.http.dialect import Headers
from quire.api.openai.dialect import OpenAIDialect
from quire.api.openai.models import ModelsRoutes
from quire.api.server_state import ServerState
from quire.base.http_apis import KEY_HEADERS, MODELS, key_in

PATH = "/v1/models"
_VERSION = "anthropic-version"


class ModelsDialect(OpenAIDialect):
    """OpenAI's conventions with the key header of both APIs."""

    def read_key(self, headers: Headers) -> bytes:
        """Return the key of `x-api-key: KEY` or `Authorization: Bearer KEY`.

        Raises NotAuthorized.
        """
        return key_in(headers, KEY_HEADERS[MODELS]) or super().read_key(headers)


MODELS_DIALECT = ModelsDialect()


def model_routes(server_state: ServerState) -> list[Route]:
    """Return the routes."""
    openai, anthropic = ModelsRoutes(server_state), AnthropicModelsRoutes(server_state)

    async def listed(request: Request) -> Response:
        if _VERSION in request.headers:
            return await anthropic.list(request)
        limit_of(request, num_listed=NUM_LISTED, max_listed=MAX_LISTED)  # of the one page
        return await openai.list(request)

    async def one(request: Request) -> Response:
        routes = anthropic if _VERSION in request.headers else openai
        return await routes.one(request)

    return [
        Route("/tokenizer_info", openai.tokenizer, methods=["GET"]),
        Route(PATH, listed, methods=["GET"]),
        Route(f"{PATH}/{{name:path}}", one, methods=["GET"]),
    ]
