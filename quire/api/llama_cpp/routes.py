"""The native routes of llama.cpp's server, as app.py lists them.

/tokenize, /detokenize and /apply-template are in native/tokenize.py, which answers both forms; the
other paths of that server are in http/paths.py, with what to use in their place.
"""

from __future__ import annotations

from starlette.routing import Route

from quire.api.generation.generate import endpoint
from quire.api.llama_cpp.adapters import AdapterRoutes
from quire.api.llama_cpp.completion import COMPLETION, INFILL
from quire.api.llama_cpp.embedding import Read, embedding_routes
from quire.api.llama_cpp.server_views import ServerViews
from quire.api.server_state import ServerState


def llama_cpp_routes(server_state: ServerState, read_vectors: Read) -> list[Route]:
    """Return the routes of this API for every key. read_vectors: checks the fields of
    /v1/embeddings."""
    adapters = AdapterRoutes()
    return [
        Route("/completion", endpoint(server_state, COMPLETION), methods=["POST"]),
        Route("/infill", endpoint(server_state, INFILL), methods=["POST"]),
        *embedding_routes(server_state, read_vectors),
        Route("/props", ServerViews(server_state).props, methods=["GET"]),
        Route("/lora-adapters", adapters.get, methods=["GET"]),
        Route("/lora-adapters", adapters.post, methods=["POST"]),
    ]


def llama_cpp_admin_routes(server_state: ServerState) -> list[Route]:
    """Return the routes for admins."""
    return [Route("/slots", ServerViews(server_state).slots, methods=["GET"])]
