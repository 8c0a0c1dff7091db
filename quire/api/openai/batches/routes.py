"""The routes of /v1/files and /v1/batches, with the worker that runs batches.

Without --batch-store each of them answers with how to turn it on, and nothing of SQLite is
imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.server_state import ServerState
from quire.base.errors import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_PATHS = (
    ("/v1/files", ("POST", "GET")),
    ("/v1/files/{id}", ("GET", "DELETE")),
    ("/v1/files/{id}/content", ("GET",)),
    ("/v1/batches", ("POST", "GET")),
    ("/v1/batches/{id}", ("GET",)),
    ("/v1/batches/{id}/cancel", ("POST",)),
)


def batch_routes(server_state: ServerState, routes: Sequence[Route]) -> list[Route]:
    """Return the routes. routes: those that answer the lines.

    Raises SettingError if the journal cannot be opened.
    """
    path = server_state.config.batch_store
    if path is None:
        return [
            Route(path, _refuse, methods=[method]) for path, methods in _PATHS for method in methods
        ]
    # Only if it is used.
    from quire.api.openai.batches.batch_routes import BatchRoutes
    from quire.api.openai.batches.file_routes import FileRoutes
    from quire.api.openai.batches.journal import BatchJournal
    from quire.api.openai.batches.worker import BatchWorker

    journal = BatchJournal(path)
    by_endpoint = {route.path: route for route in routes if route.path in ENDPOINTS}
    worker = BatchWorker(server_state, journal, by_endpoint)
    batches = BatchRoutes(server_state, journal, worker, ENDPOINTS)
    return [*FileRoutes(server_state, journal).routes(), *batches.routes()]


async def _refuse(request: Request) -> Response:
    """Refuse a request for files or batches."""
    raise RequestError(
        "files and batches are off; start the server with --batch-store FILE, where they are kept"
    )
