"""The routes of files and batches, of OpenAI's and Anthropic's API, with the worker of both.

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
    ("/v1/messages/batches", ("POST", "GET")),
    ("/v1/messages/batches/{id}", ("GET", "DELETE")),
    ("/v1/messages/batches/{id}/cancel", ("POST",)),
    ("/v1/messages/batches/{id}/results", ("GET",)),
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
    from quire.api.anthropic.batch_results import BatchResults
    from quire.api.anthropic.batch_routes import MessageBatchRoutes
    from quire.api.batches.journal import BatchJournal
    from quire.api.batches.line_form import by_path
    from quire.api.batches.message_batches import ENDPOINT
    from quire.api.batches.worker import BatchWorker
    from quire.api.openai.batches.batch_routes import BatchRoutes
    from quire.api.openai.batches.file_routes import FileRoutes
    from quire.api.openai.batches.line_usage import usage_of
    from quire.api.openai.batches.output_lines import OutputLines

    journal = BatchJournal(path)
    endpoints = by_path(routes, ENDPOINTS, OutputLines(), usage_of)
    endpoints |= by_path(routes, (ENDPOINT,), BatchResults())
    worker = BatchWorker(server_state, journal, endpoints)
    return [
        *FileRoutes(server_state, journal).routes(),
        *BatchRoutes(server_state, journal, worker, ENDPOINTS).routes(),
        *MessageBatchRoutes(server_state, journal, worker).routes(),
    ]


async def _refuse(request: Request) -> Response:
    """Refuse a request for files or batches."""
    raise RequestError(
        "files and batches are off; start the server with --batch-store FILE, where they are kept"
    )
