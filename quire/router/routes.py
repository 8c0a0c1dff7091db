"""The routes that are sent to replicas, and what differs between them.

Knows paths only: bodies are read by RoutedRequest. Always holds: a path that is here or of a
stored response goes to a replica; of all others NOT_ROUTED says why not, or they are unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPENAI, ANTHROPIC, OLLAMA, LLAMA_CPP = "openai", "anthropic", "ollama", "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """form: of errors and events. streams: whether an answer is a stream unless the body has
    `stream`. is_continuable: whether a stream can be continued from output_ids. generates: whether
    it computes output tokens. is_free: it computes nothing, and no quota counts it."""

    method: str = "POST"
    form: str = OPENAI
    streams: bool = False
    is_continuable: bool = False
    generates: bool = True
    is_free: bool = False


_FREE = Route(generates=False, is_free=True)
_VECTORS = Route(generates=False)
ROUTES: dict[str, Route] = {
    "/v1/chat/completions": Route(is_continuable=True),
    "/v1/completions": Route(is_continuable=True),
    "/generate": Route(is_continuable=True),
    "/v1/responses": Route(),
    "/v1/messages": Route(form=ANTHROPIC),
    "/v1/messages/count_tokens": Route(form=ANTHROPIC, generates=False, is_free=True),
    "/tokenize": _FREE,
    "/detokenize": _FREE,
    "/apply_template": _FREE,
    "/apply-template": _FREE,
    "/v1/embeddings": _VECTORS,
    "/pooling": _VECTORS,
    "/v1/score": _VECTORS,
    "/v1/rerank": _VECTORS,
    "/api/chat": Route(form=OLLAMA, streams=True),
    "/api/generate": Route(form=OLLAMA, streams=True),
    "/api/embed": Route(form=OLLAMA, generates=False),
    "/api/embeddings": Route(form=OLLAMA, generates=False),
    "/api/show": Route(form=OLLAMA, generates=False, is_free=True),
    "/api/version": Route(method="GET", form=OLLAMA, generates=False, is_free=True),
    "/completion": Route(form=LLAMA_CPP),
    "/infill": Route(form=LLAMA_CPP),
    "/embedding": Route(form=LLAMA_CPP, generates=False),
}
# Lists of the models that replicas serve, each put together from those of all replicas.
LISTS = ("/api/tags", "/api/ps")
RESPONSES = "/v1/responses"
# Of a stored response. A path is decoded, so it must not hold what ends a request line.
STORED_PATH = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,100}(?:/cancel|/input_items)?")

NOT_ROUTED = {
    "/v1/requests": "requests are listed by the replica that has them; ask each replica",
    "/v1/engine": "each replica has its own engine; ask each replica",
    "/v1/cache": "each replica has its own cache; ask each replica",
    "/v1/files": "files are kept by one server; send them and their batches to one replica",
    "/v1/batches": "batches are kept by one server; send them and their files to one replica",
    "/v1/messages/batches": "batches are kept by one server; send them to one replica",
    "/v1/conversations": "conversations are kept by one server; send them, and the responses that "
    "use them, to one replica",
    "/admin": "admin routes act on one server; send them to each replica",
    "/props": "each replica has its own settings; ask each replica",
    "/slots": "each replica has its own slots; ask each replica",
    "/api": "of Ollama's routes /api/chat, /api/generate, /api/embed, /api/embeddings, /api/show, "
    "/api/tags, /api/ps and /api/version are routed",
}


def form_of(path: str) -> str:
    """Return the form of the errors of a path."""
    found = ROUTES.get(path)
    if found is not None:
        return found.form
    return OLLAMA if path.startswith("/api/") else OPENAI
