"""GET /openapi.json and /docs: the OpenAPI document of the server, and a page of it.

The modules that write them are imported at the first request, which makes the start faster. Always
holds: on a server with keys, neither describes the model, because neither needs a key.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.server_state import ServerState

if TYPE_CHECKING:
    from quire.api.openapi.field_schemas import Known

_ADDRESS = re.compile(r"https?://[\w.\-\[\]:]{1,255}(/[\w.\-/]*)?")


class DocumentRoutes:
    """The two routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._written: dict[tuple[str, str], bytes] = {}

    async def get(self, request: Request) -> Response:
        """Return the document."""
        content = self._content(request, msgspec.json.encode)
        return Response(
            content, media_type="application/json", headers={"cache-control": "no-cache"}
        )

    async def page(self, request: Request) -> Response:
        """Return the document as a page."""
        from quire.api.openapi.page import ORIGIN, headers, written

        origin = escape(_origin(request) + self._server_state.config.root_path).encode()
        content = self._content(request, written).replace(ORIGIN.encode(), origin)
        return Response(content, headers=headers(has_script=self._server_state.config.web_page))

    def _content(self, request: Request, write: Any) -> bytes:
        """Return the content, written once for each state: it changes when the model has loaded."""
        from quire.api.openapi.document import document

        known = self._known()
        key = (write.__name__, " ".join(known.models))
        if key not in self._written:
            routes = request.scope["router"].routes
            root_path = self._server_state.config.root_path
            content = document(routes, known, self._server_state.keys.needed, root_path=root_path)
            self._written[key] = write(content)
        return self._written[key]

    def _known(self) -> Known:
        from quire.api.openapi.field_schemas import Known

        config, engine = self._server_state.config, self._server_state.loaded_engine
        known = Known(
            max_output_tokens=config.max_output_tokens,
            warns_unknown=config.unknown_fields == "warn",
        )
        if engine is None or self._server_state.keys:
            return known
        return replace(
            known,
            models=engine.card.names,
            vocab_size=engine.card.vocab_size,
            context_tokens=engine.card.max_model_len,
            defaults=engine.default_sampling(),
        )


def _origin(request: Request) -> str:
    """Return the address of the request, or a default if it is malformed."""
    try:
        address = str(request.base_url).rstrip("/")
    except ValueError:
        address = ""
    return address if _ADDRESS.fullmatch(address) else "http://localhost:8000"
