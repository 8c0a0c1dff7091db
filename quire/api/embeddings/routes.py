"""The routes of embeddings and scores: one table of paths, fields and readers.

Errors follow the dialect that app.py hands in. A route without a model that can answer it refuses
with what to start. Knows no engine beyond its card.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.routing import Route

from quire.api.embeddings.fields import EMBEDDINGS, POOLING, RERANK, SCORE
from quire.api.embeddings.scores import read_rerank, read_score
from quire.api.embeddings.vectors import read_embeddings, read_pooling
from quire.api.generation.generate import (
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    endpoint,
)
from quire.api.http.dialect import Dialect
from quire.api.server_state import ServerState

Reader = Callable[[GenerationRequest], Coroutine[Any, Any, GenerationJob]]

_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
_ROUTES: tuple[tuple[tuple[str, ...], frozenset[str], str, Reader], ...] = (
    (("/v1/embeddings",), EMBEDDINGS, "embd-", read_embeddings),
    (("/pooling",), POOLING, "pool-", read_pooling),
    (("/v1/score", "/score"), SCORE, "score-", read_score),
    (_RERANK_PATHS, RERANK, "rerank-", read_rerank),
)


def embedding_routes(server_state: ServerState, dialect: Dialect) -> list[Route]:
    """Return the routes."""
    return [
        Route(
            path,
            endpoint(
                server_state,
                GenerationRoute(honoured=honoured, id_prefix=prefix, read=read, dialect=dialect),
            ),
            methods=["POST"],
        )
        for paths, honoured, prefix, read in _ROUTES
        for path in paths
    ]
