"""GET /api/tags, /api/ps and /api/version, POST /api/show: the served model, for Ollama's clients.

A server has one model, under one or several names, so the lists have it once for each name. `size`
is that of the model's files, and `digest` changes with anything that answers depend on. Clients
compare the version with Ollama's, so /api/version is the release of Ollama that this API is of.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.engine_protocol import Engine
from quire.api.generation.fields import flag
from quire.api.generation.request_context import is_served, open_request, unknown_model
from quire.api.http.parameterless import refuse_query
from quire.api.ollama.answer_writer import moment
from quire.api.ollama.fields import OLLAMA_SHOW
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter, QuireError, TokenizerError
from quire.base.gguf_model import find_gguf
from quire.base.gguf_open import open_gguf
from quire.base.http_apis import MODEL_TAG
from quire.base.show import show
from quire.config.server_config import ServerConfig
from quire.engine.model_card import ModelCard
from quire.output_parsers.selection import select_parsers
from quire.text.infill import infill_prompt

# The release of Ollama that these routes follow.
API_VERSION = "0.13.0"
# The model is not unloaded. A year that every time zone's clients can write.
_YEARS_100 = timedelta(days=36_525)
# As Ollama writes the number of parameters: so many digits behind the point, unless all are 0.
_UNITS = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))
_CUDA = "torch-cuda"
_ARCHITECTURE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WEIGHTS = (".safetensors", ".gguf")
_UNKNOWN = "unknown"


class OllamaModelsRoutes:
    """The routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._files: dict[str, tuple[int, str]] = {}  # bytes and architecture, by path

    async def tags(self, request: Request) -> Response:
        """List the model."""
        engine, config = self._server_state.engine(), self._server_state.config
        found = await asyncio.to_thread(_capabilities, engine, config)
        return _json({"models": await self._listed(request, {"capabilities": found})})

    async def ps(self, request: Request) -> Response:
        """List the model, which is always loaded."""
        card = self._server_state.engine().card
        expires_at = (datetime.now(UTC) + _YEARS_100).replace(microsecond=0).isoformat()
        running = {"expires_at": expires_at, "context_length": card.max_model_len}
        listed = await self._listed(request, running)
        on_gpu = card.recipe.startswith(_CUDA)
        models = [{**model, "size_vram": model["size"] if on_gpu else 0} for model in listed]
        return _json({"models": models})

    async def version(self, request: Request) -> Response:
        """Return the version of the API."""
        refuse_query(request)
        return _json({"version": API_VERSION})

    async def show(self, request: Request) -> Response:
        """Describe the model. Raises RequestError."""
        context = await open_request(
            self._server_state,
            request,
            honoured=OLLAMA_SHOW,
            id_prefix="show-",
            model_suffix=MODEL_TAG,
        )
        given, engine = context.given, context.engine
        flag(given, "verbose")  # without effect: no tensors are listed
        _refuse_changes(given)
        name = given.get("name") or given.get("model")
        if not isinstance(name, str) or not name:
            found = "missing" if name is None else show(name)
            raise InvalidParameter(
                f"model is {found}; the name of the model is needed", param="model"
            )
        if not is_served(name, engine.card, MODEL_TAG):
            raise unknown_model(name, engine.card, param="name")
        content = await asyncio.to_thread(_description, engine, self._server_state.config)
        return Response(
            msgspec.json.encode(content), headers=context.headers(), media_type="application/json"
        )

    async def _listed(self, request: Request, more: Mapping[str, Any]) -> list[dict[str, Any]]:
        refuse_query(request)
        card = self._server_state.engine().card
        if card.path not in self._files:
            self._files[card.path] = await asyncio.to_thread(_facts_of_files, card.path)
        size_bytes, family = self._files[card.path]
        return [
            {
                "name": name,
                "model": name,
                "modified_at": moment(card.created_s),
                "size": size_bytes,
                "digest": hashlib.sha256(card.fingerprint.encode()).hexdigest(),
                "details": _details(card, family),
                **more,
            }
            for name in card.names
        ]


def _refuse_changes(given: Mapping[str, Any]) -> None:
    """Refuse to show the model as it would be with other parts; clients send these empty."""
    for name, empty in (("system", ""), ("template", ""), ("options", {})):
        if given.get(name, empty) != empty:
            raise InvalidParameter(
                f"{name} is {show(given[name])}; the model is shown as it is served: leave it out",
                param=name,
            )


def _facts_of_files(path: str) -> tuple[int, str]:
    """Return the bytes of the weights, and the architecture."""
    return _size_bytes(path), _family(path)


def _size_bytes(path: str) -> int:
    """Return the bytes of the weights; 0 if their files are elsewhere."""
    place = Path(path)
    try:
        files = [place] if place.is_file() else list(place.iterdir())
        return sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS)
    except OSError:
        return 0


def _details(card: ModelCard, family: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if card.path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _short_number(card.num_parameters),
        "quantization_level": card.dtype if card.quantization == "none" else card.quantization,
        "context_length": card.max_model_len,
    }


def _short_number(number: int) -> str:
    """Return a number of parameters as Ollama writes it; "" if it is not known."""
    for unit, letter, digits in _UNITS:
        if number >= unit:
            exact = number % unit == 0
            return f"{number / unit:.{0 if exact else digits}f}{letter}"
    return str(number) if number else ""


def _description(engine: Engine, config: ServerConfig) -> dict[str, Any]:
    """Return the body of /api/show. Reads the model's configuration, if it is a file."""
    card, family = engine.card, _family(engine.card.path)
    defaults = [
        f"{name} {one if isinstance(one, str) else f'{one:g}'}"
        for name, value in sorted(card.generation_defaults.items())
        for one in (value if isinstance(value, tuple) else (value,))
    ]
    return {
        "modelfile": f"# {card.name}: this model has no Modelfile",
        "parameters": "\n".join(defaults),
        "template": _template(engine),
        "details": _details(card, family),
        "model_info": {
            "general.architecture": family,
            "general.basename": card.name,
            **({"general.parameter_count": card.num_parameters} if card.num_parameters else {}),
            f"{family}.context_length": card.max_model_len,
            f"{family}.vocab_size": card.vocab_size,
        },
        "capabilities": _capabilities(engine, config),
        "modified_at": moment(card.created_s),
    }


def _family(path: str) -> str:
    """Return the architecture that the model's configuration names, or its GGUF file."""
    try:
        file = find_gguf(Path(path))
        if file is not None:
            return _named(open_gguf(file).metadata.get("general.architecture"))
        configuration = msgspec.json.decode((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError, QuireError):
        return _UNKNOWN
    return _named(configuration.get("model_type") if isinstance(configuration, dict) else None)


def _named(kind: Any) -> str:
    is_name = isinstance(kind, str) and _ARCHITECTURE.fullmatch(kind)
    return kind if is_name else _UNKNOWN


def _template(engine: Engine) -> str:
    try:
        return "" if engine.template is None else engine.template.source()
    except TokenizerError:  # an unusable template
        return ""


def _capabilities(engine: Engine, config: ServerConfig) -> list[str]:
    pooling, source = engine.card.pooling, _template(engine)
    found = ["embedding"] if pooling is not None and pooling.embeds else []
    if not engine.card.generates:
        return found
    found.append("completion")
    if source and engine.template is not None:
        parsers = select_parsers(
            source, tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
        )
        if parsers.tools is not None and engine.template.reads("tools"):
            found.append("tools")
        if parsers.reasoning is not None:
            found.append("thinking")
    if infill_prompt(engine.tokenizer, "a", "b") is not None:
        found.append("insert")
    return found


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
