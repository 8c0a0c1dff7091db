"""GET /version, and / for browsers.

Knows no model and no engine: both routes answer while the model loads, and need no key.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

_POINTER = """Quire serves a language model here, with OpenAI's API.

POST /v1/chat/completions, /v1/completions, /generate, /tokenize, /detokenize, /apply_template
GET  /v1/models, /tokenizer_info, /v1/requests/ID, /health, /metrics, /version
     /docs: a page of all of them; /openapi.json
"""


def installed_version() -> str:
    """Return the version of this package."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was never installed


async def show_version(request: Request) -> Response:
    """Return the version of this server."""
    content = msgspec.json.encode({"name": "quire", "version": installed_version()})
    return Response(content, media_type="application/json")


class Pointer:
    """The overview of the routes. root_path: the prefix of all paths."""

    def __init__(self, root_path: str) -> None:
        self._text = _POINTER.replace(" /", f" {root_path}/")

    async def show(self, request: Request) -> Response:
        """Return the overview."""
        return PlainTextResponse(self._text)
