"""Hints for paths that are not served: what to use in place of the routes of other servers.

FOREIGN_PATHS is one declarative table; its documentation is generated from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

_CHAT = "POST /v1/chat/completions"
_COMPLETE = "POST /v1/completions"
_TOKENS = "POST /generate"
_MODELS = "GET /v1/models"
_HEALTH = "use GET /health"
_RECORD = "use GET /admin/record"
_PAUSE = "use POST /admin/pause"
_TIMELINE = "use GET /v1/requests/ID/timeline"
_ONE_MODEL = "one model is served; it is chosen when the server starts (quire pull downloads one)"

# Paths of other servers, and what to use here.
FOREIGN_PATHS: Mapping[str, str] = {
    # Ollama
    "/api/blobs": _ONE_MODEL,
    "/api/pull": _ONE_MODEL,
    "/api/push": _ONE_MODEL,
    "/api/create": _ONE_MODEL,
    "/api/delete": _ONE_MODEL,
    "/api/copy": _ONE_MODEL,
    # llama.cpp
    "/lora-adapters": "LoRA adapters are not implemented",
    "/slots/ID": "there are no slots to save: any request finds the cached prefix of any other",
    "/v1/chat/completions/input_tokens": "use POST /tokenize with messages",
    "/chat/completions/input_tokens": "use POST /tokenize with messages",
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


def hint_for(path: str, served: Iterable[str]) -> str:
    """Return what to use in place of `path`; "" if no path is close.

    served: the paths of the routes.
    """
    if path.startswith("/api/blobs/"):
        path = "/api/blobs"
    if path.startswith("/slots/"):
        path = "/slots/ID"
    foreign = FOREIGN_PATHS.get(path) or FOREIGN_PATHS.get(path.replace("/v1/v1/", "/v1/"))
    if foreign is not None:
        return foreign
    if path.startswith("/v1/v1/"):
        return f"the base URL has /v1 already; use {path.removeprefix('/v1')}"
    near = get_close_matches(path[:100], list(served), 1)
    return f"the nearest path is {near[0]}" if near else ""
