"""GET /v1/models and /v1/models/{id} in the form of Anthropic's API.

The model is listed once under each of its names, in one page or several (`limit`, `after_id`,
`before_id`). Always holds: what is not known of a model is null.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.anthropic.paging import page_query
from quire.api.generation.request_context import unknown_model
from quire.api.server_state import ServerState
from quire.engine.model_card import ModelCard

MAX_LISTED, NUM_LISTED = 1000, 20


class AnthropicModelsRoutes:
    """The routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def list(self, request: Request) -> Response:
        """List the model under each of its names. Raises InvalidParameter."""
        card = self._server_state.engine().card
        query = page_query(request, num_listed=NUM_LISTED, max_listed=MAX_LISTED)
        names = list(card.names)
        if query.after is not None:
            names = names[_place(card, query.after) + 1 :]
        if query.before is not None:
            names = names[: _place(card, query.before)][-query.limit - 1 :]
            listed = names[-query.limit :]
        else:
            listed = names[: query.limit]
        return _json(
            {
                "data": [self._model(card, name) for name in listed],
                "has_more": len(names) > len(listed),
                "first_id": listed[0] if listed else None,
                "last_id": listed[-1] if listed else None,
            }
        )

    async def one(self, request: Request) -> Response:
        """Return a model by name. Raises UnknownModel."""
        card = self._server_state.engine().card
        name = request.path_params["name"]
        _place(card, name)
        return _json(self._model(card, name))

    def _model(self, card: ModelCard, name: str) -> dict[str, Any]:
        cap_tokens = self._server_state.config.max_output_tokens
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(card.created_s, UTC).isoformat(),
            "max_input_tokens": card.max_model_len,
            "max_tokens": min(card.max_model_len, cap_tokens or card.max_model_len),
            "lifecycle": "active",
            **dict.fromkeys(("capabilities", "deprecated_at", "line", "retires_at")),
        }


def _place(card: ModelCard, name: str) -> int:
    if name not in card.names:
        raise unknown_model(name, card)
    return card.names.index(name)


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
