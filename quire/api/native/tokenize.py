"""POST /tokenize, /detokenize and /apply_template: the prompt of a model, without an answer.

They return exactly what /v1/completions and /v1/chat/completions hand to the engine: the same
fields, defaults, text and ids. A text as `content` is read and answered as llama.cpp's server does.
The context length is not enforced, so that a client can find out by how much a text exceeds it;
only a text far beyond it is refused. Always holds: long work runs in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.engine_protocol import Engine
from quire.api.generation.chat_output import Conversation
from quire.api.generation.conversation import conversation_fields, rendered
from quire.api.generation.fields import APPLY_TEMPLATE, CONVERSATION, DETOKENIZE, TOKENIZE, flag
from quire.api.generation.request_context import RequestContext, open_request
from quire.api.generation.text_bounds import check_text_bytes
from quire.api.generation.tools import offer_of
from quire.api.http.request_io import disconnect_of, run_until_disconnect
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter
from quire.base.show import show

Read = Callable[[RequestContext], Coroutine[Any, Any, bytes]]


class TokenizeRoutes:
    """The three routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a prompt or of messages."""
        return await self._answer(request, TOKENIZE, "tokn-", _tokenized)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids."""
        return await self._answer(request, DETOKENIZE, "detok-", _detokenized)

    async def apply_template(self, request: Request) -> Response:
        """Return the text of messages."""
        return await self._answer(request, APPLY_TEMPLATE, "templ-", _applied)

    async def _answer(
        self, request: Request, honoured: frozenset[str], id_prefix: str, read: Read
    ) -> Response:
        context = await open_request(
            self._server_state, request, honoured=honoured, id_prefix=id_prefix
        )
        content = await run_until_disconnect(
            read(context),
            disconnect_of(request.scope, request.receive),
            over=self._server_state.lifecycle.grace_over,
            deadline=context.deadline,
        )
        return Response(content, headers=context.headers(), media_type="application/json")


async def _tokenized(request: RequestContext) -> bytes:
    given, engine = request.given, request.engine
    with_strings = flag(given, "return_token_strs")
    inputs = [name for name in ("messages", "content", "prompt") if name in given]
    if len(inputs) > 1:
        raise InvalidParameter(
            f"{inputs[1]} and {inputs[0]} are both given; give one of them", param=inputs[0]
        )
    param = inputs[0] if inputs else "prompt"
    if param == "messages":
        text = (await _rendered(request)).text
    else:
        text = _text(given, param)
    adds_special = flag(given, "add_special_tokens", default=param == "prompt")
    check_text_bytes(engine, text, param=param)
    make_json = _pieces_json if param == "content" and with_strings else _tokens_json
    return await request.run_in_thread(make_json, engine, text, adds_special, with_strings)


def _text(given: Mapping[str, Any], param: str) -> str:
    for name in CONVERSATION:
        if name in given:
            raise InvalidParameter(f"{name} goes with messages; give messages", param=name)
    text = given.get(param)
    if not isinstance(text, str):
        raise InvalidParameter(
            f"{param} is {'missing' if text is None else show(text)}; a text is needed, or "
            "messages",
            param=param,
        )
    return text


def _tokens_json(engine: Engine, text: str, adds_special: bool, with_strings: bool) -> bytes:
    tokenizer = engine.tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=adds_special)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": engine.card.max_model_len,
        "tokens": token_ids,
    }
    if with_strings:
        answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
    return msgspec.json.encode(answer)


def _pieces_json(engine: Engine, text: str, adds_special: bool, with_strings: bool) -> bytes:
    """Return the answer in llama.cpp's form; a piece of a character is a list of bytes."""
    tokenizer = engine.tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=adds_special)
    tokens = []
    for token_id in token_ids:
        raw = tokenizer.token_bytes(token_id)
        try:
            piece: str | list[int] = raw.decode()
        except UnicodeDecodeError:
            piece = list(raw)
        tokens.append({"id": token_id, "piece": piece})
    counts = {"count": len(tokens), "max_model_len": engine.card.max_model_len}
    return msgspec.json.encode({**counts, "tokens": tokens})


async def _detokenized(request: RequestContext) -> bytes:
    given, engine = request.given, request.engine
    skips = flag(given, "skip_special_tokens")
    return await request.run_in_thread(_text_json, engine, given.get("tokens"), skips)


def _text_json(engine: Engine, tokens: Any, skips: bool) -> bytes:
    if not isinstance(tokens, list):
        found = "missing" if tokens is None else show(tokens)
        raise InvalidParameter(
            f"tokens is {found}; a list of token ids is needed, such as [1, 2]", param="tokens"
        )
    vocab_size = engine.card.vocab_size
    for token_id in tokens:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidParameter(
                f"tokens holds {show(token_id)}; token ids from 0 to {vocab_size - 1} are allowed",
                param="tokens",
            )
    text = engine.tokenizer.decode(tokens, skip_special_tokens=skips)
    return msgspec.json.encode({"prompt": text, "content": text})


async def _applied(request: RequestContext) -> bytes:
    return msgspec.json.encode({"prompt": (await _rendered(request)).text})


async def _rendered(request: RequestContext) -> Conversation:
    return await rendered(request, conversation_fields(request, offer_of(request.given)))
