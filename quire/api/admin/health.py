"""GET /health and /metrics: health as JSON, and metrics for Prometheus.

Health means progress: 200 only in state "ready", and only while steps advance if work is pending;
else 503 with the state ("starting", "ready", "paused", "draining", "restarting", "asleep", "dead")
and the reason, and with `retry-after` where it is known when requests are taken again. `status` and
`error` are what clients of llama.cpp's server read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.errors import error_headers
from quire.api.server_state import ServerState
from quire.base.errors import QuireError
from quire.engine.model_card import Health
from quire.obs.metrics import CONTENT_TYPE


class HealthRoutes:
    """The routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def health(self, request: Request) -> Response:
        """Return state, reason, open streams and steps so far."""
        health = self._server_state.health()
        return Response(
            msgspec.json.encode({**dataclasses.asdict(health), **_status(health)}),
            status_code=200 if health.ok else 503,
            headers={"cache-control": "no-store"} | ({} if health.ok else self._refusal_headers()),
            media_type="application/json",
        )

    async def metrics(self, request: Request) -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(self._server_state.scrape(), headers={"content-type": CONTENT_TYPE})

    def _refusal_headers(self) -> dict[str, str]:
        """Return the headers of a request that would be refused now."""
        try:
            self._server_state.engine()
        except QuireError as refusal:
            return error_headers(refusal)
        return {}


def _status(health: Health) -> dict[str, Any]:
    """Return the health in the form of llama.cpp's server."""
    if health.ok:
        return {"status": "ok"}
    message = health.reason or f"the server is {health.state}"
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return {"status": health.state, "error": error}
