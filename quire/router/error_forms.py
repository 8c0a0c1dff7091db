"""The errors of the router in the form of each API: OpenAI's, Anthropic's, Ollama's, llama.cpp's.

A client of one API finds its errors where that API has them, in a response and in a stream. Knows
no request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.router.faults import Refusal
from quire.router.routes import ANTHROPIC, LLAMA_CPP, OLLAMA

_ANTHROPIC_TYPES = {404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
_LLAMA_CPP_TYPES = {404: "not_found_error", 429: "unavailable_error", 503: "unavailable_error"}


def error_body(form: str, refusal: Refusal) -> bytes:
    """Return the body of an error response."""
    return msgspec.json.encode(_object(form, refusal))


def error_event(form: str, path: str, refusal: Refusal) -> bytes:
    """Return the last event of a stream that cannot go on."""
    if path.startswith("/v1/responses"):
        error = _openai(refusal)
        event = {"type": "error", **{name: error[name] for name in ("code", "message", "param")}}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
    raw = error_body(form, refusal)
    if form == OLLAMA:
        return raw + b"\n"
    if form == ANTHROPIC:
        return b"event: error\ndata: %b\n\n" % raw
    return b"data: %b\n\n" % raw


def _object(form: str, refusal: Refusal) -> dict[str, Any]:
    message, status = str(refusal), refusal.status
    if form == OLLAMA:
        return {"error": message}
    if form == ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status) or _kind_of(status)
        kind = "api_error" if kind == "server_error" else kind
        return {"type": "error", "error": {"type": kind, "message": message}}
    if form == LLAMA_CPP:
        kind = _LLAMA_CPP_TYPES.get(status) or _kind_of(status)
        return {"error": {"code": status, "message": message, "type": kind}}
    return {"error": _openai(refusal)}


def _openai(refusal: Refusal) -> dict[str, Any]:
    return {
        "message": str(refusal),
        "type": _kind_of(refusal.status),
        "param": refusal.param,
        "code": refusal.code,
    }


def _kind_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"
