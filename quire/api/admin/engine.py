"""GET /v1/engine: the queue, the running batch and the KV blocks of the engine at one moment.

For admins (auth.py guards the path): the report covers the requests of all tenants, as numbers
without ids and texts. The engine computes it when it is requested and at no other time. It is
served while the server drains too, when an admin watches the last requests end.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.parameterless import refuse_query
from quire.api.server_state import ServerState
from quire.base.engine_snapshot import EngineSnapshot
from quire.engine.model_card import ModelCard


class EngineRoutes:
    """The route."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def get(self, request: Request) -> Response:
        """Return the snapshot."""
        refuse_query(request)
        engine = self._server_state.loaded_engine or self._server_state.engine()
        content = snapshot_json(await engine.engine_snapshot(), engine.card)
        return Response(
            msgspec.json.encode(content, enc_hook=_as_list),
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )


def snapshot_json(shot: EngineSnapshot, card: ModelCard) -> dict[str, Any]:
    """Return the snapshot as JSON, with records and arrays that msgspec still has to encode."""
    return {
        "object": "engine",
        "steps_total": shot.steps_total,
        "steps_in_flight": shot.steps_in_flight,
        "slots_total": shot.slots_total,
        "running_total": shot.running_total,
        "waiting_total": shot.waiting_total,
        "held_total": shot.held_total,
        "running": shot.running,
        "waiting": shot.waiting,
        "blocks": {
            "size": shot.block_size,
            "bytes_each": card.block_bytes,
            "total": shot.blocks_total,
            "per_cell": shot.blocks_per_cell,
            "owners": shot.owners,
            "run_lengths": shot.run_lengths,
            "run_owners": shot.run_owners,
        },
        "tiers": shot.tiers,
        "limits": shot.limits,
        "step_prices": shot.step_prices,
    }


def _as_list(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
