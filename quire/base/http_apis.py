"""The HTTP APIs that are served: which of them has a path, and the headers in which each has keys.

The server, its document and the router read what is here, so that they agree. Knows no request and
no body. Always holds: each path belongs to one API; a served path is its own served path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

OPENAI, RESPONSES = "openai", "responses"
MODELS = "models"  # of OpenAI and of Anthropic, at the same paths
ANTHROPIC, OLLAMA, LLAMA_CPP = "anthropic", "ollama", "llama.cpp"
# By path or prefix of paths, of one part or two; all other paths are OpenAI's.
API_PATHS: dict[str, str] = {
    "/v1/messages": ANTHROPIC,
    "/v1/models": MODELS,
    "/v1/responses": RESPONSES,
    "/api": OLLAMA,
    "/completion": LLAMA_CPP,
    "/infill": LLAMA_CPP,
    "/embedding": LLAMA_CPP,
    "/embeddings": LLAMA_CPP,
    "/props": LLAMA_CPP,
    "/slots": LLAMA_CPP,
    "/lora-adapters": LLAMA_CPP,
}
# Served below /v1; clients with a base URL without /v1 request them without it.
_VERSIONED = ("/chat/completions", "/completions", "/models")
# What clients of Ollama may add to the name of a model.
MODEL_TAG = ":latest"
AUTHORIZATION = b"authorization"
# Of answers of a server with several API processes: the number of the one that has answered.
PROCESS_HEADER = b"x-quire-process"
# Of answers that a model has computed: the fingerprint of these, as /v1/models lists it.
FINGERPRINT_HEADER = b"x-quire-fingerprint"
# Of the response of an error that has a code: that code, as not every API has one in its errors.
ERROR_CODE_HEADER = b"x-quire-error-code"
# Headers that may have the key; the first that has one counts.
KEY_HEADERS: dict[str, tuple[bytes, ...]] = {
    OPENAI: (AUTHORIZATION,),
    MODELS: (b"x-api-key", AUTHORIZATION),
    RESPONSES: (AUTHORIZATION,),
    ANTHROPIC: (b"x-api-key", AUTHORIZATION),
    OLLAMA: (AUTHORIZATION,),
    LLAMA_CPP: (AUTHORIZATION, b"x-api-key"),
}


def api_of(path: str) -> str:
    """Return the API of a path."""
    parts = path.split("/", 3)[:3]
    return API_PATHS.get("/".join(parts)) or API_PATHS.get("/".join(parts[:2]), OPENAI)


def served_path(path: str) -> str:
    """Return `path` as the routes have it: without trailing slashes, with a missing /v1 added."""
    path = path.rstrip("/") or "/"
    if path in _VERSIONED or path.startswith("/models/"):
        return f"/v1{path}"
    return path


@cache
def any_key_headers(api: str = OPENAI) -> tuple[bytes, ...]:
    """Return the headers with keys of all APIs, those of `api` first."""
    return tuple(dict.fromkeys([*KEY_HEADERS[api], *sum(KEY_HEADERS.values(), ())]))


def header_in(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """Return the value of a header, the first where it is sent twice; b"" without it."""
    return next((value for found, value in headers if found == name), b"")


def key_in(headers: Iterable[tuple[bytes, bytes]], names: Collection[bytes]) -> bytes:
    """Return the key in the first of the headers `names` that has one; b"" without one.

    Of a header that is sent twice the first counts. An authorization is read without its scheme,
    which must be Bearer.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in names:
            found.setdefault(name, value)
    for name in names:
        key = found.get(name, b"").strip()
        if name == AUTHORIZATION:
            scheme, _, key = key.partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else b""
        if key:
            return key
    return b""
