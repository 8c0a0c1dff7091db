"""GET /version, and / for people who come with a browser.

Knows nothing of the model or the engine: both answer while the model loads, and need no key.
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
    """The version of this package."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was never installed


async def show_version(request: Request) -> Response:
    """The version of this server."""
    content = msgspec.json.encode({"name": "quire", "version": installed_version()})
    return Response(content, media_type="application/json")


class Pointer:
    """What is served here, in a few lines. root_path: what stands before it all."""

    def __init__(self, root_path: str) -> None:
        self._text = _POINTER.replace(" /", f" {root_path}/")

    async def show(self, request: Request) -> Response:
        """The lines."""
        return PlainTextResponse(self._text)
