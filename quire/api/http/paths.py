"""Hints for requests that no route answers: what to use in place of the routes of other servers.

FOREIGN_PATHS is one declarative table; its documentation is generated from it. Entered only by
requests that are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache

_CHAT = "POST /v1/chat/completions"
_COMPLETE = "POST /v1/completions"
_TOKENS = "POST /generate"
_MODELS = "GET /v1/models"
_HEALTH = "use GET /health"
_RECORD = "use GET /admin/record"
_PAUSE = "use POST /admin/pause"
_TIMELINE = "use GET /v1/requests/ID/timeline"
_ONE_MODEL = "one model is served; it is chosen when the server starts (quire pull downloads one)"

_TOKENIZE = "POST /tokenize counts the tokens of messages"
_GEMINI = f"Gemini's API is not served; use {_CHAT}"

# Paths of other servers, and what to use here. A part in braces is any text without a slash
# ({model}: with slashes). With a method before it, a path is served for other methods.
FOREIGN_PATHS: Mapping[str, str] = {
    # Ollama
    "/api/blobs": _ONE_MODEL,
    "/api/blobs/{digest}": _ONE_MODEL,
    "/api/pull": _ONE_MODEL,
    "/api/push": _ONE_MODEL,
    "/api/create": _ONE_MODEL,
    "/api/delete": _ONE_MODEL,
    "/api/copy": _ONE_MODEL,
    # llama.cpp
    "POST /props": "properties are set when the server starts (quire serve --help)",
    "/slots/{id}": "there are no slots to save or restore; cached prefixes are kept by themselves",
    "/v1/models/load": _ONE_MODEL,
    "/v1/models/unload": _ONE_MODEL,
    "/v1/chat/completions/input_tokens": _TOKENIZE,
    "/chat/completions/input_tokens": _TOKENIZE,
    # vLLM and SGLang
    "/responses": "use POST /v1/responses",
    "/ping": _HEALTH,
    "/health_generate": _HEALTH,
    "/invocations": f"use {_CHAT} or {_COMPLETE}",
    "/sleep": "the weights stay in memory; POST /admin/pause holds new requests",
    "/wake_up": "the weights stay in memory; POST /admin/resume ends a pause",
    "/start_profile": "quire profile measures the steps of a model",
    "/stop_profile": "quire profile measures the steps of a model",
    "/update_weights": _ONE_MODEL,
    "/update_weights_from_disk": _ONE_MODEL,
    "/load": "use GET /metrics",
    "/server_info": "use GET /version and GET /v1/models",
    "/get_server_info": "use GET /version and GET /v1/models",
    "/get_model_info": f"use {_MODELS}",
    "/abort_request": "use DELETE /v1/requests/ID",
    "/inference/v1/generate": f"use {_TOKENS}",
    # Anthropic, text-generation-inference, KoboldCpp
    "/messages": "the base URL of Anthropic's clients ends before /v1; use POST /v1/messages",
    "/generate_stream": f"use {_COMPLETE} with stream: true",
    "/info": f"use {_MODELS}",
    "/api/v1/generate": f"use {_COMPLETE}",
    "/api/v1/model": f"use {_MODELS}",
    # Gemini
    "/v1/models/{model}:{call}": _GEMINI,
    "/v1beta/models/{model}:{call}": _GEMINI,
    "/v1beta/models": f"use {_MODELS}",
    # OpenAI
    "/v1/audio/transcriptions": "the model reads and writes text only",
    "/v1/audio/speech": "the model reads and writes text only",
    "/v1/images/generations": "the model reads and writes text only",
    "/v1/moderations": "nothing is moderated here",
    "/v1/load_lora_adapter": "adapters are not supported; merge one into its model with peft",
    "/v1/unload_lora_adapter": "adapters are not supported; merge one into its model with peft",
    "/v1/assistants": f"assistants are not implemented; use {_CHAT}",
    "/v1/threads": f"threads are not implemented; use {_CHAT}",
    "/v1/fine_tuning/jobs": "models are not trained here",
    "/v1/responses/compact": "conversations are not compacted here (only OpenAI's models read a "
    'compaction); send truncation: "auto", or go on from a summary of the model',
    "/v1/realtime": f"there is no socket for speech; use {_CHAT}",
    "/v1/engines": f"use {_MODELS}",
    "/v1/complete": f"use {_COMPLETE}",
    "/complete": f"use {_COMPLETE}",
    # Paths that come near to those here
    "/v1/chat": f"use {_CHAT}",
    "/chat": f"use {_CHAT}; the web page is at /",
    "/web": "the web page is at /",
    "/healthz": _HEALTH,
    "/livez": _HEALTH,
    "/readyz": _HEALTH,
    "/live": _HEALTH,
    "/ready": _HEALTH,
    "/v1/requests": "use GET /v1/requests/ID",
    "/v1/timeline": _TIMELINE,
    "/timeline": _TIMELINE,
    "/v1/record": _RECORD,
    "/record": _RECORD,
    "/v1/pause": _PAUSE,
    "/pause": _PAUSE,
    "/drain": "use POST /admin/drain",
    "/resume": "use POST /admin/resume",
}


_MAX_PATH_CHARS = 500


def hint_for(method: str, path: str, served: Iterable[str]) -> str:
    """Return what to use in place of `path`; "" if no path is close.

    served: the paths of the routes.
    """
    foreign = foreign_hint(method, path) or foreign_hint(method, path.replace("/v1/v1/", "/v1/"))
    if foreign:
        return foreign
    if path.startswith("/v1/v1/"):
        return f"the base URL has /v1 already; use {path.removeprefix('/v1')}"
    near = get_close_matches(path[:100], list(served), 1)
    return f"the nearest path is {near[0]}" if near else ""


def foreign_hint(method: str, path: str) -> str:
    """Return what to use in place of a request to another server; "" for an unknown one."""
    sent = f"{method} {path[:_MAX_PATH_CHARS]}"
    return next((hint for pattern, hint in _patterns() if pattern.fullmatch(sent)), "")


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of FOREIGN_PATHS, of method and path together."""
    found = []
    for name, hint in FOREIGN_PATHS.items():
        pattern = re.escape(name if " " in name else f"* {name}").replace(re.escape("*"), "[A-Z]+")
        pattern = pattern.replace(re.escape("{model}"), ".+")
        found.append((re.compile(re.sub(r"\\{\w+\\}", "[^/]+", pattern)), hint))
    return found
