"""GET /props and /slots: the server and its running requests, for front ends of llama.cpp.

There are no slots here: a request may use the whole cache, and /slots has an entry for each request
that may run at once. It counts the requests of all tenants, so it is for admins (auth.py guards the
path). Always holds: no answer has a text or an id of another request.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.engine_protocol import Engine
from quire.api.http.parameterless import refuse_query
from quire.api.llama_cpp.request import Returned
from quire.api.llama_cpp.settings import settings_json
from quire.api.server_state import ServerState
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.errors import TokenizerError
from quire.base.version import installed_version
from quire.engine.model_card import ModelCard


class ServerViews:
    """The two routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def props(self, request: Request) -> Response:
        """Return the properties of the server."""
        refuse_query(request)
        return _json(_props(self._server_state.engine()))

    async def slots(self, request: Request) -> Response:
        """Return the running requests."""
        refuse_query(request)
        engine = self._server_state.loaded_engine or self._server_state.engine()
        return _json(_slots(await engine.engine_snapshot(), engine.card))


def _props(engine: Engine) -> dict[str, Any]:
    card, special = engine.card, engine.tokenizer.special_tokens
    ends = [engine.tokenizer.token_text(id_) for id_ in card.eos_ids[:1]]
    settings = settings_json(engine.default_sampling(), Returned())
    return {
        "default_generation_settings": {"n_ctx": card.max_model_len, "params": settings},
        "total_slots": card.max_num_seqs,
        "model_alias": card.name,
        "model_path": card.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": _template(engine),
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ends[0] if ends else ""),
        "build_info": f"quire {installed_version()}",
        "is_sleeping": False,
    }


def _template(engine: Engine) -> str:
    try:
        return "" if engine.template is None else engine.template.source()
    except TokenizerError:  # an unusable template
        return ""


def _slots(shot: EngineSnapshot, card: ModelCard) -> list[dict[str, Any]]:
    running = list(shot.running)
    slots = []
    for at in range(max(shot.slots_total, len(running))):
        one = running[at] if at < len(running) else None
        slots.append(
            {
                "id": at,
                "id_task": -1 if one is None else one.request,
                "n_ctx": card.max_model_len,
                "speculative": card.speculates,
                "is_processing": one is not None,
                "n_prompt_tokens": 0 if one is None else one.prompt_tokens,
                "n_prompt_tokens_cache": 0 if one is None else one.cached_tokens,
                "n_decoded": 0 if one is None else max(one.known_tokens - one.prompt_tokens, 0),
            }
        )
    return slots


def _json(content: Any) -> Response:
    return Response(
        msgspec.json.encode(content),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )
