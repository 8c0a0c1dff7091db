"""GET /v1/models and /v1/models/{id}: the one model served here.

Knows the model's card and nothing of the engine behind it. Beside OpenAI's fields a model has its
context length, its dtype and precision, and the fingerprint that answers carry.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.serving import Serving
from quire.base.errors import UnknownModel
from quire.base.show import show
from quire.engine.card import ModelCard


class Models:
    """The routes."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def list(self, request: Request) -> Response:
        """All models: one."""
        models = [_model(self._serving.engine().card)]
        return _json({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        """A model by name. Raises UnknownModel."""
        card = self._serving.engine().card
        name = request.path_params["name"]
        if name != card.name:
            raise UnknownModel(f"model {show(name)} is not served here; {card.name!r} is")
        return _json(_model(card))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "quire",
        "max_model_len": card.max_model_len,
        "dtype": card.dtype,
        "quantization": card.quantization,
        "kv_cache_dtype": card.kv_cache_dtype,
        "system_fingerprint": card.fingerprint,
    }


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
