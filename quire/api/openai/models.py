"""GET /v1/models and /v1/models/{id}: the served model; /tokenizer_info: its tokenizer.

The model is listed once under each of its names. Beside OpenAI's fields a model has its context
length, dtype, precision and the fingerprint of answers. /tokenizer_info is for programs that
tokenize over /tokenize instead of loading tokenizer files.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.generation.request_context import unknown_model
from quire.api.server_state import ServerState
from quire.base.errors import TokenizerError
from quire.engine.model_card import ModelCard
from quire.text.chat_template import ChatTemplate


class ModelsRoutes:
    """The routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def list(self, request: Request) -> Response:
        """List the model under each of its names."""
        card = self._server_state.engine().card
        models = [self._model(card, name) for name in card.names]
        return _json({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        """Return a model by name. Raises UnknownModel."""
        card = self._server_state.engine().card
        name = request.path_params["name"]
        if name not in card.names:
            raise unknown_model(name, card)
        return _json(self._model(card, name))

    async def tokenizer(self, request: Request) -> Response:
        """Return the named tokens of the tokenizer's configuration, and the chat template."""
        engine = self._server_state.engine()
        tokenizer, template = engine.tokenizer, engine.template
        ends = [tokenizer.token_text(id_) for id_ in engine.card.eos_ids[:1]]
        return _json(
            {
                "bos_token": None,
                "eos_token": ends[0] if ends else None,
                **tokenizer.special_tokens,
                "model_max_length": engine.card.max_model_len,
                "chat_template": _source(template),
            }
        )

    def _model(self, card: ModelCard, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": card.created_s,
            "owned_by": "quire",
            "max_model_len": card.max_model_len,
            "vocab_size": card.vocab_size,
            "dtype": card.dtype,
            "quantization": card.quantization,
            "kv_cache_dtype": card.kv_cache_dtype,
            "system_fingerprint": self._server_state.fingerprint(card),
            "shutdown_date": None,
        }


def _source(template: ChatTemplate | None) -> str | None:
    """Return the source of the default template; None for an unusable one."""
    try:
        return None if template is None else template.source()
    except TokenizerError:
        return None


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
