"""GET /version, and the overviews of the routes at /.

Knows no model and no engine: the route answers while the model loads, and needs no key.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.base.version import installed_version

OVERVIEW = """Quire serves a language model here, with OpenAI's API and those of others.

POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/messages
     (Anthropic's), /api/chat, /api/generate (Ollama's), /completion (llama.cpp's)
     /generate, /tokenize, /detokenize, /apply_template
GET  /v1/models, /tokenizer_info, /v1/requests/ID, /v1/requests/ID/timeline,
     /health, /metrics, /version
     /docs: a page of all of them; /openapi.json
"""
ADMIN_OVERVIEW = """Quire's routes for admins are here; its API is at another port.

GET  /v1/engine, /v1/cache, /admin, /admin/record, /metrics, /health, /version
POST /v1/cache/flush, /admin/pause, /admin/drain, /admin/resume, /admin/sleep, /admin/wake
PUT  /admin/log-level
     /docs: a page of all of them; /openapi.json
"""


async def show_version(request: Request) -> Response:
    """Return the version of this server."""
    content = msgspec.json.encode({"name": "quire", "version": installed_version()})
    return Response(content, media_type="application/json")
