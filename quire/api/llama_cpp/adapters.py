"""GET and POST /lora-adapters: the LoRA adapters of the server, which has none.

Front ends of llama.cpp list adapters at their start, and programs set scales of all of them. Always
holds: a scale of an adapter is refused, never ignored; a list without one changes nothing.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.parameterless import refuse_query
from quire.api.http.request_io import read_body
from quire.base.errors import InvalidParameter

MAX_BODY_BYTES = 64 * 1024
_FORM = '[{"id": 0, "scale": 1.0}]'


class AdapterScale(msgspec.Struct):
    """An entry of the body of POST /lora-adapters."""

    id: int
    scale: float


class AdapterRoutes:
    """The two routes."""

    async def get(self, request: Request) -> Response:
        """Return the adapters."""
        refuse_query(request)
        return _json([])

    async def post(self, request: Request) -> Response:
        """Set the scales of no adapters. Raises InvalidParameter for any other number."""
        refuse_query(request)
        raw = await read_body(request, MAX_BODY_BYTES)
        try:
            scales = msgspec.json.decode(raw, type=list[AdapterScale])
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise InvalidParameter(
                f"the body cannot be used: {error}; a list such as {_FORM} is allowed, and [] here"
            ) from error
        if scales:
            raise InvalidParameter(
                f"a scale is given for adapter {scales[0].id}, and no adapters are loaded; merge "
                "an adapter into its model with peft, serve that, and send []",
                param="id",
            )
        return _json({"success": True})


def _json(content: object) -> Response:
    return Response(
        msgspec.json.encode(content),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )
