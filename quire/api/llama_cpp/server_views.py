"""GET /props and /slots: the server and its running requests, for front ends of llama.cpp.

There are no slots here: a request may use the whole cache, and /slots has an entry for each request
that may run at once. It counts the requests of all tenants, so it is for admins (auth.py guards the
path). Always holds: no answer has a text or an id of another request. Of the parameters of a
running request only its limit is known here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.engine_protocol import Engine
from quire.api.http.parameterless import refuse_query
from quire.api.llama_cpp.request import DRY_LAST_N, Returned, shown_order
from quire.api.llama_cpp.settings import settings_json
from quire.api.server_state import ServerState
from quire.base.engine_snapshot import EngineSnapshot, RequestSnapshot
from quire.base.errors import OverloadedError, TokenizerError
from quire.base.version import installed_version
from quire.engine.model_card import ModelCard

_FAIL = "fail_on_no_slot"
# What a slot without a request has in place of its counts.
_IDLE: dict[str, Any] = {
    "id_task": -1,
    **dict.fromkeys(("n_prompt_tokens", "n_prompt_tokens_processed"), 0),
    **dict.fromkeys(("n_prompt_tokens_cache", "n_decoded"), 0),
    "params": {},
    "next_token": [],
}


class ServerViews:
    """The two routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def props(self, request: Request) -> Response:
        """Return the properties of the server."""
        refuse_query(request)
        return _json(_props(self._server_state.engine()))

    async def slots(self, request: Request) -> Response:
        """Return the running requests. Raises OverloadedError if the query wants an idle slot and
        there is none."""
        wants_idle = bool(request.query_params.get(_FAIL))
        if any(name != _FAIL for name in request.query_params):
            refuse_query(request)
        engine = self._server_state.loaded_engine or self._server_state.engine()
        slots = _slots(await engine.engine_snapshot(), engine.card)
        if wants_idle and all(slot["is_processing"] for slot in slots):
            raise OverloadedError(
                f"all {len(slots)} slots are in use, and {_FAIL} asks for an idle one; try again "
                "later: a request sent now waits in the queue"
            )
        return _json(slots)


def _props(engine: Engine) -> dict[str, Any]:
    card, special = engine.card, engine.tokenizer.special_tokens
    ends = [engine.tokenizer.token_text(id_) for id_ in card.eos_ids[:1]]
    defaults = replace(engine.default_sampling(), dry_penalty_last_n=DRY_LAST_N)
    order = tuple(shown_order(defaults))
    settings = settings_json(defaults, Returned(samplers=order))
    return {
        "default_generation_settings": {"n_ctx": card.max_model_len, "params": settings},
        "total_slots": card.max_num_seqs,
        "model_alias": card.name,
        "model_path": card.name,
        "model_ftype": card.dtype if card.quantization == "none" else card.quantization,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "<__media__>",
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": _template(engine),
        "chat_template_caps": _capabilities(engine),
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


def _capabilities(engine: Engine) -> dict[str, bool]:
    """Return what the template reads, under llama.cpp's names."""
    template = engine.template
    if not _template(engine) or template is None:
        return {}
    reasoning = ("reasoning_effort", "enable_thinking", "thinking")
    return {
        "supports_string_content": True,
        "supports_tools": template.reads("tools"),
        "supports_reasoning_effort": any(map(template.reads, reasoning)),
    }


def _slots(shot: EngineSnapshot, card: ModelCard) -> list[dict[str, Any]]:
    running = list(shot.running)
    slots = []
    for at in range(max(shot.slots_total, len(running))):
        one = running[at] if at < len(running) else None
        slot = {
            "id": at,
            "n_ctx": card.max_model_len,
            "speculative": card.speculates,
            "is_processing": one is not None,
            **(_IDLE if one is None else _task(one)),
        }
        slots.append(slot)
    return slots


def _task(one: RequestSnapshot) -> dict[str, Any]:
    num_decoded = max(one.known_tokens - one.prompt_tokens, 0)
    limit = one.max_tokens - one.prompt_tokens
    processed = min(one.computed_tokens, one.prompt_tokens) - one.cached_tokens
    return {
        "id_task": one.request,
        "n_prompt_tokens": one.prompt_tokens,
        "n_prompt_tokens_processed": max(processed, 0),
        "n_prompt_tokens_cache": one.cached_tokens,
        "n_decoded": num_decoded,
        "params": {"n_predict": limit, "max_tokens": limit},
        "next_token": [
            {
                "has_next_token": True,
                "n_remain": max(limit - num_decoded, 0),
                "n_decoded": num_decoded,
            }
        ],
    }


def _json(content: Any) -> Response:
    return Response(
        msgspec.json.encode(content),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )
