"""The routes that are sent to replicas, and what differs between them.

Knows paths only: bodies are read by RoutedRequest, and api_forms.py has what differs by API.
Always holds: a path that matches a row here goes to a replica, under the rules of that row; of all
others NOT_ROUTED says why not, or they are unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

# What the parts of a path in braces may be. A path is decoded when it is matched, and encoded again
# when it is sent.
_PARTS = {"{id}": r"[A-Za-z0-9_-]{1,100}", "{model}": r"[^\x00-\x1f\x7f]{1,1000}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """streams: whether an answer is a stream unless the body has `stream`. generates: whether it
    computes output tokens. stores: whether a replica keeps the answer. is_free: it computes
    nothing, and no quota counts it. stream_in_query: replicas read `stream` of the query.
    model_fields: fields of the body with the model, the first that is given; a path with {model}
    has it there instead. metric: its name in metrics; "" for its path."""

    methods: tuple[str, ...] = ("POST",)
    streams: bool = False
    generates: bool = True
    stores: bool = False
    is_free: bool = False
    stream_in_query: bool = False
    model_fields: tuple[str, ...] = ("model",)
    metric: str = ""


@dataclass(frozen=True, slots=True)
class FoundRoute:
    """The route of one path. name: its row of ROUTES. model: in the path; None where the body has
    it."""

    name: str
    route: Route
    model: str | None

    def path_of(self, model: str) -> str:
        """Return the path for another model."""
        return self.name.replace("{model}", model)


RESPONSES = "/v1/responses"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
_FREE = Route(generates=False, is_free=True)
_VECTORS = Route(generates=False)
# Of a response that one replica has stored: nothing is computed anew.
_STORED = Route(
    methods=("GET", "POST", "DELETE"),
    generates=False,
    is_free=True,
    stream_in_query=True,
    metric=f"{RESPONSES}/ID",
)
ROUTES: dict[str, Route] = {
    "/v1/chat/completions": Route(),
    "/v1/completions": Route(),
    "/generate": Route(),
    RESPONSES: Route(stores=True),
    INPUT_TOKENS: _FREE,
    f"{RESPONSES}/{{id}}": _STORED,
    f"{RESPONSES}/{{id}}/cancel": _STORED,
    f"{RESPONSES}/{{id}}/input_items": _STORED,
    "/v1/messages": Route(),
    "/v1/messages/count_tokens": _FREE,
    "/tokenize": _FREE,
    "/detokenize": _FREE,
    "/apply_template": _FREE,
    "/apply-template": _FREE,
    "/v1/embeddings": _VECTORS,
    "/pooling": _VECTORS,
    "/v1/score": _VECTORS,
    "/v1/rerank": _VECTORS,
    "/v1/reranking": _VECTORS,
    "/api/chat": Route(streams=True),
    "/api/generate": Route(streams=True),
    "/api/embed": _VECTORS,
    "/api/embeddings": _VECTORS,
    "/api/show": Route(generates=False, is_free=True, model_fields=("model", "name")),
    "/api/version": Route(methods=("GET",), generates=False, is_free=True),
    "/completion": Route(),
    "/infill": Route(),
    "/embedding": _VECTORS,
}
# The rows without braces: a path is its row's.
_PLAIN = {name: FoundRoute(name, one, None) for name, one in ROUTES.items() if "{" not in name}
# Lists of the models that replicas serve, each put together from those of all replicas.
LISTS = ("/api/tags", "/api/ps")

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
    "/health/beats": "a replica's beats are its own, and the router reads them; ask each replica",
    "/props": "each replica has its own settings; ask each replica",
    "/slots": "each replica has its own slots; ask each replica",
    "/lora-adapters": "each replica has its own adapters; ask each replica",
    "/api": "of Ollama's routes /api/chat, /api/generate, /api/embed, /api/embeddings, /api/show, "
    "/api/tags, /api/ps and /api/version are routed",
}


def find_route(path: str) -> FoundRoute | None:
    """Return the route of a path; None for a path that is not sent to replicas."""
    if (found := _PLAIN.get(path)) is not None:
        return found
    for name, route in ROUTES.items():
        if "{" in name and (match := _pattern(name).fullmatch(path)) is not None:
            return FoundRoute(name, route, match.groupdict().get("model"))
    return None


def route_of(path: str) -> FoundRoute:
    """Return the route of a path. Raises LookupError for one that is not sent to replicas."""
    found = find_route(path)
    if found is None:
        raise LookupError(f"ROUTES has no row for the path {path[:100]!r}")
    return found


def reason_not_routed(path: str) -> str:
    """Return why a path of the server is not routed; "" for an unknown path."""
    for top, why in NOT_ROUTED.items():
        if path == top or path.startswith(f"{top}/"):
            return why
    return ""


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a row with parts in braces."""
    found = re.escape(name)
    for part, allowed in _PARTS.items():
        found = found.replace(re.escape(part), f"(?P<{part[1:-1]}>{allowed})")
    return re.compile(found)
